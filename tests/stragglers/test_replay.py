"""The replay: hand-computed cases, and what must hold for any recording."""

from __future__ import annotations

from dataclasses import replace
from unittest import mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from overlapscope.breakdown.breakdown import compute_breakdown
from overlapscope.stragglers import replay as replay_module
from overlapscope.stragglers.cycles import CAUSES, Cycles, build_cycles
from overlapscope.stragglers.replay import Replay, finish_ns
from overlapscope.trace.recording import Trace
from tests.simulated_job import MS, Job


def cycles_in(trace: Trace) -> Cycles:
    cycles = build_cycles(trace, compute_breakdown(trace))
    assert cycles is not None
    return cycles


def replay_of(job: Job) -> Replay:
    return Replay(cycles_in(job.run()))


def added_by(replay: Replay, rank: int) -> float:
    """What one rank alone adds to the ideal."""
    return float((replay.ideal_except_ns(rank, replay.excess_of([rank])) - replay.ideal_ns).mean())


jobs = st.builds(
    Job,
    ranks=st.integers(2, 6),
    steps=st.just(7),
    noise=st.floats(0, 0.4),
    seed=st.integers(0, 10_000),
)


@given(job=jobs, broadcast=st.booleans(), carried=st.integers(0, 3))
def test_with_nothing_replaced_the_replay_is_the_recording(job: Job, broadcast: bool, carried: int) -> None:
    job.broadcast_ns = 2 * MS if broadcast else None
    job.carried_over_ns[3, -1] = carried * MS
    replay = replay_of(job)
    np.testing.assert_array_equal(replay.recorded_ns, job.cycle_times_ns)


@given(job=jobs, broadcast=st.booleans())
def test_savings_of_each_rank_are_those_of_asking_one_by_one(job: Job, broadcast: bool) -> None:
    job.broadcast_ns = 2 * MS if broadcast else None
    replay = replay_of(job)
    savings_ns = replay.savings_by_rank_ns()
    for place in range(job.ranks):
        np.testing.assert_array_equal(savings_ns[:, place], replay.saving_of_ranks_ns([place]))


@given(job=jobs, broadcast=st.booleans(), at_once=st.integers(1, 60))
def test_it_does_not_matter_how_many_cycles_are_looked_at_at_once(job: Job, broadcast: bool, at_once: int) -> None:
    job.broadcast_ns = 2 * MS if broadcast else None

    def results() -> list[np.ndarray]:
        replay = replay_of(job)
        of_causes = [replay.saving_of_cause_ns(cause) for cause in range(len(CAUSES))]
        return [replay.recorded_ns, replay.savings_by_rank_ns(), *of_causes]

    of_all = results()
    with mock.patch.object(replay_module, "_ARRIVALS_AT_ONCE", at_once):
        of_some = results()
    for some, all_ in zip(of_some, of_all, strict=True):
        np.testing.assert_array_equal(some, all_)


@given(job=jobs, broadcast=st.booleans())
def test_with_all_excess_back_the_ideal_is_the_recording(job: Job, broadcast: bool) -> None:
    job.broadcast_ns = 2 * MS if broadcast else None
    replay = replay_of(job)
    everyone = np.arange(job.ranks)
    np.testing.assert_array_equal(replay.ideal_except_ns(everyone, replay.excess), replay.recorded_ns)
    np.testing.assert_array_equal(replay.length_ns(replay.without(everyone, replay.excess)), replay.ideal_ns)


