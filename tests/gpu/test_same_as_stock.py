"""On a real device gradients are those of stock DDP, whatever the backend, the model and the memory format."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from instrumented_ddp import DistributedDataParallel
from overlapscope.trace.recording import read_trace
from tests.gpu.device import DEVICE, SHARED_CLOCK_ERROR_NS, make_mlp, needs_a_device, results_of, run_on_device

pytestmark = needs_a_device

STEPS = 6


def make_convnet() -> nn.Module:
    torch.manual_seed(1)
    convnet = nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.Conv2d(32, 64, 3, stride=2), nn.Flatten(),
        nn.Linear(64 * 15 * 15, 10),
    )  # fmt: skip
    return convnet.to(DEVICE, memory_format=torch.channels_last)


class WithNothing(nn.Module):
    """A parameter without elements, and a branch that is taken on even ranks only."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.stem, self.branch, self.head = nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 4)
        self.nothing = nn.Parameter(torch.empty(0, 64))
        self.to(DEVICE)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        x = self.branch(x) if dist.get_rank() % 2 == 0 else x
        return self.head(torch.cat([x, self.nothing]))


def images(generator: torch.Generator) -> torch.Tensor:
    return torch.randn(8, 3, 32, 32, device=DEVICE, generator=generator).to(memory_format=torch.channels_last)


def rows(width: int) -> Callable[[torch.Generator], torch.Tensor]:
    return lambda generator: torch.randn(16, width, device=DEVICE, generator=generator)


@dataclass(frozen=True)
class Case:
    make: Callable[[], nn.Module]
    batch: Callable[[torch.Generator], torch.Tensor]
    options: dict[str, Any] = field(default_factory=dict)
    dtype: torch.dtype | None = None
    is_built_on_side_stream: bool = False


CASES = {
    "plain": Case(make_mlp, rows(1024)),
    "views": Case(make_mlp, rows(1024), {"gradient_as_bucket_view": True}),
    "bfloat16 parameters": Case(lambda: make_mlp().bfloat16(), lambda g: rows(1024)(g).bfloat16()),
    "autocast": Case(make_mlp, rows(1024), dtype=torch.bfloat16),
    "channels last": Case(make_convnet, images),
    "channels last views": Case(make_convnet, images, {"gradient_as_bucket_view": True}),
    "unused and empty parameters": Case(WithNothing, rows(64), {"find_unused_parameters": True}),
    "built under a side stream": Case(make_mlp, rows(1024), is_built_on_side_stream=True),
}


def built(kind: type[TorchDDP], case: Case, **more: Any) -> nn.Module:
    side = torch.cuda.Stream(DEVICE)
    with torch.cuda.stream(side) if case.is_built_on_side_stream else nullcontext():
        model = kind(case.make(), device_ids=[0], bucket_cap_mb=4, **case.options, **more)
    torch.cuda.current_stream().wait_stream(side)
    return model


def differences(folder: str) -> dict[str, list[str]]:
    """Where gradients of ours and of stock's part, by case."""
    return {name: differences_in(folder, case) for name, case in CASES.items()}


def differences_in(folder: str, case: Case) -> list[str]:
    rank = dist.get_rank()
    models = built(DistributedDataParallel, case, trace=folder), built(TorchDDP, case)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.01) for model in models]
    found = []
    for step in range(STEPS):
        for model, optimizer in zip(models, optimizers, strict=True):
            batch = case.batch(torch.Generator(DEVICE).manual_seed(10 * step + rank))
            optimizer.zero_grad(set_to_none=step % 2 == 0)
            with torch.autocast("cuda", case.dtype, enabled=case.dtype is not None):
                loss = model(batch).float().square().mean()
            loss.backward()
        for (parameter, own), other in zip(models[0].named_parameters(), models[1].parameters(), strict=True):
            if (own.grad is None) != (other.grad is None):
                found.append(f"step {step}: {parameter} has a gradient on one side")
            elif own.grad is not None and not torch.equal(own.grad, other.grad):
                apart = (own.grad.float() - other.grad.float()).abs().max().item()
                found.append(f"step {step}: {parameter} is {apart:.3g} apart")
        for optimizer in optimizers:
            optimizer.step()
    return found


@pytest.mark.parametrize(("backend", "world_size"), [("nccl", 1), ("nccl", 2), ("gloo", 2), ("gloo", 4)])
def test_gradients_are_those_of_stock(tmp_path, backend, world_size):
    found = results_of(run_on_device(differences, backend, world_size, str(tmp_path)))
    assert found == [{name: [] for name in CASES}] * world_size
    trace = read_trace(tmp_path)
    assert trace.errors == []
    reduced = trace.collectives.query("bucket >= 0")
    assert reduced["end_ns"].notna().all()
    # The host enqueues before the device begins; both are on the host's clock within the error of the first anchor.
    early_ns = (reduced["launch_ns"] - reduced["start_ns"]).groupby(reduced["step"]).max()
    assert early_ns.max() <= SHARED_CLOCK_ERROR_NS, early_ns.to_dict()
    assert (reduced["end_ns"] > reduced["start_ns"]).all()
    steps = trace.steps.set_index(["rank", "step"])
    within = reduced.join(steps.add_suffix("_of_step"), on=["rank", "step"], how="inner")
    assert len(within) > 0
    assert (within["end_ns"] <= within["end_ns_of_step"] + 1000).all()
