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
from instrumented_ddp.collective_log import dispatch
from instrumented_ddp.collective_log.call_sites import CallSites
from instrumented_ddp.collective_log.collectives import Collectives
from instrumented_ddp.collective_log.completion import CompletionWatch
from instrumented_ddp.collective_log.signatures import SignatureTable
from instrumented_ddp.collective_log.tensor_names import TensorNames
from instrumented_ddp.recording import backward_phase, bucket_sum, links, recorder
from instrumented_ddp.recording.bucket_collective import Collective
from instrumented_ddp.recording.bypass import Bypass
from instrumented_ddp.recording.clock import ClockSampling
from instrumented_ddp.recording.data_position import DataPosition
from instrumented_ddp.recording.models import Models
from instrumented_ddp.recording.optimizers import Optimizers
from instrumented_ddp.recording.recorder import Recorder
from instrumented_ddp.recording.records import BucketRecords
from instrumented_ddp.recording.segment_table import SegmentTable
from instrumented_ddp.recording.steps import Steps
from instrumented_ddp.session import session_of_this_process
from instrumented_ddp.stock.ddp import StockDDP
from instrumented_ddp.stock.model import StockModel
from instrumented_ddp.stock.sharded_model import ShardedModel
from instrumented_ddp.watchdog.own_state import OwnState
from overlapscope.diagnosis.from_logs import read_evidence
from overlapscope.diagnosis.judge import judge
from overlapscope.trace.group_log import GroupLog
from overlapscope.trace.writer import EventLog
from tests.cluster.ranks import run_ranks
from tests.cluster.said import said

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

CALLBACKS: dict[str, tuple[Any, str]] = {
    "the recorder is made": (recorder, "describe_run"),
    "a model is made known": (Models, "add"),
    "a plan takes effect": (recorder, "append_plan"),
    "the records of a plan": (recorder, "PlanRecords"),
    "the records of a later plan": (recorder, "PlanRecords"),
    "a board": (recorder, "ReadinessBoard"),
    "a forward": (Steps, "forward_is_called"),
    "a phase begins": (Steps, "enter"),
    "a phase ends": (Steps, "leave"),
    "the output of a forward": (backward_phase, "computed"),
    "gradients are reduced": (Steps, "gradients_are_reduced"),
    "whose optimizer it is": (Optimizers, "_updates_our_parameters"),
    "an update begins": (Steps, "update_begins"),
    "an update ends": (Steps, "update_ends"),
    "a record is written": (EventLog, "append"),
    "blocks are reserved": (EventLog, "reserve"),
    "a launch is recorded": (BucketRecords, "launch"),
    "a bucket ends": (Collective, "ended"),
    "whether the module was bypassed": (Bypass, "line_of_unreduced"),
    "buffers are broadcast": (recorder, "buffer_records"),
    "the module is taken": (Bypass, "module_is_taken"),
    "a collective is seen": (dispatch, "Call"),
    "a collective is announced": (Collectives, "_announce"),
    "an entry is written": (GroupLog, "announce"),
    "an entry is launched": (GroupLog, "launched"),
    "an entry has ended": (GroupLog, "completed"),
    "an end is watched": (CompletionWatch, "add"),
    "a signature": (SignatureTable, "of"),
    "names": (TensorNames, "names_of"),
    "a line": (CallSites, "number_of"),
    "the position in the data": (DataPosition, "forward_begins"),
    "a batch is asked for": (Steps, "fetch_begins"),
    "a batch is there": (Steps, "fetch_ends"),
    "the watchdog looks": (OwnState, "look"),
    "a sample of links": (links, "sample_connections"),
    "clocks": (ClockSampling, "_report"),
    "the recording is closed": (Recorder, "close"),
}
OF_STOCK = {
    "a stock model": (StockModel, "__init__"),
    "a stock forward": (StockModel, "look_for_rebuild"),
    "a stock backward is over": (StockModel, "_backward_is_over"),
    "a stock bucket": (StockModel, "_bucket_is_ready"),
    "a stock launch": (StockDDP, "_launch_of_reducer"),
}
OF_FSDP = {
    "a sharded model": (ShardedModel, "__init__"),
    "its forward begins": (ShardedModel, "forward_begins"),
    "its forward ends": (ShardedModel, "forward_ends"),
    "its launch": (ShardedModel, "launch_of"),
    "its wait": (ShardedModel, "wait_begins"),
    "its group goes on": (ShardedModel, "have_come"),
    "its backward is over": (ShardedModel, "_backward_is_over"),
    "its gradients are ready": (ShardedModel, "_bucket_is_ready"),
}
OF_RING = {
    "a sum is described": (bucket_sum, "Call"),
    "a sum is announced": (Collectives, "_announce"),
    "the number of a round": (SegmentTable, "number_of"),
    "the record of a round": (BucketRecords, "segment"),
    "a record is written": (EventLog, "append"),
    "an entry has ended": (GroupLog, "completed"),
}
BY_KIND = {"ours": CALLBACKS, "stock": CALLBACKS | OF_STOCK, "ring": OF_RING, "fsdp": OF_FSDP}
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
    for number, (name, (owner, attribute)) in enumerate({"": (Steps, "enter"), **BY_KIND[kind]}.items()):
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
            if (session := session_of_this_process()) is not None:
                session.close()
        setattr(owner, attribute, works)
        ended[name] = state, lines
    return ended


@pytest.mark.parametrize("kind", BY_KIND)
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
