"""Which cause is named where processes came to an end that their launcher saw, or that they asked for."""

from __future__ import annotations

from overlapscope.diagnosis.evidence import ExitCall, ReportedVerdict
from overlapscope.diagnosis.judge import judge
from overlapscope.diagnosis.process_state import combine_liveness_and_status
from tests.diagnosis.jobs import CLOSED, HELD_UP, TIMED_OUT, failing, group, idle, job, rank, trained


def test_a_rank_that_exits_because_another_one_is_gone_is_not_blamed() -> None:
    ranks = (
        rank(0, "failed", exit_status=1, exit_call=ExitCall(status=1, caught=CLOSED)),
        rank(1, "gone", exit_status=-9, phase="forward", step=2),
        rank(2, "failed", exit_status=1, exit_call=ExitCall(status=1, caught=TIMED_OUT)),
    )
    verdict = judge(job(*ranks, groups=[HELD_UP]))
    assert (verdict.kind, verdict.blamed) == ("killed", (1,))


def test_ranks_that_their_launcher_ended_were_not_killed() -> None:
    told = {"signaled_at_ns": 1, "exit_status": -15}
    ranks = (rank(0, "gone", **told), rank(1, "gone", exit_status=-11), *(rank(n, "gone", **told) for n in range(2, 8)))
    verdict = judge(job(*ranks))
    assert (verdict.kind, verdict.blamed) == ("killed", (1,))


def test_a_rank_that_ends_without_cleaning_up_is_named_by_its_status() -> None:
    ranks = (
        rank(0, "failed", failure=CLOSED),
        rank(1, "gone", exit_status=3, step=2),
        rank(2, "failed", failure=CLOSED),
    )
    verdict = judge(job(*ranks, groups=[HELD_UP]))
    assert (verdict.kind, verdict.blamed) == ("failed", (1,))


def test_of_ranks_that_came_to_their_ends_apart_only_those_that_came_least_far_never_entered_the_next() -> None:
    ranks = [rank(n, "ended") for n in range(3)]
    logs = group({0: failing(trained(8)), 1: trained(6), 2: failing(trained(9))})
    verdict = judge(job(*ranks, groups=[logs], job_status=0))
    assert (verdict.blamed, verdict.number) == ((1,), 7)


def test_the_root_of_a_broadcast_may_be_further_than_the_others() -> None:
    ranks = [rank(n, "ended") for n in range(3)]
    logs = group({0: trained(9), 1: trained(8), 2: trained(8)})
    assert judge(job(*ranks, groups=[logs])).kind == "healthy"


def test_a_rank_that_was_told_to_end_has_not_left_its_loop_whatever_its_handler_returns() -> None:
    """A script that saves a checkpoint at SIGTERM and exits with 0: the job had hung before."""
    hung = idle(rank(1, "ended", phase="forward", step=2, signaled_at_ns=10**12, exit_status=0), 20)
    told = ReportedVerdict(
        rank=0,
        time_ns=10**9,
        kind="stuck",
        sentence="Rank 1 has been waiting for another process for 6.5 s.",
        alternative="it may go on",
        suspected=(1,),
    )
    others = [rank(number, "gone", step=2, signaled_at_ns=10**12, exit_status=-15) for number in (0, 2)]
    verdict = judge(job(*others, hung, groups=[HELD_UP], reports=(told,), job_status=1))
    assert (verdict.kind, verdict.suspected, verdict.certainty) == ("stuck", (1,), "likely")


def test_who_failed_first_is_named_and_not_who_has_the_lowest_number() -> None:
    first = rank(2, "failed", exit_status=3, ended_ns=10**9, step=5)
    ranks = (rank(0, "failed", exit_status=1, ended_ns=2 * 10**9), rank(1, "ended"), first)
    verdict = judge(job(*ranks, groups=[HELD_UP]))
    assert (verdict.kind, verdict.blamed, verdict.step) == ("failed", (0, 2), 5)


def test_an_exit_without_a_word_and_without_an_error_is_an_end() -> None:
    """``os._exit(0)``: its launcher knows."""
    assert combine_liveness_and_status("gone", 0) == "ended"
    assert combine_liveness_and_status("gone", None) == combine_liveness_and_status("gone", -9) == "gone"
    assert combine_liveness_and_status("ended", 3) == "failed"
