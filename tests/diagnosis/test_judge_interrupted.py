"""A job that was ended from outside is told from one that came to its end by a fault."""

from __future__ import annotations

from dataclasses import replace
from signal import SIGINT, SIGTERM
from typing import Any

import pytest

from overlapscope.diagnosis.evidence import Failure, RankEvidence, ReportedVerdict
from overlapscope.diagnosis.judge import judge
from overlapscope.diagnosis.verdict import Verdict
from tests.diagnosis.jobs import (
    CLOSED,
    SECOND_NS,
    TIMED_OUT,
    TOLD_NS,
    WAITING,
    group,
    interrupt,
    job,
    of_three,
    rank,
    told,
    trained,
)

SOON_NS = SECOND_NS
AFTER_NS = TOLD_NS + SECOND_NS


def fails(failure: Failure, time_ns: int) -> dict[str, Any]:
    return {"failure": replace(failure, time_ns=time_ns), "ended_ns": time_ns}


def is_no_fault(verdict: Verdict) -> bool:
    return (verdict.kind, verdict.is_fault, verdict.blamed) == ("interrupted", False, ())


@pytest.mark.parametrize(
    "end",
    [
        rank(1, "failed", **fails(CLOSED, AFTER_NS)),
        rank(1, "failed", **fails(Failure(type="RuntimeError", message="DataLoader worker exited"), AFTER_NS)),
        rank(1, "failed", **told(SIGTERM, status=143)),
        rank(1, "ended", ended_ns=AFTER_NS, exit_status=0),
        rank(1, "gone", exit_status=-SIGINT),
    ],
    ids=["closed connection", "an error because of it", "a handler that exits", "it is caught", "at once"],
)
def test_whatever_ranks_do_about_the_signal_it_is_the_cause(end: RankEvidence) -> None:
    ends = (rank(0, "failed", **interrupt(TOLD_NS)), end, rank(2, "gone", **told(SIGTERM)))
    assert is_no_fault(judge(of_three(*ends, number=SIGINT)))


@pytest.mark.parametrize(
    ("end", "kind"),
    [
        (rank(1, "failed", **fails(Failure(type="ValueError", message="no such label"), SOON_NS)), "failed"),
        (rank(1, "gone", exit_status=-9), "killed"),
        (rank(1, "failed", exit_status=3), "failed"),
    ],
    ids=["an exception", "SIGKILL", "a status"],
)
@pytest.mark.parametrize("number", [SIGINT, None])
def test_a_rank_that_had_failed_before_stays_the_cause(end: RankEvidence, kind: str, number: int | None) -> None:
    ends = (rank(0, "gone", **told(SIGTERM)), end, rank(2, "gone", **told(SIGTERM)))
    verdict = judge(of_three(*ends, number=number))
    assert (verdict.kind, verdict.blamed) == (kind, (1,))


def test_a_job_that_had_timed_out_was_not_interrupted() -> None:
    late = {0: WAITING, 1: trained(6), 2: WAITING}
    ends = [rank(0, "failed", **fails(TIMED_OUT, SOON_NS)), *(rank(n, "gone", **told(SIGTERM)) for n in (1, 2))]
    assert judge(of_three(*ends, groups=[group(late)])).kind != "interrupted"


HANGING = {0: WAITING, 1: trained(6), 2: WAITING}


@pytest.mark.parametrize("seconds", [1, 60])
def test_a_hang_is_why_somebody_pressed_ctrl_c(seconds: int) -> None:
    at_ns = seconds * SECOND_NS
    ends = [rank(n, "failed", phase="forward" if n == 1 else "finalize", step=2, **interrupt(at_ns)) for n in range(3)]
    verdict = judge(of_three(*ends, number=SIGINT, job_signaled_ns=at_ns, groups=[group(HANGING)]))
    if seconds == 1:  # the others may have been about to come
        assert verdict.kind == "interrupted"
    else:
        assert (verdict.kind, verdict.suspected) == ("stuck", (1,))


