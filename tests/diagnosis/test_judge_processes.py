"""Which cause is named where processes ended, stopped, failed or exited."""

from __future__ import annotations

from dataclasses import replace

import pytest

from overlapscope.diagnosis.evidence import (
    ExitCall,
    Failure,
    ReportedVerdict,
    UnreducedStep,
)
from overlapscope.diagnosis.judge import judge
from overlapscope.diagnosis.process_state import combine_liveness_and_status
from tests.diagnosis.jobs import (
    CLOSED,
    HELD_UP,
    IN_LOADER,
    TIMED_OUT,
    WAITING,
    failing,
    group,
    idle,
    job,
    rank,
    site,
    trained,
)

HANDLING = "During handling of the above exception, another exception occurred"
CAUSE = "The above exception was the direct cause of the following exception"
RESET = (
    "RuntimeError: [/pair.cc:537] Read error [127.0.0.1]:5: Connection reset by peer. This is typical.\nSee the log."
)
RAISED = {"type": "TrainingError", "message": "step 3", "call_site": site(12)}
WORKER = {"type": "RuntimeError", "message": "DataLoader worker (pid 7) is killed by signal: Terminated."}


@pytest.mark.parametrize("between", [HANDLING, CAUSE])
@pytest.mark.parametrize("last", [RAISED, WORKER])
@pytest.mark.parametrize(("first", "blamed"), [(RESET, (1,)), ("KeyError: 'label'", (0, 2))])
def test_what_a_script_makes_of_a_closed_connection_follows_from_it_as_well(
    first: str, blamed: tuple[int, ...], last: dict[str, object], between: str
) -> None:
    """Of its own errors it does not."""
    text = f"""\
Traceback (most recent call last):
  File "/job/train.py", line 9, in main
    loss.backward()
{first}

{between}:

Traceback (most recent call last):
  File "/job/train.py", line 12, in main
    clean_up()
{last["type"]}: {last["message"]}
"""
    failure = Failure(**last, traceback=text)  # type: ignore[arg-type]
    ranks = (rank(0, "failed", failure=failure), rank(1, "gone", phase="backward"), rank(2, "failed", failure=failure))
    verdict = judge(job(*ranks, groups=[HELD_UP]))
    assert (verdict.kind, verdict.blamed) == ("killed" if blamed == (1,) else "failed", blamed)


def test_who_ends_a_job_that_hangs_is_not_what_it_hung_for() -> None:
    loader = idle(rank(1, "gone", phase="loop", step=2, since_ns=10**9, stacks=IN_LOADER), 20)
    ranks = (rank(0, "failed", step=2, failure=CLOSED), loader, rank(2, "failed", step=2, failure=CLOSED))
    verdict = judge(job(*ranks, groups=[HELD_UP]))
    assert (verdict.kind, verdict.suspected) == ("waits for data", (1,))


def test_a_job_that_a_watchdog_saw_hang_was_killed_for_that() -> None:
    report = ReportedVerdict(rank=0, time_ns=5, kind="waits for data", sentence="Rank 1 waits for data.", blamed=(1,))
    loader = rank(1, "gone", phase="loop", step=2, since_ns=10**9)
    closed = replace(CLOSED, time_ns=10)
    ranks = (rank(0, "failed", step=2, failure=closed), loader, rank(2, "failed", step=2, failure=closed))
    assert judge(job(*ranks, groups=[HELD_UP], reports=(report,))).kind == "waits for data"
    sooner = replace(closed, time_ns=1)
    ranks = (rank(0, "failed", step=2, failure=sooner), loader, rank(2, "failed", step=2, failure=sooner))
    assert judge(job(*ranks, groups=[HELD_UP], reports=(report,))).kind == "killed"


def test_a_rank_that_is_ended_once_the_others_are_done_hides_nothing_that_was_seen_before() -> None:
    lost = UnreducedStep(model=0, step=2, call_site=site(7))
    report = ReportedVerdict(rank=2, time_ns=5, kind="not reduced", sentence="Rank 2 stepped the optimizer.", step=2)
    ranks = (
        rank(0, "ended", unreduced=(lost,)),
        rank(1, "ended", unreduced=(lost,)),
        rank(2, "gone", unreduced=(lost,)),
    )
    assert judge(job(*ranks, reports=(report,))).kind == "not reduced"
    harmed = (replace(ranks[0], liveness="failed", failure=CLOSED), *ranks[1:])
    assert judge(job(*harmed, reports=(report,))).kind == "killed"


def test_a_rank_that_is_gone_where_nobody_can_look_is_told_by_the_closed_connections() -> None:
    verdict = judge(job(rank(0, "failed", failure=CLOSED), rank(1, "unknown"), groups=[]))
    assert (verdict.kind, verdict.blamed) == ("killed", (1,))


@pytest.mark.parametrize(
    ("kind", "message", "expected"),
    [
        ("ValueError", "no such label", "failed"),
        ("torch.OutOfMemoryError", "CUDA out of memory.", "out of memory"),
        ("MemoryError", "", "out of memory"),
        ("RuntimeError", "DefaultCPUAllocator: can't allocate memory", "out of memory"),
    ],
)
def test_an_exception_of_its_own_is_the_cause_of_the_others(kind: str, message: str, expected: str) -> None:
    own = Failure(type=kind, message=message, call_site=site(7))
    ranks = (rank(0, "failed", failure=CLOSED), rank(1, "failed", failure=own), rank(2, "failed", failure=TIMED_OUT))
    verdict = judge(job(*ranks))
    assert (verdict.kind, verdict.blamed) == (expected, (1,))
    assert str(verdict.call_sites[1]) == "train.py:7 (main)"


