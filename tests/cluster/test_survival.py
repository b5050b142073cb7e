"""An error of ours never reaches the training: on one rank something fails in everything that is called back.

The training goes on with the same bits on all ranks as if nothing had failed, and a line says what was lost. What is
missing in the recording passes for no fault of the training's, neither while it runs nor afterwards.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, TensorDataset

from instrumented_ddp import DistributedDataParallel, attach
from instrumented_ddp.collectives import dispatch
from instrumented_ddp.collectives.call_sites import CallSiteTable
from instrumented_ddp.collectives.completion import CompletionWatch
from instrumented_ddp.collectives.log import CollectiveRecorder
from instrumented_ddp.collectives.signatures import SignatureTable, TensorNames
from instrumented_ddp.machine.sampler import MachineSampler
from instrumented_ddp.native import RecordStore
from instrumented_ddp.recording import events, recorder, tcp_stats
from instrumented_ddp.recording.batch_tracker import DataPositionTracker
from instrumented_ddp.recording.clock_sync import ClockSync
from instrumented_ddp.recording.coverage import ReductionCoverage
from instrumented_ddp.recording.finite_check import GradientCheck
from instrumented_ddp.recording.loop_facts import ModelLoop
from instrumented_ddp.recording.models import ModelRegistry
from instrumented_ddp.recording.modes import ModeFollower
from instrumented_ddp.recording.recorder import Recorder
from instrumented_ddp.recording.records import BucketCollective, BucketRecords, SegmentTable
from instrumented_ddp.recording.steps import OptimizerHooks, StepTracker
from instrumented_ddp.session import get_current_session
from instrumented_ddp.stock.ddp import StockDDPObserver, StockModelObserver
from instrumented_ddp.stock.fsdp import ShardedModelObserver
from instrumented_ddp.strategies import bucket_sum
from instrumented_ddp.watchdog.local_rank import LocalRankMonitor
from overlapscope.diagnosis.from_recording import read_evidence
from overlapscope.diagnosis.judge import judge
from overlapscope.trace.collective_log import CollectiveLogWriter
from overlapscope.trace.event_log import EventLogWriter
from tests.cluster.ranks import run_ranks
from tests.cluster.said import said

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

CALLBACKS: dict[str, tuple[Any, str]] = {
    "the recorder is made": (recorder, "describe_run"),
    "a model is made known": (ModelRegistry, "add"),
    "a plan takes effect": (recorder, "append_plan"),
    "the records of a plan": (recorder, "PlanRecords"),
    "the records of a later plan": (recorder, "PlanRecords"),
    "a board": (recorder, "GradientReadyFile"),
    "a forward": (StepTracker, "on_forward_call"),
    "what of a step is recorded": (ModeFollower, "on_step_start"),
    "a phase begins": (StepTracker, "enter"),
    "a phase ends": (StepTracker, "leave"),
    "the output of a forward": (events, "computed"),
    "gradients are reduced": (StepTracker, "on_gradients_reduced"),
    "whose optimizer it is": (OptimizerHooks, "_updates_our_parameters"),
    "an update begins": (StepTracker, "on_update_start"),
    "an update ends": (StepTracker, "on_update_end"),
    "a record is written": (RecordStore, "append"),
    "blocks are reserved": (EventLogWriter, "reserve"),
    "a launch is recorded": (BucketRecords, "launch"),
    "a bucket ends": (BucketCollective, "ended"),
    "whether the module was bypassed": (ReductionCoverage, "take_unreduced_update"),
    "buffers are broadcast": (recorder, "make_buffer_records"),
    "the module is taken": (ReductionCoverage, "on_module_access"),
    "a collective is seen": (dispatch, "Call"),
    "a collective is announced": (CollectiveRecorder, "_announce"),
    "an entry is written": (CollectiveLogWriter, "announce"),
    "an entry is launched": (CollectiveLogWriter, "launched"),
    "an entry has ended": (CollectiveLogWriter, "completed"),
    "an end is watched": (CompletionWatch, "add"),
    "a signature": (SignatureTable, "of"),
    "names": (TensorNames, "names_of"),
    "a line": (CallSiteTable, "number_of"),
    "a batch is given to the model": (GradientCheck, "on_forward_start"),
    "a bucket is looked at": (GradientCheck, "on_launch"),
    "looks are paid for": (GradientCheck, "on_reduced"),
    "what the loop does": (ModelLoop, "on_gradients_reduced"),
    "the position in the data": (DataPositionTracker, "on_forward_start"),
    "a batch is asked for": (StepTracker, "on_fetch_start"),
    "a batch is there": (StepTracker, "on_fetch_end"),
    "the watchdog looks": (LocalRankMonitor, "look"),
    "a sample of links": (tcp_stats, "sample_connections"),
    "a sample of the machine": (MachineSampler, "_write_sample"),
    "clocks": (ClockSync, "_report"),
    "the recording is closed": (Recorder, "close"),
}
OF_STOCK = {
    "a stock model": (StockModelObserver, "__init__"),
    "a stock forward": (StockModelObserver, "check_for_rebuild"),
    "a stock backward is over": (StockModelObserver, "_on_backward_over"),
    "a stock bucket": (StockModelObserver, "_on_bucket_ready"),
    "a stock launch": (StockDDPObserver, "_identify_reducer_launch"),
}
OF_FSDP = {
    "a sharded model": (ShardedModelObserver, "__init__"),
    "its forward begins": (ShardedModelObserver, "on_forward_start"),
    "its forward ends": (ShardedModelObserver, "forward_ends"),
    "its launch": (ShardedModelObserver, "make_launch"),
    "its wait": (ShardedModelObserver, "on_wait_start"),
    "its group goes on": (ShardedModelObserver, "on_wait_end"),
    "its backward is over": (ShardedModelObserver, "_on_backward_over"),
    "its gradients are ready": (ShardedModelObserver, "_on_bucket_ready"),
}
OF_RING = {
    "a sum is described": (bucket_sum, "Call"),
    "a sum is announced": (CollectiveRecorder, "_announce"),
    "the number of a round": (SegmentTable, "number_of"),
    "the record of a round": (BucketRecords, "segment"),
    "a record is written": (RecordStore, "append"),
    "an entry has ended": (CollectiveLogWriter, "completed"),
}
BY_KIND = {"ours": CALLBACKS, "stock": CALLBACKS | OF_STOCK, "ring": OF_RING, "fsdp": OF_FSDP}
BY_DAY = ("ours", "fsdp")
FAILS_LATER = {"the records of a later plan"}
"""From the second call on."""
SILENT = {"a line", "names", "the position in the data", "the module is taken", "whether the module was bypassed"}
"""What is lost by these is a name, or nothing in a healthy job; the recording goes on or says so in its own place."""

SMALL_CAP_MB = 0.0001
"""Several buckets from the second forward on."""

State = list[float]


class InjectedError(Exception):
    """Something that nobody has thought of."""


def fail(*_: Any, **__: Any) -> Any:
    raise InjectedError


def fail_later(works: Any) -> Any:
    calls = itertools.count()
    return lambda *args, **kwargs: works(*args, **kwargs) if next(calls) == 0 else fail()


def train(wrap: Callable[[nn.Module], nn.Module]) -> State:
    torch.manual_seed(0)
    model = wrap(nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 4)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    data = torch.randn(24, 16, generator=torch.Generator().manual_seed(dist.get_rank()))
    for (x,) in DataLoader(TensorDataset(data), batch_size=4):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        loss = torch.ones(1)
        dist.all_reduce(loss)
        optimizer.step()
        getattr(model, "module", None)  # a user may look behind the wrapper
    weights = [
        parameter.full_tensor() if isinstance(parameter, DTensor) else parameter for parameter in model.parameters()
    ]
    return [value for weight in weights for value in weight.flatten().tolist()]


def train_with_each_fault(traces: str, kind: str) -> dict[str, tuple[State, list[str]]]:
    """The weights, and what was said, with each of the callbacks failing on rank 1; under "" with none."""
    ended = {}
    for number, (name, (owner, attribute)) in enumerate({"": (StepTracker, "enter"), **BY_KIND[kind]}.items()):
        folder = f"{traces}/{number}"
        works = owner.__dict__[attribute]
        if name and dist.get_rank() == 1:
            setattr(owner, attribute, fail_later(works) if name in FAILS_LATER else fail)
        with said() as lines:
            if kind == "stock":
                attach(folder)
                state = train(partial(nn.parallel.DistributedDataParallel, bucket_cap_mb=SMALL_CAP_MB))
            elif kind == "fsdp":
                attach(folder)
                state = train(fully_shard)
            else:
                wrap = partial(DistributedDataParallel, bucket_cap_mb=SMALL_CAP_MB, trace=folder)
                state = train(partial(wrap, strategy="ring") if kind == "ring" else wrap)
            if (session := get_current_session()) is not None:
                session.close()
        setattr(owner, attribute, works)
        ended[name] = state, lines
    return ended


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[] if kind in BY_DAY else [pytest.mark.nightly]) for kind in BY_KIND]
)
def test_whatever_fails_on_one_rank_the_training_comes_to_the_same_and_says_what_is_lost(tmp_path, kind):
    ranks = run_ranks(train_with_each_fault, 2, str(tmp_path), kind)
    unharmed, nothing_said = ranks[0][""]
    assert nothing_said == []
    for number, name in enumerate(BY_KIND[kind], start=1):
        for rank in range(2):
            assert ranks[rank][name][0] == unharmed, name
        said = ranks[1][name][1]
        assert ranks[0][name][1] == [], (name, said)
        assert len(said) <= 1, (name, said)
        verdict = judge(read_evidence(tmp_path / str(number))[0])
        assert verdict.kind == ("cannot tell" if "unrecorded" in "".join(said) else "healthy"), (name, verdict)
        assert said or name in SILENT, name
