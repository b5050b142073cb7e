"""Two threads of a rank launch collectives in one group."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from overlapscope.diagnosis.evidence import Entry, Evidence
from overlapscope.diagnosis.judge import judge
from overlapscope.trace.collective_log import OTHER_THREAD
from tests.diagnosis.jobs import CLOSED, entry, group, job, rank, site, trained
from tests.ordered import all_reduce, bucket


def metric(number: int) -> Entry:
    """Launched by a thread at line 18."""
    return replace(entry(number, all_reduce("loss", 4), line=18), flags=OTHER_THREAD)


def mixed(*metric_at: int, is_by_thread: bool = True, exit_status: int | None = None) -> Evidence:
    """Each rank has launched five collectives in the default group; one of them, or none (0), is a metric."""
    windows = {
        one: tuple(metric(n) if n == at else entry(n, bucket(0), line=27) for n in range(1, 6))
        for one, at in enumerate(metric_at)
    }
    if not is_by_thread:
        windows = {one: tuple(replace(each, flags=0) for each in window) for one, window in windows.items()}
    differs: dict[str, Any] = (
        {"first_divergence": min(metric_at), "divergence": "signature"} if len({*metric_at}) > 1 else {}
    )
    ranks = [rank(one, "failed", failure=CLOSED) for one in range(len(metric_at) - 1)]
    ranks.append(rank(len(ranks), "gone", exit_status=exit_status))
    return job(*ranks, groups=[group(windows, **differs)])


@pytest.mark.parametrize("exit_status", [None, -6])
def test_an_order_that_differs_is_the_threads_and_no_ranks_fault(exit_status: int | None) -> None:
    verdict = judge(mixed(3, 4, 3, exit_status=exit_status))
    assert (verdict.kind, verdict.certainty, verdict.blamed) == ("different collectives", "certain", ())
    assert (verdict.number, verdict.concerned) == (3, (0, 1, 2))
    assert {one: at.line for one, at in verdict.call_sites.items()} == {0: 18, 1: 27, 2: 18}


def test_the_same_difference_on_one_thread_is_a_ranks_fault() -> None:
    assert judge(mixed(3, 4, 3, is_by_thread=False)).blamed == (1,)


@pytest.mark.parametrize(("exit_status", "kind"), [(-6, "different collectives"), (-9, "killed")])
def test_an_abort_is_likely_the_threads_doing_even_if_they_were_written_down_in_one_order(
    exit_status: int, kind: str
) -> None:
    """Each thread writes before it launches, so that another one may launch in between."""
    verdict = judge(mixed(3, 3, 3, exit_status=exit_status))
    assert verdict.kind == kind
    if kind != "killed":
        assert (verdict.certainty, verdict.named) == ("likely", ())
        assert verdict.call_sites[0] == site(18)


BY_GLOO = 'Fatal Python error: Aborted\n\nThread 0x07f (most recent call first):\n  File "train.py", line 27 in main\n'


@pytest.mark.parametrize(
    ("stacks", "backend", "certainty"),
    [
        (BY_GLOO, "gloo", "likely"),
        (BY_GLOO.replace("Thread 0x", "Current thread 0x"), "gloo", "certain"),
        (BY_GLOO, "nccl", "certain"),
        ("", "gloo", "certain"),
    ],
)
def test_a_rank_that_a_thread_of_gloo_has_aborted_may_not_be_at_fault(
    stacks: str, backend: str, certainty: str
) -> None:
    """gloo aborts a process that receives more than it expects, of which nothing else may be left."""
    waiting = group({one: trained(5, is_waiting=True) for one in range(3)}, backend=backend)
    ranks = [rank(one, "failed", failure=CLOSED) for one in range(2)]
    gone = rank(2, "gone", exit_status=-6, stacks=stacks)
    verdict = judge(job(*ranks, gone, groups=[waiting]))
    assert (verdict.kind, verdict.named, verdict.certainty) == ("killed", (2,), certainty)


def test_a_thread_with_a_group_of_its_own_is_not_blamed_for_an_abort() -> None:
    alike = group({one: [entry(n, bucket(0)) for n in range(1, 4)] for one in range(3)})
    own = group({one: [metric(1)] for one in range(3)}, name="metrics")
    ranks = [rank(0, "failed", failure=CLOSED), rank(1, "gone", exit_status=-6), rank(2, "failed", failure=CLOSED)]
    assert judge(job(*ranks, groups=[alike, own])).kind == "killed"