def test_who_was_interrupted_with_ctrl_c_is_not_to_blame() -> None:
    interrupted = Failure(type="KeyboardInterrupt", message="")
    ranks = [rank(n, "failed", step=2, failure=interrupted) for n in range(3)]
    ranks[1] = replace(ranks[1], stacks=IN_LOADER, position=rank(1, phase="loop", since_ns=10**9).position)
    assert judge(job(*ranks, groups=[HELD_UP])).kind == "waits for data"


OF_A_FILE_SERVER = (
    "Traceback (most recent call last):\n"
    '  File "/home/me/train.py", line 59, in __getitem__\n'
    '    raise TimeoutError("The read operation timed out")\n'
)
OF_A_SOCKET = (
    'Traceback (most recent call last):\n  File "/home/me/train.py", line 12, in main\n    data = connection.recv(10)\n'
)
OF_A_WORK = 'Traceback (most recent call last):\n  File "/home/me/train.py", line 12, in main\n    work.wait()\n'


@pytest.mark.parametrize(
    ("type_", "traceback", "kind"),
    [
        ("TimeoutError", OF_A_FILE_SERVER, "failed"),
        ("ConnectionError", OF_A_SOCKET, "failed"),
        ("RuntimeError", OF_A_FILE_SERVER, "failed"),
        ("RuntimeError", OF_A_FILE_SERVER.replace("    raise", "    if late: raise"), "failed"),
        ("RuntimeError", OF_A_WORK, "cannot tell"),
    ],
)
def test_a_time_out_of_the_users_own_is_no_consequence(type_: str, traceback: str, kind: str) -> None:
    failure = Failure(type=type_, message="The read operation timed out", call_site=site(59), traceback=traceback)
    ranks = (rank(0, "failed", failure=failure), rank(1, "failed", failure=CLOSED))
    same = group({0: trained(6), 1: trained(6)})
    assert judge(job(*ranks, groups=[same])).kind == kind


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


def test_ranks_that_were_killed_at_once_are_both_named_whoever_waited_for_whom() -> None:
    order = group({0: trained(7, is_waiting=True), 1: trained(6), 2: trained(7, is_waiting=True)})
    killed = [rank(n, "gone", phase="backward", step=2, silent_for_ns=600_000_000) for n in (1, 2)]
    verdict = judge(job(rank(0, "failed", failure=CLOSED), *killed, groups=[order]))
    assert (verdict.kind, verdict.blamed) == ("killed", (1, 2))


def test_ranks_that_torchrun_may_have_ended_are_not_blamed_for_a_death_nobody_saw() -> None:
    order = group({0: trained(7, is_waiting=True), 1: trained(6), 2: trained(7, is_waiting=True)})
    together = group({n: trained(6) for n in range(3)})
    failed = rank(0, "failed", failure=CLOSED)
    for groups, blamed in ((order, (1,)), (together, ())):
        gone = [rank(n, "gone", phase="backward", step=2, silent_for_ns=0, is_launched=True) for n in (1, 2)]
        verdict = judge(job(failed, *gone, groups=[groups]))
        assert (verdict.kind, verdict.blamed) == ("killed", blamed)
        seen = [replace(one, exit_status=-9) for one in gone]
        assert judge(job(failed, *seen, groups=[groups])).blamed == (1, 2)


def test_who_is_gone_was_not_killed_first_if_nobody_knows_how_another_one_ended() -> None:
    """The log of rank 1 is lost, or its folder; if a signal was seen, that is another matter."""
    gone = [rank(number, "gone", step=2) for number in (0, 2)]
    order = group({0: WAITING, 2: WAITING}, ranks=(0, 1, 2), uncertain=frozenset({1}))
    for one in (rank(1, "unknown", step=2), rank(1, "gone", step=2, exit_status=1), None):
        ranks = [*gone, *([] if one is None else [one])]
        assert not judge(job(*ranks, groups=[order], world=3)).named
    seen = replace(gone[0], exit_status=-9)
    verdict = judge(job(seen, gone[1], rank(1, "unknown", step=2), groups=[order]))
    assert (verdict.kind, verdict.blamed) == ("killed", (0,))


def test_when_all_are_killed_at_once_nobody_is_blamed() -> None:
    order = group({n: trained(7) for n in range(3)})
    verdict = judge(job(*(rank(n, "gone", silent_for_ns=0, idle_ns=10**8) for n in range(3)), groups=[order]))
    assert (verdict.kind, verdict.blamed, verdict.concerned) == ("killed", (), (0, 1, 2))


def test_ranks_that_call_init_process_group_again_are_compared_by_call() -> None:
    survivors = [rank(number, "ended", world_size=2, init_calls=2) for number in (0, 2)]
    dead = rank(1, "gone", world_size=3)
    assert judge(job(survivors[0], dead, survivors[1])).kind == "killed", "the others have gone on without it"
    order = group({0: WAITING}, name="default (2)", ranks=range(2))
    ended_there = (rank(0, "failed", failure=TIMED_OUT, init_calls=2), rank(1, "failed", failure=CLOSED, init_calls=2))
    assert "which rank 1 has not" not in judge(job(*ended_there, groups=[order])).sentence
    without = (ended_there[0], replace(ended_there[1], init_calls=1))
    assert "which rank 1 has not" in judge(job(*without, groups=[order])).sentence
