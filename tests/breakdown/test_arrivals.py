"""Arrivals: every rank's entry into every collective, matched across ranks."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

from overlapscope.breakdown.arrivals import compute_arrivals, match_collectives
from overlapscope.trace.recording import Trace
from tests.simulated_job import BUCKET_BYTES, MS, Job


def with_collectives(trace: Trace, collectives: pd.DataFrame) -> Trace:
    return replace(trace, collectives=collectives.reset_index(drop=True))


def test_wait_and_transfer_are_told_apart() -> None:
    """Rank 2 is 5 ms late in step 3, and bucket 1 of step 4 takes 30 ms on the wire."""
    job = Job(steps=6)
    job.local_ns["forward"][3, 2] += 5 * MS
    job.transfer_ns[4, 1] = 30 * MS
    table = compute_arrivals(match_collectives(job.run()))
    late = table[(table["step"] == 3) & (table["bucket"] == 0)]
    assert late["wait_ns"].tolist() == [5 * MS, 5 * MS, 0, 5 * MS]
    assert (late["last_rank"] == 2).all()
    assert (late["transfer_ns"] == 1 * MS).all()
    slow = table[(table["step"] == 4) & (table["bucket"] == 1)]
    assert (slow["wait_ns"] == 0).all()
    assert (slow["transfer_ns"] == 30 * MS).all()


def test_bandwidths_are_those_of_nccl_tests() -> None:
    job = Job(ranks=4, steps=3)
    job.broadcast_ns = 2 * MS
    table = compute_arrivals(match_collectives(job.run()))
    first = table[(table["bucket"] == 0) & (table["step"] == 1)].iloc[0]
    assert first["algbw_bytes_per_s"] == pytest.approx(BUCKET_BYTES[0] / 1e-3)
    assert first["busbw_bytes_per_s"] == pytest.approx(BUCKET_BYTES[0] / 1e-3 * 2 * 3 / 4)
    buffers = table[(table["op"] == "broadcast") & (table["step"] == 1)].iloc[0]
    assert buffers["busbw_bytes_per_s"] == buffers["algbw_bytes_per_s"]


def test_collectives_come_in_the_order_of_their_launch() -> None:
    matched = match_collectives(Job(steps=3).run())
    assert matched.bucket.tolist() == [0, 1, 2, 3] * 3
    assert matched.step.tolist() == [0] * 4 + [1] * 4 + [2] * 4


def test_the_order_of_the_rows_does_not_matter() -> None:
    trace = Job(steps=5, noise=0.05).run()
    shuffled = with_collectives(trace, trace.collectives.sample(frac=1, random_state=1))
    np.testing.assert_array_equal(match_collectives(trace).arrival_ns, match_collectives(shuffled).arrival_ns)


def test_a_collective_that_one_rank_never_finished_is_left_out() -> None:
    trace = Job(steps=3).run()
    collectives = trace.collectives.copy()
    is_it = (collectives["rank"] == 1) & (collectives["step"] == 2) & (collectives["bucket"] == 3)
    collectives.loc[is_it, "end_ns"] = pd.NA
    assert len(match_collectives(with_collectives(trace, collectives)).step) == 3 * 4 - 1


def test_the_same_bucket_twice_in_a_step_is_matched_turn_by_turn() -> None:
    """As with two backward passes that are both reduced."""
    trace = Job(steps=2).run()
    again = trace.collectives.copy()
    times = ["launch_ns", "ready_ns", "start_ns", "end_ns"]
    again[times] = again[times] + 500 * MS
    matched = match_collectives(with_collectives(trace, pd.concat([again, trace.collectives])))
    assert matched.bucket.tolist() == [0, 1, 2, 3, 0, 1, 2, 3] * 2
    assert (np.diff(matched.arrival_ns.reshape(2, 8, 4), axis=1) > 0).all()


def test_on_a_device_a_rank_arrives_when_its_gradients_are_ready() -> None:
    """The host has launched long before."""
    trace = Job(steps=2).run()
    late = trace.collectives.assign(ready_ns=trace.collectives["ready_ns"] + 7)
    arrival_ns = match_collectives(with_collectives(trace, late)).arrival_ns
    np.testing.assert_array_equal(arrival_ns, match_collectives(trace).arrival_ns + 7)


def test_a_recording_without_communication_has_no_arrivals() -> None:
    trace = Job(steps=2).run()
    matched = match_collectives(with_collectives(trace, trace.collectives.iloc[:0]))
    assert len(compute_arrivals(matched)) == 0


def test_ranks_that_train_in_another_group_are_not_compared() -> None:
    """Their all-reduces have the same names and are others."""
    trace = Job(ranks=4, steps=3).run()
    apart = replace(trace, run=trace.run | {"ranks": [0, 1]})
    assert match_collectives(apart).ranks.tolist() == [0, 1]
    assert len(match_collectives(apart).step) == len(match_collectives(trace).step)


def test_a_rank_without_a_common_clock_is_left_out() -> None:
    trace = Job(ranks=4, steps=3).run()
    trace.ranks.loc[3, "clock"] = "none"
    assert match_collectives(trace).ranks.tolist() == [0, 1, 2]


def test_ranks_wait_for_those_that_they_exchange_shards_with() -> None:
    """Of two pairs of replicas, one is late; bandwidths are those of two ranks."""
    job = Job(ranks=4, steps=3)
    job.local_ns["forward"][1, 2] += 5 * MS
    trace = job.run()
    pairs = {"shard_groups": [[0, 1], [2, 3]], "replica_groups": [[0, 2], [1, 3]], "units": []}
    trace = replace(trace, run=trace.run | {"models": [{"model": 0, "sharding": pairs}]})
    table = compute_arrivals(match_collectives(trace))
    late = table[(table["step"] == 1) & (table["bucket"] == 0)]
    assert late["wait_ns"].tolist() == [5 * MS, 0, 0, 0]
    assert late["last_rank"].tolist() == [2, 3, 2, 3] or late["last_rank"].tolist() == [2, 1, 2, 1]
    usual = table[(table["step"] == 2) & (table["bucket"] == 0)].iloc[0]
    assert usual["busbw_bytes_per_s"] == pytest.approx(usual["algbw_bytes_per_s"])


def test_ranks_that_have_made_different_numbers_of_steps_are_not_compared() -> None:
    """With uneven inputs rank 2 begins the next epoch with step 5, and the others with step 7."""
    trace = Job(steps=12).run()
    table = trace.collectives
    apart = with_collectives(
        trace, table.assign(step=table["step"] + 2 * ((table["rank"] == 2) & (table["step"] >= 5)))
    )
    assert np.unique(match_collectives(apart).step).tolist() == [0, 1, 2, 3, 4]
    assert np.unique(match_collectives(apart, has_common_clock=False).step).tolist() == [*range(5), *range(7, 12)]
