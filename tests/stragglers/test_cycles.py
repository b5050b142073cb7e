"""Cycles: what each rank does on its own between the last all-reduces of two steps."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from overlapscope.breakdown.breakdown import compute_breakdown
from overlapscope.stragglers.cycles import CAUSES, Cycles, build_cycles, lower_median
from overlapscope.trace.recording import Trace
from tests.simulated_job import MS, PHASES, Job


def cycles_in(trace: Trace, first_step: int = 0) -> Cycles:
    cycles = build_cycles(trace, compute_breakdown(trace), first_step)
    assert cycles is not None
    return cycles


def own(cycles: Cycles, cause: str) -> np.ndarray:
    return cycles.local_ns[CAUSES.index(cause)]


@given(seed=st.integers(0, 1000), ranks=st.integers(2, 6), noise=st.floats(0, 0.3), broadcast=st.booleans())
def test_local_times_are_what_the_ranks_did(seed: int, ranks: int, noise: float, broadcast: bool) -> None:
    job = Job(ranks=ranks, steps=8, noise=noise, seed=seed)
    job.broadcast_ns = 2 * MS if broadcast else None
    cycles = cycles_in(job.run())
    for phase in PHASES:
        cause = "bucket_copies" if phase == "finalize" else phase
        np.testing.assert_array_equal(own(cycles, cause), job.local_ns[phase][1:], err_msg=phase)
    np.testing.assert_array_equal(cycles.end_ns[:, -1], job.cycle_times_ns)


def test_local_time_does_not_hold_what_a_rank_waits_for_others() -> None:
    job = Job(steps=5)
    job.slow_down(rank=1, share=0.5)
    cycles = cycles_in(job.run())
    assert (own(cycles, "forward")[:, [0, 2, 3]] == 10 * MS).all()
    assert (own(cycles, "forward")[:, 1] == 15 * MS).all()
    assert (own(cycles, "backward")[:, 1] == 30 * MS).all()
    assert (cycles.end_ns[:, -1] == (37 + 15 + 2) * MS).all(), "everybody's cycle is as long as that of rank 1"


@pytest.mark.parametrize("is_other_model", [False, True])
def test_where_ranks_wait_in_each_backward_local_time_holds_none_of_it(is_other_model: bool) -> None:
    job = Job(ranks=2, steps=12)
    job.local_ns["data_wait"][:, 1] += 15 * MS
    job.local_ns["optimizer"][1::2] = 0  # two backwards a step, without no_sync() or of two models
    trace = job.run()
    bytes_ = trace.collectives["bytes"] + 4 * is_other_model * (trace.collectives["step"] % 2)
    ends = trace.steps.groupby(["rank", trace.steps["step"] // 2])
    cycles = cycles_in(
        replace(
            trace,
            steps=ends.agg({"start_ns": "min", "end_ns": "max", "is_light": "first"}).reset_index(),
            phases=trace.phases.assign(step=trace.phases["step"] // 2),
            collectives=trace.collectives.assign(step=trace.collectives["step"] // 2, bytes=bytes_),
        )
    )
    np.testing.assert_array_equal(own(cycles, "data_wait"), [[4 * MS, 34 * MS]] * 5)
    np.testing.assert_array_equal(own(cycles, "inter_phase"), [[2 * MS, 2 * MS]] * 5)
    np.testing.assert_array_equal(cycles.lateness_ns, [[0, 30 * MS]] * 5)
    np.testing.assert_array_equal(cycles.end_ns[:, -1], job.cycle_times_ns[1:].reshape(5, 2).sum(axis=1))


def test_garbage_collection_is_taken_out_of_the_phase_it_interrupts() -> None:
    """Also in the optimizer, which is recorded under the step before."""
    job = Job(steps=8, gc=[(1, 3, "forward", 40 * MS), (2, 5, "optimizer", 30 * MS), (0, 4, "data_wait", 20 * MS)])
    cycles = cycles_in(job.run())
    gc = own(cycles, "gc")
    assert gc[3 - 1, 1] == 40 * MS
    assert gc[5 - 1, 2] == 30 * MS
    assert gc[4 - 1, 0] == 20 * MS
    assert gc.sum() == 90 * MS
    for phase, usual_ms in (("forward", 10), ("optimizer", 3), ("data_wait", 2)):
        assert (own(cycles, phase) == usual_ms * MS).all()


def test_communication_that_ends_later_for_a_rank_is_carried_over() -> None:
    job = Job(steps=6)
    job.carried_over_ns[2, 3] = 4 * MS
    cycles = cycles_in(job.run())
    carried = own(cycles, "release_skew")
    assert carried[cycles.steps == 3, 3] == 4 * MS
    assert carried.sum() == 4 * MS


def test_time_behind_an_earlier_bucket_is_not_transfer() -> None:
    """Bucket 0 takes so long that bucket 1 has to wait for it, after all ranks have arrived."""
    job = Job(steps=4)
    job.transfer_ns[:, 0] = 12 * MS
    cycles = cycles_in(job.run())
    np.testing.assert_array_equal(cycles.transfer_ns, job.transfer_ns[1:])


def test_steps_with_other_buckets_are_left_out_and_the_rest_is_kept() -> None:
    trace = Job(steps=9).run()
    table = trace.collectives
    less = table[~((table["step"] == 4) & (table["bucket"] == 2))]
    cycles = cycles_in(replace(trace, collectives=less.reset_index(drop=True)))
    assert cycles.steps.tolist() == [1, 2, 3, 5, 6, 7, 8]
    assert cycles.left_out == 2


def test_warm_up_is_left_out() -> None:
    cycles = cycles_in(Job(steps=9).run(), first_step=3)
    assert cycles.steps.tolist() == [4, 5, 6, 7, 8]


@pytest.mark.parametrize("job", [Job(ranks=1), Job(steps=1)])
def test_nothing_to_compare_is_no_cycles(job: Job) -> None:
    trace = job.run()
    assert build_cycles(trace, compute_breakdown(trace)) is None


def test_the_lower_median_is_one_of_the_values() -> None:
    values = np.array([[4, 1, 3, 2], [9, 9, 1, 1]])
    assert lower_median(values, axis=1).tolist() == [2, 1]
    assert lower_median(np.array([[7, 5]]), axis=1).tolist() == [5]
