"""Buckets skip torch's dispatcher unless somebody looks there, and are entered in the collective log all the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

from instrumented_ddp import DistributedDataParallel
from instrumented_ddp.collectives import dispatch
from overlapscope.trace.collective_log import Signature

ALL_REDUCE = "c10d::allreduce_"


def make_model(traces) -> DistributedDataParallel:
    return DistributedDataParallel(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)), trace=traces)


def backward(model: nn.Module) -> None:
    model(torch.ones(8, 4)).sum().backward()


def buckets_entered(model: DistributedDataParallel) -> list[Signature]:
    assert model._session is not None
    collectives = model._session.collectives
    (log,) = collectives.logs
    entries = log.read(1, log.latest)
    signatures = [collectives.signatures[number - 1] for number in entries["signature"]]
    return [signature for signature in signatures if signature.role == "bucket"]


@pytest.fixture
def calls(monkeypatch) -> list[str]:
    """Operations of the calls that come by torch's dispatcher."""
    seen: list[str] = []
    observed = dispatch.Call

    def observe(**what: Any) -> Any:
        seen.append(what["op"])
        return observed(**what)

    monkeypatch.setattr(dispatch, "Call", observe)
    return seen


class Seen(TorchDispatchMode):
    """Operators that come by a mode of the user's."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.name())
        return func(*args, **(kwargs or {}))


has_hooks = hasattr(dist.ProcessGroup, "register_pre_hook")


@pytest.mark.skipif(has_hooks, reason="torch 2.14 has hooks, which must be called")
def test_a_bucket_is_entered_once_although_it_does_not_come_by_the_dispatcher(traces, calls):
    model = make_model(traces)
    for _ in range(2):  # the second forward begins with another plan
        backward(model)
    before, entered = len(calls), len(buckets_entered(model))
    backward(model)
    assert calls[before:] == []
    assert len(buckets_entered(model)) == entered + 1


@pytest.mark.skipif(not has_hooks, reason="new in torch 2.14")
def test_a_hook_of_the_process_group_is_called_for_every_bucket(traces):
    model = make_model(traces)
    backward(model)
    seen: list[int] = []
    group: Any = model.process_group
    group.register_pre_hook(1, lambda args: seen.append(sum(tensor.numel() for tensor in args.input_tensors)))
    backward(model)
    group.unregister_pre_hook(1)
    assert sum(parameter.numel() for parameter in model.parameters()) in seen


def test_a_profiler_sees_what_it_sees_without_a_recording(traces, calls):
    model = make_model(traces)
    backward(model)
    entered = len(buckets_entered(model))
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        backward(model)
    assert ALL_REDUCE in {event.key for event in profiler.key_averages()}
    assert len(buckets_entered(model)) == entered + 1
    assert "all_reduce" in calls


def test_a_dispatch_mode_sees_what_it_sees_without_a_recording(traces):
    model = make_model(traces)
    backward(model)
    entered = len(buckets_entered(model))
    loss = model(torch.ones(8, 4)).sum()
    with Seen() as seen:
        loss.backward()
    assert ALL_REDUCE in seen.names
    assert len(buckets_entered(model)) == entered + 1


def test_a_function_in_place_of_all_reduce_is_called(traces, monkeypatch):
    model = make_model(traces)
    backward(model)
    launched = []
    original = dist.ProcessGroup.allreduce
    monkeypatch.setattr(dist.ProcessGroup, "allreduce", lambda *args: launched.append(args[1]) or original(*args))
    backward(model)
    assert [len(buffers) for buffers in launched] == [1]


def test_the_same_bucket_has_the_same_signature_by_either_way(traces):
    model = make_model(traces)
    backward(model)
    backward(model)
    with profile(activities=[ProfilerActivity.CPU]):
        backward(model)
    assert buckets_entered(model)[-1] is buckets_entered(model)[-2]
