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
    held_up,
    idle,
    job,
    rank,
    site,
    trained,
)

GIB = 1024**3


def test_a_rank_that_is_gone_was_killed_and_the_closed_connections_follow_from_that() -> None:
    ranks = (rank(0, "failed", failure=CLOSED), rank(1, "gone", phase="backward"), rank(2, "failed", failure=CLOSED))
    verdict = judge(job(*ranks, groups=[HELD_UP]))
    assert (verdict.kind, verdict.blamed) == ("killed", (1,))
    assert any("Ranks 0, 2 failed as a result" in sentence for sentence in verdict.evidence)


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


def test_with_two_ranks_the_one_that_was_killed_is_named() -> None:
    verdict = judge(job(rank(0, "failed", failure=CLOSED), rank(1, "gone")))
    assert (verdict.kind, verdict.blamed) == ("killed", (1,))


def test_of_those_that_are_gone_the_first_is_the_one_that_was_waited_for() -> None:
    ranks = (
        rank(0, "failed", failure=CLOSED, step=2),
        rank(1, "gone", phase="backward", step=2),
        rank(2, "gone", step=2),
    )
    verdict = judge(job(*ranks, groups=[HELD_UP]))
    assert verdict.blamed == (1,)
    assert any("Rank 2 died later" in sentence for sentence in verdict.evidence)


def test_of_several_killed_at_once_it_is_said_where_each_stood() -> None:
    ranks = (rank(0, "gone", phase="forward", step=2), rank(1, "gone", phase="loop", step=3), rank(2, step=3))
    verdict = judge(job(*ranks, groups=[group({member: trained(8) for member in range(3)})]))
    assert verdict.blamed == (0, 1)
    assert "rank 0 in forward of step 2" in verdict.sentence
    assert "rank 1 between steps 2 and 3" in verdict.sentence


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


def test_which_of_two_died_first_is_said_not_to_be_known() -> None:
    even = group(dict.fromkeys(range(3), trained(9)))
    verdict = judge(job(rank(0, "failed", failure=CLOSED), rank(1, "gone"), rank(2, "gone"), groups=[even]))
    assert (verdict.kind, verdict.blamed) == ("killed", (1, 2))
    assert "Their logs don't say which of them died first." in verdict.evidence


def test_when_all_were_killed_nobody_is_blamed() -> None:
    verdict = judge(job(rank(0, "gone"), rank(1, "gone")))
    assert (verdict.kind, verdict.blamed) == ("killed", ())


def test_a_rank_that_is_gone_where_nobody_can_look_is_told_by_the_closed_connections() -> None:
    verdict = judge(job(rank(0, "failed", failure=CLOSED), rank(1, "unknown"), groups=[]))
    assert (verdict.kind, verdict.blamed) == ("killed", (1,))


def test_a_rank_that_was_killed_near_its_memory_limit_points_to_the_oom_killer() -> None:
    big = rank(1, "gone", rss_bytes=95 * GIB, memory_limit_bytes=100 * GIB)
    assert "OOM killer is likely" in judge(job(rank(0, "failed", failure=CLOSED), big)).sentence


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


@pytest.mark.parametrize(
    ("message", "end"),
    [
        ("no such file: '../data/x'", ": ValueError: no such file: '../data/x'."),
        ("expected 2 .. 4 labels", ": ValueError: expected 2 .. 4 labels."),
        ("no such label.", ": ValueError: no such label."),
        ("loading ...", ": ValueError: loading ..."),
        ("word " * 100, "word …"),
    ],
)
def test_what_an_exception_says_is_left_as_it_is(message: str, end: str) -> None:
    own = Failure(type="ValueError", message=message)
    sentence = judge(job(rank(0, "failed", failure=own), rank(1, "failed", failure=CLOSED))).sentence
    assert sentence.endswith(end), sentence


def test_who_was_interrupted_with_ctrl_c_is_not_to_blame() -> None:
    interrupted = Failure(type="KeyboardInterrupt", message="")
    ranks = [rank(n, "failed", step=2, failure=interrupted) for n in range(3)]
    ranks[1] = replace(ranks[1], stacks=IN_LOADER, position=rank(1, phase="loop", since_ns=10**9).position)
    assert judge(job(*ranks, groups=[HELD_UP])).kind == "waits for data"


def test_a_stopped_rank_is_named() -> None:
    verdict = judge(held_up(rank(1, "stopped", phase="backward", step=2), is_live=True))
    assert (verdict.kind, verdict.blamed) == ("stopped", (1,))


def test_a_rank_that_holds_the_gil_is_named() -> None:
    verdict = judge(held_up(rank(1, "running", phase="forward", holds_gil=True), is_live=True))
    assert (verdict.kind, verdict.suspected) == ("holds the GIL", (1,))


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


@pytest.mark.parametrize(("phase", "said"), [(None, "Rank 1 failed at"), ("forward", "Rank 1 failed in step 0 at")])
def test_a_script_without_steps_is_in_none(phase: str | None, said: str) -> None:
    failure = Failure(type="KeyError", message="'policy_head'", call_site=site(12))
    ranks = (rank(0, "failed", phase=phase, failure=CLOSED), rank(1, "failed", phase=phase, failure=failure))
    assert judge(job(*ranks)).sentence.startswith(said)
