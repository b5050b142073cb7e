"""Savings as breakdowns: hand-computed cases, and that their blocks sum to them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from overlapscope.breakdown.breakdown import compute_breakdown
from overlapscope.stragglers.cycles import CAUSES, build_cycles
from overlapscope.stragglers.finding import compute_saving
from overlapscope.stragglers.replay import Replay
from tests.simulated_job import MS, Job


def replay_of(job: Job) -> Replay:
    trace = job.run()
    cycles = build_cycles(trace, compute_breakdown(trace))
    assert cycles is not None
    return Replay(cycles)


def values(saving):
    return {name: mean.value for name, mean in saving.present.items()}


def test_what_one_of_four_ranks_computes_less_the_others_wait_less() -> None:
    job = Job(steps=9)
    job.local_ns["forward"][:, 2] += 8 * MS
    replay = replay_of(job)
    saving = compute_saving(replay, replay.ideal, replay.ideal_ns)
    assert saving.step.value == 8 * MS
    assert values(saving) == {"forward": 2 * MS, "exposed": 6 * MS}


def test_quicker_transfers_only_expose_less() -> None:
    replay = replay_of(Job(steps=9))
    saving = compute_saving(replay, replay.recorded, replay.with_transfers_ns(replay.transfer_ns // 2))
    assert values(saving) == {"exposed": MS}, "of the last bucket; the others are hidden"


def test_buffers_that_come_sooner_are_less_of_their_block() -> None:
    job = Job(steps=9)
    job.broadcast_ns = 2 * MS
    job.local_ns["data_wait"][:, 0] += 3 * MS  # rank 0 sends, and the others wait for it
    replay = replay_of(job)
    saving = compute_saving(replay, replay.ideal, replay.ideal_ns)
    assert values(saving) == {"data_wait": 0.75 * MS, "buffers": 2.25 * MS}


def test_of_what_changes_in_some_cycles_the_mean_is_over_all_and_the_interval_of_those() -> None:
    job = Job(steps=9)
    job.local_ns["data_wait"][[2, 5, 7], 1] += np.array([30, 40, 50]) * MS
    replay = replay_of(job)
    without = replay.without([1], replay.excess_of([1]))
    late = replay.cycles.local_ns[CAUSES.index("data_wait"), :, 1] > 10 * MS
    saving = compute_saving(replay, without, replay.length_ns(without), late).step
    assert saving.value == 120 * MS / 8
    assert 0 < saving.low < saving.value < saving.high
    few = compute_saving(replay, without, replay.length_ns(without), late & (late.cumsum() == 1)).step
    assert (few.value, np.isnan(few.low)) == (30 * MS / 8, True)


def test_no_more_can_be_saved_than_there_is() -> None:
    job = Job(steps=9, ranks=2)
    job.local_ns["forward"][3::4, 1] += 2000 * MS  # few long steps, whose mean is anything
    replay = replay_of(job)
    saving = compute_saving(replay, replay.ideal, replay.ideal_ns).step
    assert saving.value < saving.high == replay.recorded_ns.mean()


@given(ranks=st.integers(2, 5), noise=st.floats(0, 0.3), seed=st.integers(0, 1000), broadcast=st.booleans())
def test_blocks_sum_to_the_saving_whatever_is_changed(ranks: int, noise: float, seed: int, broadcast: bool) -> None:
    job = Job(ranks=ranks, steps=8, noise=noise, seed=seed)
    job.broadcast_ns = MS if broadcast else None
    replay = replay_of(job)
    without = replay.without([ranks - 1], replay.excess_of([ranks - 1]))
    for times, cycle_ns in (
        (replay.ideal, replay.ideal_ns),
        (without, replay.length_ns(without)),
        (replay.recorded, replay.with_transfers_ns(replay.best_transfer_ns)),
    ):
        saving = compute_saving(replay, times, cycle_ns)
        assert sum(values(saving).values()) == pytest.approx(saving.step.value, abs=1)
        assert saving.step.value == pytest.approx((replay.recorded_ns - cycle_ns).mean(), abs=1e-3)
