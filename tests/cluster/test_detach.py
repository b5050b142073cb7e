"""``detach()``: a rank whose recording has ended is done, whatever becomes of its process."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import torch
from torch import nn

import instrumented_ddp
from overlapscope.diagnosis.attempts import read_attempt
from overlapscope.trace.recording import read_trace
from tests.cluster.ranks import run_ranks

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

STEPS = 4


def train(model: nn.Module, steps: int) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    losses = []
    for step in range(steps):
        loss = model(torch.ones(2, 8) * step).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def make(wrapper: type[nn.parallel.DistributedDataParallel]) -> nn.parallel.DistributedDataParallel:
    torch.manual_seed(0)
    return wrapper(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1)))


def train_and_detach_half_way(traces: str) -> tuple[list[float], list[float]]:
    expected = train(make(nn.parallel.DistributedDataParallel), 2 * STEPS)
    instrumented_ddp.attach(traces)
    model = make(instrumented_ddp.DistributedDataParallel)
    optimizer_steps = train(model, STEPS)
    instrumented_ddp.detach()
    instrumented_ddp.detach()  # nothing is recorded
    fresh = train(make(instrumented_ddp.DistributedDataParallel), 2 * STEPS)
    train(model, STEPS)
    assert optimizer_steps == expected[:STEPS]
    return expected, fresh


def test_the_training_goes_on_unrecorded(tmp_path: Path) -> None:
    for expected, fresh in run_ranks(train_and_detach_half_way, 2, str(tmp_path)):
        assert fresh == expected
    trace = read_trace(tmp_path)
    assert trace.problems == ()
    assert set(trace.steps["step"]) == set(range(STEPS))
    assert read_attempt(tmp_path).verdict.kind == "healthy"


def train_and_be_killed(traces: str, detaches: bool) -> None:
    instrumented_ddp.attach(traces)
    train(make(nn.parallel.DistributedDataParallel), STEPS)
    if detaches:
        instrumented_ddp.detach()
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("detaches", [True, False])
def test_a_rank_that_is_killed_afterwards_has_ended_well(tmp_path: Path, *, detaches: bool) -> None:
    with pytest.raises(RuntimeError, match="died"):
        run_ranks(train_and_be_killed, 2, str(tmp_path), detaches)
    attempt = read_attempt(tmp_path)
    assert (attempt.verdict.kind == "healthy") == detaches
    assert {one.liveness for one in attempt.evidence.ranks.values()} == {"ended" if detaches else "gone"}
