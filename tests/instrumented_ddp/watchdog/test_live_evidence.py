"""What a rank is known to be that has not answered: by what it said before, and by what the kernel says."""

from __future__ import annotations

from instrumented_ddp.watchdog.live_evidence import RankKnowledge, make_evidence
from instrumented_ddp.watchdog.peer_channel import Heartbeat
from instrumented_ddp.watchdog.process_state import GONE, ProcessState
from overlapscope.diagnosis.evidence import RankEvidence
from overlapscope.diagnosis.rank_snapshot import RankSnapshot

BEAT = Heartbeat(rank=0, host="a", host_id="a", pid=1, start_ticks=1, time_ns=1, step=3, phase="loop")


def known(state: str, card: RankSnapshot | None = None) -> RankEvidence:
    one = RankKnowledge(
        card=card, has_answered=False, heartbeat=BEAT, silent_ns=60 * 10**9, process=ProcessState(state=state)
    )
    return make_evidence(2, {0: one}, []).ranks[0]


def test_a_rank_that_is_gone_did_not_stand_still_since_then() -> None:
    one = known(GONE)
    assert (one.liveness, one.idle_ns, one.silent_for_ns) == ("gone", None, 60 * 10**9)


def test_how_a_rank_ended_is_known_from_who_had_started_it() -> None:
    by_itself = RankSnapshot(evidence=RankEvidence(rank=0, exit_status=0))
    by_signal = RankSnapshot(evidence=RankEvidence(rank=0, exit_status=-9))
    assert known(GONE, by_itself).liveness == "ended"
    assert (known(GONE, by_signal).liveness, known(GONE, by_signal).exit_status) == ("gone", -9)


def test_a_rank_that_is_there_and_says_nothing_stands_still() -> None:
    one = known("S")
    assert (one.liveness, one.idle_ns, one.holds_gil) == ("sleeping", 60 * 10**9, True)
