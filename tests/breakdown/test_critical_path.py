"""Whose block the job waits for, in cases small enough to follow by hand."""

from __future__ import annotations

import pytest

from overlapscope.breakdown.breakdown import BLOCKS, compute_breakdown
from overlapscope.breakdown.critical_path import JobBreakdown, compute_job_breakdown, paths_converge_before
from overlapscope.breakdown.steady_steps import select_steady_steps
from overlapscope.trace.recording import Trace
from tests.breakdown.recordings import Rows, recording


def phases(rank: int, **spans: tuple[int, int]) -> Rows:
    return [
        {"rank": rank, "phase": name, "start_ns": start_ns, "end_ns": end_ns}
        for name, (start_ns, end_ns) in spans.items()
    ]


def bucket(number: int, *spans: tuple[int, int], op: str = "all_reduce") -> Rows:
    """A collective that each rank launches, and that ends for it, at some moment."""
    return [
        {"rank": rank, "bucket": number, "op": op, "launch_ns": launch_ns, "ready_ns": launch_ns, "end_ns": end_ns}
        for rank, (launch_ns, end_ns) in enumerate(spans)
    ]


def steps(*ends_ns: int) -> Rows:
    return [{"rank": rank, "start_ns": 0, "end_ns": end_ns} for rank, end_ns in enumerate(ends_ns)]


def job_of(trace: Trace) -> JobBreakdown:
    breakdown = compute_breakdown(trace)
    job = compute_job_breakdown(trace, breakdown, select_steady_steps(trace, breakdown))
    assert job is not None
    return job


def blocks_of(trace: Trace) -> dict[str, int]:
    (row,) = job_of(trace).ns
    return {name: int(ns) for name, ns in zip(BLOCKS, row, strict=True) if ns}


def test_while_ranks_wait_for_another_one_it_counts_what_that_one_does() -> None:
    trace = recording(
        steps=steps(100, 100),
        phases=[
            *phases(0, forward=(0, 20), backward=(20, 40), finalize=(40, 90), optimizer=(90, 100)),
            *phases(1, data_wait=(0, 30), forward=(30, 50), backward=(50, 80), finalize=(80, 90), optimizer=(90, 100)),
        ],
        collectives=bucket(0, (40, 90), (80, 90)),
    )
    expected = {"data_wait": 30, "forward": 20, "backward": 30, "exposed": 10, "optimizer": 10}
    assert blocks_of(trace) == expected
    assert job_of(trace).rank_ns.tolist() == [[10, 80]]  # both are let go at 90, and do the same


def test_transfers_that_queue_lead_to_the_arrival_that_the_first_of_them_waited_for() -> None:
    trace = recording(
        backend="nccl",
        steps=steps(100),
        phases=phases(0, backward=(0, 50), finalize=(50, 95), optimizer=(95, 100)),
        collectives=[*bucket(0, (10, 60)), *bucket(1, (40, 95))],
        ranks=1,
    )
    # Bucket 1 could not begin before bucket 0 had ended: from 10 on it is transfers that the step waits for.
    assert blocks_of(trace) == {"backward": 10, "exposed": 85, "optimizer": 5}


def test_two_lanes_of_gloo_do_not_queue() -> None:
    trace = recording(
        backend="gloo",
        steps=steps(100),
        phases=phases(0, backward=(0, 50), finalize=(50, 95), optimizer=(95, 100)),
        collectives=[*bucket(0, (10, 60)), *bucket(1, (40, 95))],
        ranks=1,
    )
    assert blocks_of(trace) == {"backward": 40, "exposed": 55, "optimizer": 5}


def test_who_waits_for_buffers_waits_for_the_rank_that_sends_them() -> None:
    trace = recording(
        steps=steps(60, 60),
        phases=[
            *phases(0, data_wait=(0, 30), forward=(40, 50), optimizer=(50, 60)),
            *phases(1, data_wait=(0, 10), forward=(40, 50), optimizer=(50, 60)),
        ],
        collectives=bucket(-1, (30, 40), (10, 40), op="broadcast"),
    )
    assert blocks_of(trace) == {"data_wait": 30, "buffers": 10, "forward": 10, "optimizer": 10}


@pytest.mark.parametrize("missing", ["clock", "log"])
def test_what_can_not_be_compared_has_no_breakdown_of_the_job(missing: str) -> None:
    trace = recording(
        steps=steps(10, 10),
        clocks=("same boot", "none") if missing == "clock" else (),
        world_size=3 if missing == "log" else 2,
    )
    breakdown = compute_breakdown(trace)
    assert compute_job_breakdown(trace, breakdown, select_steady_steps(trace, breakdown)) is None


def test_where_all_ranks_waited_it_does_not_matter_where_the_path_comes_from() -> None:
    trace = recording(
        steps=steps(100, 100),
        phases=[
            *phases(0, forward=(0, 20), backward=(20, 40), finalize=(40, 90), optimizer=(90, 100)),
            *phases(1, forward=(0, 50), backward=(50, 80), finalize=(80, 90), optimizer=(90, 100)),
        ],
        collectives=bucket(0, (40, 90), (80, 90)),
    )
    breakdown = compute_breakdown(trace)
    assert paths_converge_before(
        trace, breakdown, now_ns=100, then_ns=60
    )  # from both it leads to the arrival of rank 1
    assert paths_converge_before(trace, breakdown, now_ns=100, then_ns=85)  # and from there through the same transfer
    assert not paths_converge_before(trace, breakdown, now_ns=100, then_ns=95)  # each rank was on its own then


def test_where_nobody_waited_it_matters() -> None:
    trace = recording(
        steps=steps(100, 90),
        phases=[
            *phases(0, forward=(0, 20), backward=(20, 80), finalize=(80, 85), optimizer=(85, 100)),
            *phases(1, forward=(0, 25), backward=(25, 75), finalize=(75, 80), optimizer=(80, 90)),
        ],
        collectives=bucket(0, (40, 60), (45, 60)),
    )
    assert not paths_converge_before(trace, compute_breakdown(trace), now_ns=90, then_ns=10)