@pytest.mark.parametrize(("time_ns", "kind"), [(SOON_NS, "stuck"), (AFTER_NS, "interrupted")])
def test_what_a_watchdog_had_reported_before_stays_the_verdict(time_ns: int, kind: str) -> None:
    report = ReportedVerdict(
        rank=0, time_ns=time_ns, kind="stuck", sentence="Rank 1 has made no progress.", blamed=(1,)
    )
    ends = [rank(n, "failed", **interrupt(TOLD_NS)) for n in range(3)]
    assert judge(of_three(*ends, number=SIGINT, reports=(report,))).kind == kind


def test_as_long_as_a_rank_is_there_the_others_wait_for_the_one_that_was_interrupted() -> None:
    ends = [rank(0, "sleeping"), rank(1, "failed", **interrupt(TOLD_NS)), rank(2, "sleeping")]
    assert judge(of_three(*ends, groups=[group(HANGING)], is_live=True)).kind != "interrupted"


@pytest.mark.parametrize(("idle_ns", "is_interrupted"), [(SECOND_NS, True), (60 * SECOND_NS, False), (None, False)])
def test_if_nobody_knows_when_the_signal_came_the_watchdogs_know_for_how_long_ranks_waited(
    idle_ns: int | None, is_interrupted: bool
) -> None:
    ends = [rank(n, "gone", phase="forward" if n == 1 else "finalize", step=2, exit_status=-15) for n in range(3)]
    ends = [replace(one, idle_ns=idle_ns) for one in ends]
    verdict = judge(of_three(*ends, groups=[group(HANGING)]))
    assert (verdict.kind == "interrupted") == is_interrupted


def test_times_of_several_hosts_are_not_compared() -> None:
    ends = [rank(n, "failed", host=f"node{n}", **interrupt(TOLD_NS)) for n in range(3)]
    assert is_no_fault(judge(of_three(*ends)))
    assert is_no_fault(judge(of_three(*ends, groups=[group(HANGING)])))  # each knows for how long it has waited
    closed = rank(2, "failed", host="node2", **fails(CLOSED, AFTER_NS))
    assert judge(of_three(*ends[:2], closed)).kind == "cannot tell"


WORKER_GONE = Failure(type="RuntimeError", message="DataLoader worker (pid 17) is killed by signal: Terminated.")


@pytest.mark.parametrize(("time_ns", "kind"), [(SOON_NS, "failed"), (AFTER_NS, "interrupted")])
def test_an_exception_after_a_rank_was_told_to_end_is_not_why(time_ns: int, kind: str) -> None:
    ends = [rank(n, "failed", **fails(WORKER_GONE, time_ns), signaled_at_ns=TOLD_NS) for n in range(3)]
    assert judge(of_three(*ends, number=SIGTERM)).kind == kind


def test_exceptions_after_the_end_of_a_job_that_hung_do_not_hide_why_it_hung() -> None:
    ends = [
        rank(
            n,
            "failed",
            phase="forward" if n == 1 else "finalize",
            step=2,
            **fails(WORKER_GONE, AFTER_NS),
            signaled_at_ns=TOLD_NS,
        )
        for n in range(3)
    ]
    report = ReportedVerdict(
        rank=0, time_ns=SOON_NS, kind="stuck", sentence="Rank 1 has made no progress.", blamed=(1,)
    )
    assert judge(of_three(*ends, number=SIGTERM, groups=[group(HANGING)], reports=(report,))).kind == "stuck"


@pytest.mark.parametrize(("since_ns", "kind"), [(0, "interrupted"), (SECOND_NS, "cannot tell")])
def test_before_the_first_event_it_is_unknown_how_long_nothing_was_recorded(since_ns: int, kind: str) -> None:
    """0 is when the host was started."""
    late_ns = 60_000 * SECOND_NS
    ends = [rank(number, "gone", phase="loop", since_ns=since_ns, **told(SIGTERM)) for number in range(2)]
    assert judge(job(*ends, job_signal=SIGTERM, job_signaled_ns=late_ns, job_status=1)).kind == kind
