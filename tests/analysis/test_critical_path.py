"""The critical path: hand-computed cases, and that it is as long as the cycle."""

from __future__ import annotations

import pandas as pd
from hypothesis import given, settings
from hypothesis import strategies as st

from overlapscope.analysis.critical_path import critical_paths
from overlapscope.analysis.cycles import cycles_of
from tests.simulated_job import MS, Job


def paths_of(job: Job) -> pd.DataFrame:
    cycles = cycles_of(job.run())
    assert cycles is not None
    return critical_paths(cycles)


def test_it_follows_the_rank_that_arrives_last_and_then_the_transfer() -> None:
    job = Job(steps=4)
    job.slow_down(rank=2, share=0.5)
    paths = paths_of(job)
    assert (paths["rank"] == 2).all()
    assert (paths["bucket"] == 3).all()
    assert (paths["own_ns"] == (37 + 15) * MS).all()
    assert (paths["transfer_ns"] == 2 * MS).all()


def test_it_leaves_the_rank_where_transfers_begin_to_follow_each_other() -> None:
    """Bucket 1 takes so long that buckets 2 and 3 have to wait for it, after all have arrived."""
    job = Job(steps=4)
    job.transfer_ns[:, 1] = 30 * MS
    job.own_ns["forward"][:, 1] += 1 * MS
    paths = paths_of(job)
    assert (paths["rank"] == 1).all()
    assert (paths["bucket"] == 1).all()
    assert (paths["own_ns"] == (17 + 10 + 1) * MS).all()
    assert (paths["transfer_ns"] == (30 + 3 + 2) * MS).all()


def test_it_goes_through_the_rank_whose_buffers_the_other_one_waited_for() -> None:
    job = Job(steps=4)
    job.broadcast_ns = 1 * MS
    job.own_ns["data_wait"][:, 0] += 10 * MS
    job.own_ns["forward"][:, 2] += 5 * MS
    paths = paths_of(job)
    assert (paths["rank"] == 2).all()
    assert (paths["rank_before_forward"] == 0).all()


@settings(max_examples=30)
@given(ranks=st.integers(2, 6), noise=st.floats(0, 0.4), seed=st.integers(0, 10_000), data=st.data())
def test_it_is_as_long_as_the_cycle_and_never_longer_than_its_rank_took(
    ranks: int, noise: float, seed: int, data: st.DataObject
) -> None:
    job = Job(ranks=ranks, steps=6, noise=noise, seed=seed)
    job.transfer_ns[:] = data.draw(st.lists(st.integers(0, 20 * MS), min_size=4, max_size=4))
    cycles = cycles_of(job.run())
    assert cycles is not None
    paths = critical_paths(cycles)
    assert (paths["own_ns"] + paths["transfer_ns"] == cycles.cycle_time_ns).all()
    assert (paths["own_ns"] <= cycles.own_ns.sum(axis=0).max(axis=1)).all()
