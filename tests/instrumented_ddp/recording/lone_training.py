"""A small model that one rank trains and records."""

from __future__ import annotations

import torch
from torch import nn

from instrumented_ddp import DistributedDataParallel
from overlapscope.trace.recording import Trace, read_trace


def make_model(traces) -> DistributedDataParallel:
    return DistributedDataParallel(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)), trace=traces)


def backward(model: nn.Module) -> None:
    model(torch.randn(8, 4)).sum().backward()


def recorded(model: DistributedDataParallel, traces) -> Trace:
    assert model.recorder is not None
    model._session.close()
    trace = read_trace(traces)
    assert trace.problems == ()
    return trace


def phases_by_step(trace: Trace) -> dict[int, list[str]]:
    return {int(step): list(part["phase"]) for step, part in trace.phases.sort_values("start_ns").groupby("step")}
