"""On a real CUDA device: NCCL with one rank, gloo with two and four ranks that share the device."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing
from torch import nn

from instrumented_ddp import DistributedDataParallel
from overlapscope.trace.reader import read_trace

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device, and there is none"),
]

STEPS = 8
WARM_UP_STEPS = 3
"""In the second one ranks compare their gradient orders, for which they have to wait."""


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(1024, 1024) for _ in range(8)]).cuda()


def train_beside_stock(rank: int, world_size: int, backend: str, folder: str) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.cuda.set_device(0)
    dist.init_process_group(backend, init_method=f"file://{folder}/rendezvous", rank=rank, world_size=world_size)
    ours = DistributedDataParallel(make_model(), device_ids=[0], bucket_cap_mb=4, trace=f"{folder}/traces")
    stock = nn.parallel.DistributedDataParallel(make_model(), device_ids=[0], bucket_cap_mb=4)
    models: list[Any] = [ours, stock]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.01) for model in models]
    for step in range(STEPS):
        inputs = torch.randn(64, 1024, generator=torch.Generator().manual_seed(10 * step + rank)).cuda()
        for model, optimizer in zip(models, optimizers, strict=True):
            optimizer.zero_grad()
            model(inputs).square().mean().backward()
        for own, other in zip(ours.parameters(), stock.parameters(), strict=True):
            torch.testing.assert_close(own.grad, other.grad)
        for optimizer in optimizers:
            optimizer.step()
    torch.cuda.synchronize()
    ours._session.close()
    dist.destroy_process_group()


@pytest.fixture(params=[("nccl", 1), ("gloo", 2), ("gloo", 4)], ids=["nccl-1", "gloo-2", "gloo-4"])
def recorded(request, tmp_path: Path) -> Path:
    backend, world_size = request.param
    torch.multiprocessing.spawn(train_beside_stock, (world_size, backend, str(tmp_path)), nprocs=world_size)
    return tmp_path / "traces"


def test_gradients_equal_stock_and_collectives_lie_within_what_the_host_saw(recorded):
    trace = read_trace(recorded)
    assert trace.errors == []
    reduced = trace.collectives.query("op == 'all_reduce'").dropna()
    assert len(reduced) > 0
    # Ends over gloo are marked on the stream that has waited for them, which is still within the step.
    # The host enqueues before the device begins; both are on the host's clock within the anchor's error.
    assert (reduced["start_ns"] >= reduced["launch_ns"] - 20_000).all()
    assert (reduced["end_ns"] > reduced["start_ns"]).all()
    steps = trace.steps.set_index(["rank", "step"])
    within = reduced.join(steps, on=["rank", "step"], rsuffix="_of_step", how="inner")
    assert (within["end_ns"] <= within["end_ns_of_step"] + 20_000).all()


def train_without_synchronising(rank: int, folder: str) -> None:
    torch.cuda.set_device(0)
    dist.init_process_group("nccl", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=1)
    model = DistributedDataParallel(make_model(), device_ids=[0], bucket_cap_mb=4, trace=f"{folder}/traces")
    inputs = torch.randn(64, 1024, device="cuda")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(WARM_UP_STEPS + STEPS):
        if step == WARM_UP_STEPS:
            torch.cuda.set_sync_debug_mode("error")
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        optimizer.step()
    torch.cuda.set_sync_debug_mode("default")
    dist.destroy_process_group()


def test_a_recorded_step_never_synchronises_the_device(tmp_path):
    torch.multiprocessing.spawn(train_without_synchronising, (str(tmp_path),), nprocs=1)