@given(job=jobs)
def test_quicker_transfers_never_lengthen_a_cycle(job: Job) -> None:
    replay = replay_of(job)
    assert (replay.with_transfers_ns(replay.transfer_ns // 2) <= replay.recorded_ns).all()
    assert (replay.with_transfers_ns(replay.best_transfer_ns) <= replay.recorded_ns).all()


def queued_job() -> Job:
    """Buckets that wait for each other, but for the first, and transfers that vary."""
    job = Job(steps=60, noise=0.05)
    job.transfer_ns = (8 * MS * np.random.default_rng(0).uniform(1, 2, job.transfer_ns.shape)).astype(np.int64)
    return job


def cycles_with(trace: Trace, **run: object) -> Cycles:
    return cycles_in(replace(trace, run=trace.run | run))


def test_where_all_reduces_run_one_by_one_the_best_of_those_that_are_queued_are_known() -> None:
    job = queued_job()
    replay = Replay(cycles_with(job.run(), backend="nccl"))
    transfer_ns = job.transfer_ns[-len(replay.cycles.steps) :]
    best_ns = np.quantile(transfer_ns, 0.05, axis=0, method="lower")
    np.testing.assert_array_equal(replay.best_ns, best_ns)
    quicker = queued_job()
    quicker.transfer_ns[-len(transfer_ns) :] = np.minimum(transfer_ns, best_ns)
    quicker.run()
    predicted_ns = replay.with_transfers_ns(replay.best_transfer_ns)
    np.testing.assert_array_equal(predicted_ns, quicker.cycle_times_ns[-len(transfer_ns) :])


@pytest.mark.parametrize("backend", ["gloo", "cpu:gloo,cuda:nccl", ""])
def test_where_several_may_run_at_a_time_queued_ones_have_no_best(backend: str) -> None:
    best_ns = Replay(cycles_with(queued_job().run(), backend=backend)).best_ns
    assert not np.isnan(best_ns[0])
    assert np.isnan(best_ns[1:]).all()


def test_of_two_groups_and_of_ends_that_are_bounds_queued_ones_have_no_best() -> None:
    trace = queued_job().run()
    groups = trace.collectives.assign(group=(trace.collectives["bucket"] > 1).astype(int))
    for cycles in (
        cycles_with(trace, backend="nccl", ends_are_bounds="only the host knows them"),
        cycles_with(replace(trace, collectives=groups), backend="nccl"),
    ):
        assert np.isnan(Replay(cycles).best_ns[1:]).all()


def test_all_alike_is_the_ideal() -> None:
    replay = replay_of(Job(steps=6))
    np.testing.assert_array_equal(replay.ideal_ns, replay.recorded_ns)
    assert not replay.savings_by_rank_ns().any()


def test_mending_one_late_rank_saves_its_lateness() -> None:
    job = Job(steps=6)
    job.local_ns["data_wait"][4, 2] += 15 * MS
    replay = replay_of(job)
    savings_ns = replay.savings_by_rank_ns()
    assert savings_ns[3, 2] == savings_ns.sum() == 15 * MS


def test_of_two_equally_late_ranks_both_add_and_neither_alone_saves() -> None:
    job = Job(ranks=5, steps=6)
    for rank in (1, 4):
        job.local_ns["forward"][:, rank] += 8 * MS
    replay = replay_of(job)
    added_ns = [added_by(replay, rank) for rank in range(5)]
    assert added_ns == [0, 8 * MS, 0, 0, 8 * MS]
    assert not replay.savings_by_rank_ns().any()
    assert (replay.saving_of_ranks_ns([1, 4]) == 8 * MS).all()


def test_lateness_that_a_busy_link_hides_saves_nothing() -> None:
    """Transfers take so long that the last bucket waits for the link, and not for its last rank."""
    job = Job(steps=6)
    job.transfer_ns[:] = 30 * MS
    job.local_ns["backward"][:, 1] += 4 * MS
    savings_ns = replay_of(job).savings_by_rank_ns()
    # Only the first bucket, ready at a quarter of backward, begins later, by a quarter of the 4 ms.
    assert (savings_ns.mean(axis=0) == [0, 1 * MS, 0, 0]).all()


def test_when_buffers_are_broadcast_all_wait_for_the_first_rank_before_forward() -> None:
    """Its late data and another rank's slow forward add up; without the broadcast they would not."""
    job = Job(steps=6)
    job.local_ns["data_wait"][:, 0] += 10 * MS
    job.local_ns["forward"][:, 2] += 5 * MS
    apart = replay_of(job)
    assert (apart.recorded_ns - apart.ideal_ns == 10 * MS).all()
    job.broadcast_ns = 1 * MS
    together = replay_of(job)
    assert (together.recorded_ns - together.ideal_ns == 15 * MS).all()
    assert [added_by(together, rank) for rank in range(4)] == [10 * MS, 0, 5 * MS, 0]
    assert (together.savings_by_rank_ns().mean(axis=0) == [10 * MS, 0, 5 * MS, 0]).all()


def test_ranks_alike_in_one_cause_save_what_the_latest_has_more_of_it() -> None:
    job = Job(steps=6)
    job.local_ns["forward"][:, 1] += 3 * MS
    job.local_ns["data_wait"][:, 2] += 2 * MS
    replay = replay_of(job)
    assert (replay.saving_of_cause_ns(CAUSES.index("forward")) == 1 * MS).all()  # the late data is then what counts
    assert not replay.saving_of_cause_ns(CAUSES.index("data_wait")).any()
    assert not replay.saving_of_cause_ns(CAUSES.index("optimizer")).any()


@pytest.mark.parametrize(
    ("last_arrivals", "transfers", "end"),
    [
        ([10], [5], 15),
        ([10, 20], [5, 5], 25),  # the link is idle between the two
        ([10, 12], [5, 5], 20),  # the second waits for the first
        ([10, 12, 30], [5, 5, 1], 31),
    ],
)
def test_the_end_of_a_cycle_by_hand(last_arrivals: list[int], transfers: list[int], end: int) -> None:
    assert finish_ns(np.array([last_arrivals]), np.array([transfers])).tolist() == [end]


def test_who_waits_in_a_collective_of_the_users_own_is_not_late_and_would_not_wait_for_a_mended_rank() -> None:
    trace = Job(ranks=3, steps=5).run()
    cycles = build_cycles(trace, compute_breakdown(trace))
    assert cycles is not None
    local_ns, late_ns = cycles.local_ns.copy(), 30 * MS
    local_ns[CAUSES.index("forward"), :, 1] += late_ns
    local_ns[CAUSES.index("collectives"), :, [0, 2]] += late_ns
    late = replace(cycles, local_ns=local_ns, arrival_ns=cycles.arrival_ns + late_ns, end_ns=cycles.end_ns + late_ns)
    replay = Replay(late)
    assert (replay.recorded_ns == late.end_ns[:, -1]).all()
    assert (replay.ideal_ns == cycles.end_ns[:, -1]).all()
    assert (replay.savings_by_rank_ns() == [0, late_ns, 0]).all()
    without = replay.without([1], replay.excess_of([1]))
    assert (replay.length_ns(without) == cycles.end_ns[:, -1]).all()
