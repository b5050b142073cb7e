"""Times of collectives over another mesh, by the formula of a ring."""

from __future__ import annotations

import numpy as np
import pytest

from overlapscope.sharded_model.mesh import list_shard_counts, with_shards
from overlapscope.sharded_model.times import Line, PartTimes, ShardedTimes

RANKS, BYTES, LATENCY, PER_BYTE = 4, 120, 10.0, 4.0


def ring_ns(ranks: int, bytes_: int) -> float:
    """A gather or a scatter: a round less than there are ranks, in each of which a share is sent."""
    return (ranks - 1) * (LATENCY + PER_BYTE * bytes_ / ranks)


def make_times() -> ShardedTimes:
    """One step of 4 ranks with one part."""
    line = Line(alpha_ns=(RANKS - 1) * LATENCY, beta_ns_per_byte=PER_BYTE * (RANKS - 1) / RANKS, alpha_error_ns=1.0)
    part = PartTimes(
        transfer_ns={0: np.full((1, RANKS), ring_ns(RANKS, BYTES))}, overhead_ns={}, line=line, bytes={0: BYTES}
    )
    nothing = np.zeros((1, RANKS))
    return ShardedTimes(
        start_ns=nothing,
        before_ns=nothing,
        forward_ns=nothing[:, :, None],
        backward_ns=nothing[:, :, None],
        after_ns=nothing,
        gathers={"forward": part, "backward": part},
        reduces=part,
        replica_reduces=None,
        shard_groups=((0, 1, 2, 3),),
        replica_groups=((0, 1, 2, 3),),
        blocks_host=True,
    )


def test_fewer_shards_are_gathered_in_fewer_rounds_and_then_reduced_among_replicas() -> None:
    assert list(list_shard_counts(make_times())) == [2]
    times = with_shards(make_times(), 2)
    assert (times.shard_groups, times.replica_groups) == (((0, 1), (2, 3)), ((0, 2), (1, 3)))
    assert np.allclose(times.gathers["forward"].transfer_of((0,)), ring_ns(2, BYTES))
    assert np.allclose(times.reduces.transfer_of((0,)), ring_ns(2, BYTES))
    assert times.replica_reduces is not None
    assert times.replica_reduces.transfer_of((0,)) == pytest.approx(2 * ring_ns(2, BYTES // 2))
