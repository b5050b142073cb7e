"""What is known about a rank that has not answered: from its heartbeat, from /proc, and from its launcher."""

from __future__ import annotations

from instrumented_ddp.watchdog.investigation import RankKnowledge, make_evidence
from instrumented_ddp.watchdog.process_state import GONE, ProcessState
from instrumented_ddp.watchdog.protocol import Heartbeat
from overlapscope.diagnosis.evidence import Failure, RankEvidence, RankPosition
from overlapscope.diagnosis.rank_snapshot import RankSnapshot

OWN = RankEvidence(rank=0, host="a", pid=1, position=RankPosition(step=3, phase="loop"), steps_done=3)
HEARTBEAT = Heartbeat(evidence=OWN, host_id="a", start_ticks=1, time_ns=1)


def known(state: str, snapshot: RankSnapshot | None = None, heartbeat: Heartbeat = HEARTBEAT) -> RankEvidence:
    process = ProcessState(state=state)
    one = RankKnowledge(
        snapshot=snapshot, has_answered=False, heartbeat=heartbeat, silent_ns=60 * 10**9, process=process
    )
    return make_evidence(2, {0: one}, []).ranks[0]


def test_a_rank_that_is_gone_did_not_stall_since_then() -> None:
    one = known(GONE)
    assert (one.liveness, one.idle_ns, one.silent_for_ns) == ("gone", None, 60 * 10**9)


def test_the_exit_status_is_known_from_the_launcher() -> None:
    by_itself = RankSnapshot(evidence=RankEvidence(rank=0, exit_status=0))
    by_signal = RankSnapshot(evidence=RankEvidence(rank=0, exit_status=-9))
    assert known(GONE, by_itself).liveness == "ended"
    assert (known(GONE, by_signal).liveness, known(GONE, by_signal).exit_status) == ("gone", -9)


def test_a_rank_that_is_there_and_silent_has_stalled() -> None:
    one = known("S")
    assert (one.liveness, one.idle_ns, one.holds_gil) == ("sleeping", 60 * 10**9, True)
    assert one.position == OWN.position


def test_a_heartbeat_is_more_recent_than_the_files_of_its_rank() -> None:
    failure = Failure(type="ValueError", message="nan")
    last = Heartbeat(
        evidence=RankEvidence(rank=0, liveness="failed", failure=failure, rss_bytes=7),
        host_id="a",
        start_ticks=1,
        time_ns=1,
    )
    one = known(GONE, RankSnapshot(evidence=RankEvidence(rank=0, steps_done=5, rss_bytes=5)), last)
    assert (one.liveness, one.failure, one.rss_bytes, one.steps_done) == ("failed", failure, 7, 5)
