"""A job that was ended from outside is told from one that came to its end by a fault."""

from __future__ import annotations

from dataclasses import replace
from signal import SIGINT, SIGTERM
from typing import Any

import pytest

from overlapscope.diagnosis.evidence import Evidence, Failure, RankEvidence, RecordingGap, ReportedVerdict
from overlapscope.diagnosis.judge import judge
from overlapscope.diagnosis.verdict import Verdict
from tests.diagnosis.jobs import CLOSED, TIMED_OUT, WAITING, group, job, rank, trained

SECOND_NS = 10**9
TOLD_NS = 2 * SECOND_NS
"""Ranks have launched their latest collective after 0.9 ms, and one that is told here has hung."""
SOON_NS = SECOND_NS
AFTER_NS = TOLD_NS + SECOND_NS
ALIKE = group(dict.fromkeys(range(3), trained(9)))
UNTIL_THEN = "; nothing was found wrong until then: 9 collectives in 1 group are the same on all ranks."


def interrupt(time_ns: int) -> dict[str, Any]:
    return {"failure": Failure(type="KeyboardInterrupt", message="", time_ns=time_ns), "ended_ns": time_ns}


def fails(failure: Failure, time_ns: int) -> dict[str, Any]:
    return {"failure": replace(failure, time_ns=time_ns), "ended_ns": time_ns}


def told(number: int, status: int | None = None) -> dict[str, Any]:
    return {"signaled_at_ns": TOLD_NS, "signal_received": number, "exit_status": -number if status is None else status}


def of_three(*ends: RankEvidence, number: int | None = None, **more: Any) -> Evidence:
    """Of a command that was sent this signal, if any."""
    sent = {} if number is None else {"job_signal": number, "job_signaled_ns": TOLD_NS, "job_status": 1}
    return job(*ends, **({"groups": [ALIKE]} | sent | more))


def is_no_fault(verdict: Verdict) -> bool:
    return (verdict.kind, verdict.is_fault, verdict.blamed) == ("interrupted", False, ())


def test_ctrl_c_to_all_processes_is_said_and_accuses_nobody() -> None:
    ranks = [rank(n, "failed", step=3, **interrupt(TOLD_NS + n)) for n in range(3)]
    verdict = judge(of_three(*ranks, number=SIGINT))
    assert is_no_fault(verdict)
    assert verdict.sentence == f"The job was interrupted (Ctrl-C, SIGINT) in step 3{UNTIL_THEN}"


def test_without_the_commands_end_the_exceptions_say_it() -> None:
    ranks = [rank(n, "failed", step=3, **interrupt(TOLD_NS + n)) for n in range(3)]
    verdict = judge(of_three(*ranks))
    assert is_no_fault(verdict)
    assert verdict.sentence.startswith("The job was interrupted (KeyboardInterrupt, as by Ctrl-C) in step 3;")


def test_sigterm_to_the_command_is_said() -> None:
    verdict = judge(of_three(*(rank(n, "gone", step=3, **told(SIGTERM)) for n in range(3)), number=SIGTERM))
    assert is_no_fault(verdict)
    assert verdict.sentence == f"The job was ended from outside (SIGTERM) in step 3{UNTIL_THEN}"


def test_of_ranks_that_their_launcher_ended_that_is_said() -> None:
    """As if the launcher alone was sent SIGTERM: who did that is not known."""
    verdict = judge(of_three(*(rank(n, "gone", step=3, **told(SIGTERM)) for n in range(3))))
    assert is_no_fault(verdict)
    assert verdict.sentence.startswith(
        "Ranks 0-2 were ended by the process that had started them (SIGTERM) in step 3; nothing was found wrong"
    )


def test_ranks_that_all_died_of_sigterm_were_ended_from_outside() -> None:
    verdict = judge(of_three(*(rank(n, "gone", step=3, exit_status=-SIGTERM) for n in range(3))))
    assert is_no_fault(verdict)
    assert "was ended from outside (SIGTERM)" in verdict.sentence


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
    is_said = any("The command was sent Ctrl-C, SIGINT while it ran." in sentence for sentence in verdict.evidence)
    assert is_said == (number is not None)


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
        assert "The command was sent Ctrl-C, SIGINT while it ran." in verdict.evidence


@pytest.mark.parametrize(("time_ns", "kind"), [(SOON_NS, "stuck"), (AFTER_NS, "interrupted")])
def test_what_a_watchdog_had_reported_before_stays_the_verdict(time_ns: int, kind: str) -> None:
    report = ReportedVerdict(
        rank=0, time_ns=time_ns, kind="stuck", sentence="Rank 1 has made no progress.", blamed=(1,)
    )
    ends = [rank(n, "failed", **interrupt(TOLD_NS)) for n in range(3)]
    assert judge(of_three(*ends, number=SIGINT, reports=(report,))).kind == kind


def test_after_a_long_silence_of_all_ranks_nothing_is_said_to_have_been_well() -> None:
    ends = [rank(n, "failed", step=3, **interrupt(60 * SECOND_NS)) for n in range(3)]
    verdict = judge(of_three(*ends, number=SIGINT, job_signaled_ns=60 * SECOND_NS))
    assert (verdict.kind, verdict.blamed) == ("cannot tell", ())
    assert "in step 3, when nothing had been recorded for 59 s: it may have hung." in verdict.sentence


def test_where_a_part_is_missing_nothing_is_said_to_have_been_well() -> None:
    gap = RecordingGap("rank 2's log is cut short", "Copy it again.")
    ends = [rank(n, "failed", **interrupt(TOLD_NS)) for n in range(3)]
    verdict = judge(of_three(*ends, number=SIGINT, gaps=(gap,)))
    assert (verdict.kind, verdict.advice) == ("cannot tell", ("Copy it again.",))
    assert "The job was interrupted (Ctrl-C, SIGINT)" in verdict.sentence
    assert "rank 2's log is cut short" in verdict.sentence


def test_a_job_that_saves_its_work_and_ends_well_is_healthy() -> None:
    ends = [rank(n, "ended", ended_ns=AFTER_NS, exit_status=0) for n in range(3)]
    verdict = judge(of_three(*ends, number=SIGTERM, job_status=0))
    assert verdict.kind == "healthy"
    assert verdict.evidence == ("The command was sent SIGTERM while it ran.",)


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
