"""Layers that all ranks leave out: less is sent only where whole buckets are left out."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from instrumented_ddp import DistributedDataParallel
from instrumented_ddp.strategies.layer_drop import LayerDrop
from overlapscope.trace.recording import read_trace
from tests.cluster.ranks import run_ranks

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.slow,
    pytest.mark.skipif(
        "skip_all_reduce_unused_params" not in inspect.signature(nn.parallel.DistributedDataParallel).parameters,
        reason="torch is older than 2.8",
    ),
]

STEPS, LAYERS = 8, 4
LAYER_BYTES = 4 * (16 * 16 + 16)


def train(seed: int | None, bucket_cap_mb: float, folder: str) -> list[list[bool]]:
    """Which layers had a part in each step's loss on this rank."""
    layers = LayerDrop([nn.Linear(16, 16) for _ in range(LAYERS)], 0.5, seed=seed)
    ddp = DistributedDataParallel(
        nn.Sequential(layers, nn.Linear(16, 16)),
        bucket_cap_mb=bucket_cap_mb,
        find_unused_parameters=True,
        skip_all_reduce_unused_params=True,
        trace=folder,
    )
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    kept: list[list[bool]] = []
    for layer in layers:
        layer.register_forward_hook(lambda layer, *_: kept[-1].append(layer))
    data = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(STEPS):
        kept.append([])
        ddp(torch.randn(4, 16, generator=data)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [[layer in of_step for layer in layers] for of_step in kept]


@pytest.mark.parametrize("seed", [3, None])
def test_ranks_leave_out_the_same_layers(tmp_path: Path, seed: int | None) -> None:
    first, second = run_ranks(train, 2, seed, 25, str(tmp_path))
    assert first == second
    assert {True, False} <= {is_kept for of_step in first for is_kept in of_step}


@pytest.mark.parametrize(("bucket_cap_mb", "saves"), [(LAYER_BYTES / 2**20, True), (25, False)])
def test_bytes_fall_only_if_whole_buckets_are_left_out(tmp_path: Path, bucket_cap_mb: float, saves: bool) -> None:
    kept, _ = run_ranks(train, 2, 3, bucket_cap_mb, str(tmp_path))
    buckets = read_trace(tmp_path).collectives.query("rank == 0 and bucket >= 0")
    sent = buckets.groupby("step")["bytes"].sum().tolist()
    assert sent == [LAYER_BYTES * (1 + (sum(of_step) if saves else LAYERS)) for of_step in kept]


def test_in_an_evaluation_all_layers_are_there() -> None:
    layers = LayerDrop([nn.Identity(), nn.Linear(1, 1)], 1.0, seed=0)
    one = torch.ones(1, 1)
    assert torch.equal(layers(one), one)
    layers.eval()
    assert torch.equal(layers(one), layers[1](one))
