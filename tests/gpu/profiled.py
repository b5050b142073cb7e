"""Trainings on the device that are recorded by us and by torch.profiler (CUPTI) at once."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.profiler import ProfilerActivity, profile

from instrumented_ddp import DistributedDataParallel, attach
from instrumented_ddp.session import get_current_session
from tests.gpu.device import DEVICE

MB = 1024**2
SIZES_MB = (1, 4, 10, 25, 50, 100)
WARM_UP_STEPS, STEPS = 4, 4


class Gradients(nn.Module):
    """Parameters of given sizes whose gradients are ready nearly at once, the last one first."""

    def __init__(self, sizes_mb: tuple[int, ...] = SIZES_MB) -> None:
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.ones(size * MB // 4, device=DEVICE)) for size in sizes_mb)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for weight in self.weights:
            x = x + (weight * x[0]).sum() * 1e-9
        return x


def wrapped(model: nn.Module, wrapper: str, folder: str, bucket_cap_mb: float) -> nn.Module:
    os.environ["OVERLAPSCOPE_DETAIL"] = "parameters"
    if wrapper == "stock":
        attach(folder)
        return TorchDDP(model, device_ids=[0], bucket_cap_mb=bucket_cap_mb)
    return DistributedDataParallel(model, device_ids=[0], bucket_cap_mb=bucket_cap_mb, trace=folder)


def train_profiled(folder: str, wrapper: str) -> dict[str, Any]:
    """Returns the step before those that were profiled, and how far the profiler's clock is ahead of ours."""
    model = wrapped(Gradients(), wrapper, folder, 0.5)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def step() -> None:
        optimizer.zero_grad()
        model(torch.ones(4, device=DEVICE)).sum().backward()
        optimizer.step()

    for _ in range(WARM_UP_STEPS):
        step()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        before = get_current_session().recorder.steps.step
        for _ in range(STEPS):
            step()
        torch.cuda.synchronize()
    for _ in range(2):  # so that the last profiled step is over
        step()
    torch.cuda.synchronize()
    profiler.export_chrome_trace(str(Path(folder) / f"profile_{dist.get_rank()}.json"))
    said = {"before": before, "ahead_ns": time.time_ns() - time.monotonic_ns(), "wrapper": wrapper}
    (Path(folder) / f"said_{dist.get_rank()}.json").write_text(json.dumps(said))
    return said
