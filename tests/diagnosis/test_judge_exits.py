"""Which cause is named where processes came to an end that their launcher saw, or that they asked for."""

from __future__ import annotations

from overlapscope.diagnosis.evidence import ExitCall, Failure, ReportedVerdict
from overlapscope.diagnosis.judge import judge
from overlapscope.diagnosis.process_state import combine_liveness_and_status
from tests.diagnosis.jobs import CLOSED, HELD_UP, TIMED_OUT, failing, group, idle, job, rank, site, trained

BAD_LABEL = Failure(type="ValueError", message="no such label\nsecond line", call_site=site(40))


def test_a_rank_that_catches_its_error_and_exits_with_a_status_has_failed() -> None:
    call = ExitCall(status=1, call_site=site(90), caught=BAD_LABEL)
    ranks = (
        rank(0, "gone", signaled_at_ns=1, exit_status=-15),
        rank(1, "failed", phase="forward", step=2, exit_status=1, exit_call=call),
        rank(2, "failed", failure=CLOSED),
    )
    verdict = judge(job(*ranks, groups=[HELD_UP], job_status=1))
    assert (verdict.kind, verdict.blamed, verdict.step) == ("failed", (1,), 2)
    assert verdict.sentence == (
        "Rank 1 exited with status 1 in step 2 at train.py:90 (main), after catching ValueError: "
        "no such label at train.py:40 (main)."
    )
    assert verdict.evidence == ("Rank 2 failed as a result.", "Rank 0 was ended by the launcher after that.")


def test_a_rank_that_exits_because_another_one_is_gone_is_not_blamed() -> None:
    ranks = (
        rank(0, "failed", exit_status=1, exit_call=ExitCall(status=1, caught=CLOSED)),
        rank(1, "gone", exit_status=-9, phase="forward", step=2),
        rank(2, "failed", exit_status=1, exit_call=ExitCall(status=1, caught=TIMED_OUT)),
    )
    verdict = judge(job(*ranks, groups=[HELD_UP]))
    assert (verdict.kind, verdict.blamed) == ("killed", (1,))
    assert "was killed by signal 9 (SIGKILL)" in verdict.sentence


def test_ranks_that_their_launcher_ended_were_not_killed() -> None:
    told = {"signaled_at_ns": 1, "exit_status": -15}
    ranks = (rank(0, "gone", **told), rank(1, "gone", exit_status=-11), *(rank(n, "gone", **told) for n in range(2, 8)))
    verdict = judge(job(*ranks))
    assert (verdict.kind, verdict.blamed) == ("killed", (1,))
    assert "Rank 1 was killed by signal 11 (SIGSEGV)" in verdict.sentence


def test_the_text_given_to_exit_is_shown() -> None:
    call = ExitCall(status=1, call_site=site(9), text="no such data set: /data/x\nsee the manual")
    verdict = judge(job(rank(0, "failed", failure=CLOSED), rank(1, "failed", exit_status=1, exit_call=call)))
    assert (verdict.kind, verdict.blamed) == ("failed", (1,))
    assert verdict.sentence.endswith("at train.py:9 (main): no such data set: /data/x.")


def test_a_rank_that_ends_without_cleaning_up_is_named_by_its_status() -> None:
    ranks = (
        rank(0, "failed", failure=CLOSED),
        rank(1, "gone", exit_status=3, step=2),
        rank(2, "failed", failure=CLOSED),
    )
    verdict = judge(job(*ranks, groups=[HELD_UP]))
    assert (verdict.kind, verdict.blamed) == ("failed", (1,))
    assert "Rank 1 exited with status 3" in verdict.sentence


def test_a_rank_that_aborts_when_its_script_is_over_is_named() -> None:
    ranks = (rank(0, "gone", exit_status=-15, signaled_at_ns=1), rank(1, "ended", exit_status=-6))
    verdict = judge(job(*ranks, groups=[group(dict.fromkeys(range(2), trained(9)))], job_status=1))
    assert (verdict.kind, verdict.blamed) == ("killed", (1,))
    assert "reached the end of its script and was then killed by signal 6 (SIGABRT)" in verdict.sentence
    assert verdict.evidence == ("Rank 0 was ended because of that.",)


def test_a_job_that_exits_with_an_error_is_not_healthy() -> None:
    ranks = [rank(n, "ended") for n in range(3)]
    verdict = judge(job(*ranks, groups=[group(dict.fromkeys(range(3), trained(9)))], job_status=2))
    assert (verdict.kind, verdict.is_fault, verdict.blamed) == ("cannot tell", True, ())
    assert "the command exited with status 2. 9 collectives in 1 group are the same on all ranks" in verdict.sentence


def test_ranks_that_all_finish_after_an_error_that_they_caught_are_not_healthy() -> None:
    ranks = [rank(n, "ended") for n in range(3)]
    logs = group({0: failing(trained(9)), 1: trained(6), 2: failing(trained(9))})
    verdict = judge(job(*ranks, groups=[logs], job_status=0))
    assert (verdict.kind, verdict.blamed, verdict.number) == ("missing collective", (1,), 7)
    assert "Rank 1 finished after collective 6 of the default group and never entered the next one" in verdict.sentence


def test_of_ranks_that_came_to_their_ends_apart_only_those_that_came_least_far_never_entered_the_next() -> None:
    ranks = [rank(n, "ended") for n in range(3)]
    logs = group({0: failing(trained(8)), 1: trained(6), 2: failing(trained(9))})
    verdict = judge(job(*ranks, groups=[logs], job_status=0))
    assert (verdict.blamed, verdict.number) == ((1,), 7)
    assert verdict.sentence.startswith("Rank 1 finished after collective 6 ")


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
    first = rank(2, "failed", exit_status=3, ended_ns=10**9)
    ranks = (rank(0, "failed", exit_status=1, ended_ns=2 * 10**9), rank(1, "ended"), first)
    verdict = judge(job(*ranks, groups=[HELD_UP]))
    assert verdict.sentence.startswith("Rank 2 exited with status 3")


def test_memory_that_ran_out_and_was_caught_is_said_to_have_run_out() -> None:
    caught = Failure(type="RuntimeError", message="DefaultCPUAllocator: can't allocate memory", call_site=site(40))
    call = ExitCall(status=1, call_site=site(90), caught=caught)
    ranks = (rank(0), rank(1, "failed", exit_status=1, exit_call=call), rank(2))
    assert judge(job(*ranks, groups=[HELD_UP])).kind == "out of memory"


def test_an_exit_without_a_word_and_without_an_error_is_an_end() -> None:
    """``os._exit(0)``: its launcher knows."""
    assert combine_liveness_and_status("gone", 0) == "ended"
    assert combine_liveness_and_status("gone", None) == combine_liveness_and_status("gone", -9) == "gone"
    assert combine_liveness_and_status("ended", 3) == "failed"
