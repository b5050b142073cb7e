"""Parameters that are averaged in place of gradients: the same as DDP if the optimizer is linear in gradients."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
import torch.distributed as dist
from torch import nn

from instrumented_ddp import DistributedDataParallel
from overlapscope.diagnosis.diagnosis import Diagnosis
from overlapscope.trace.recording import read_trace
from tests.cluster.ranks import run_ranks

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

Weights = list[npt.NDArray[np.float32]]


def train(strategy: str, optimizer: str, folder: str | None = None, **more: Any) -> tuple[Weights, Weights]:
    """Weights in the end, and what the optimizer keeps of each parameter."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(17, 33), nn.Tanh(), nn.Linear(33, 1))
    ddp = DistributedDataParallel(net, strategy=strategy, trace=folder, **more)
    updates = {
        "sgd": lambda: torch.optim.SGD(net.parameters(), lr=0.05),
        "momentum": lambda: torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9),
        "adam": lambda: torch.optim.Adam(net.parameters(), lr=0.01),
    }[optimizer]()
    data = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(6):
        ddp(torch.randn(8, 17, generator=data)).square().mean().backward()
        updates.step()
        updates.zero_grad()
    kept = [
        value.numpy().copy()
        for state in updates.state.values()
        for name, value in state.items()
        if name in ("momentum_buffer", "exp_avg")
    ]
    return [parameter.detach().numpy().copy() for parameter in net.parameters()], kept


def are_close(ours: Weights, theirs: Weights) -> bool:
    return all(np.allclose(a, b, rtol=1e-4, atol=1e-6) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize(("optimizer", "is_linear"), [("sgd", True), ("momentum", True), ("adam", False)])
@pytest.mark.parametrize("as_view", [False, True])
def test_it_is_the_same_as_ddp_only_if_the_optimizer_is_linear(optimizer: str, is_linear: bool, as_view: bool) -> None:
    first, second = run_ranks(train_with, 2, "parameter_averaging", optimizer, as_view)
    ((expected, _), _) = run_ranks(train_with, 2, "overlapped", optimizer, as_view)
    assert all(np.array_equal(a, b) for a, b in zip(first[0], second[0], strict=True))
    assert are_close(first[0], expected) == is_linear


def train_with(strategy: str, optimizer: str, as_view: bool) -> tuple[Weights, Weights]:
    return train(strategy, optimizer, gradient_as_bucket_view=as_view)


def test_what_momentum_keeps_is_each_ranks_own() -> None:
    first, second = run_ranks(train, 2, "parameter_averaging", "momentum")
    assert not are_close(first[1], second[1])


def test_no_gradient_is_reduced_and_replicas_are_the_same(tmp_path: Path) -> None:
    run_ranks(train, 2, "parameter_averaging", "adam", str(tmp_path))
    assert read_trace(tmp_path).collectives.query("bucket >= 0").empty
    diagnosis = Diagnosis.of(tmp_path)
    assert diagnosis is not None
    assert diagnosis.verdict.kind == "healthy"
