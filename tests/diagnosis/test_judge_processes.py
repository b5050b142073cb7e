"""Which cause is named where processes ended, stopped or failed."""

from __future__ import annotations

from dataclasses import replace

import pytest

from overlapscope.diagnosis.evidence import (
    Failure,
    ReportedVerdict,
    UnreducedStep,
)
from overlapscope.diagnosis.judge import judge
from tests.diagnosis.jobs import (
    CLOSED,
    HELD_UP,
    IN_LOADER,
    TIMED_OUT,
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
    ranks = (rank(0, "ended", unreduced=lost), rank(1, "ended", unreduced=lost), rank(2, "gone", unreduced=lost))
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
    assert str((verdict.call_sites or {})[1]) == "train.py:7 (main)"


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
        ("RuntimeError", OF_A_WORK, "cannot tell"),
    ],
)
def test_a_time_out_of_the_users_own_is_no_consequence(type_: str, traceback: str, kind: str) -> None:
    failure = Failure(type=type_, message="The read operation timed out", call_site=site(59), traceback=traceback)
    ranks = (rank(0, "failed", failure=failure), rank(1, "failed", failure=CLOSED))
    same = group({0: trained(6), 1: trained(6)})
    assert judge(job(*ranks, groups=[same])).kind == kind
