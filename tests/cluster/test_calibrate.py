"""The sweep of ``overlapscope calibrate`` over real ranks."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from instrumented_ddp.calibrate import measure_all_sizes
from overlapscope.bucket_model.calibration import Calibration
from overlapscope.errors import OverlapScopeError
from tests.cluster.ranks import run_ranks

pytestmark = [pytest.mark.cluster, pytest.mark.slow]


def measured(largest_bytes: int) -> Calibration:
    return measure_all_sizes(dist.group.WORLD, torch.device("cpu"), largest_bytes)


@pytest.mark.parametrize("world_size", [2, 3])
def test_all_ranks_measure_the_same_sizes_and_have_the_same_times(world_size):
    first, *others = run_ranks(measured, world_size, 512 * 1024)
    assert all(other == first for other in others)
    assert (first.backend, first.device, first.world_size) == ("gloo", "cpu", world_size)
    assert [sample.bytes for sample in first.samples] == [1024 * 2**i for i in range(10)]
    assert all(5 <= len(sample.times_ns) <= 50 for sample in first.samples)
    assert all(min(sample.times_ns) > 0 for sample in first.samples)
    assert [pair.bytes for pair in first.pairs] == [128 * 1024, 256 * 1024, 512 * 1024], "gloo runs two at a time"
    assert all(min(pair.times_ns) > 0 for pair in first.pairs)


def test_one_rank_has_nobody_to_reduce_with():
    (error,) = run_ranks(measured, 1, 4096)
    assert isinstance(error, OverlapScopeError)
    assert "start two or more" in str(error)
