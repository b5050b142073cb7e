"""What a rank is known to be that has not answered: by what it said before, and by what the kernel says."""

from __future__ import annotations

from instrumented_ddp.watchdog.live_evidence import Known, make_evidence
from instrumented_ddp.watchdog.messages import Beat
from instrumented_ddp.watchdog.process_state import GONE, ProcessState
from overlapscope.diagnosis.evidence import RankEvidence

BEAT = Beat(rank=0, host="a", host_id="a", pid=1, start_ticks=1, time_ns=1, step=3, phase="data_wait")


def known(state: str) -> RankEvidence:
    one = Known(has_answered=False, beat=BEAT, silent_ns=60 * 10**9, process=ProcessState(state=state))
    return make_evidence(2, {0: one}, []).ranks[0]


def test_a_rank_that_is_gone_did_not_stand_still_since_then() -> None:
    one = known(GONE)
    assert (one.liveness, one.idle_ns, one.heard_ns_ago) == ("gone", None, 60 * 10**9)


def test_a_rank_that_is_there_and_says_nothing_stands_still() -> None:
    one = known("S")
    assert (one.liveness, one.idle_ns, one.holds_gil) == ("sleeping", 60 * 10**9, True)
