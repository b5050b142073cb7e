"""What is recorded of updates that wait for the next forward: what they hide, the halves of a sum, and bytes."""

from __future__ import annotations

import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from instrumented_ddp import DistributedDataParallel
from instrumented_ddp.strategies import all_reduces
from instrumented_ddp.strategies.strategy import Strategy
from instrumented_ddp.strategies.wire import Wire
from overlapscope.advice.advice import advise
from overlapscope.analysis import Analysis
from overlapscope.breakdown.breakdown import BLOCKS, compute_breakdown
from overlapscope.diagnosis.diagnosis import Diagnosis
from overlapscope.errors import OverlapScopeError
from overlapscope.trace.recording import read_trace
from tests.cluster.collective_logs import logged
from tests.cluster.ranks import run_ranks

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

SMALL_BUCKETS_MB = 0.005


class Pause(nn.Module):
    """A part of a model that takes a while and has no parameters: something to hide communication under."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(...) -> (...)"""
        time.sleep(0.05)
        return x


def slow_ring(buffer: torch.Tensor, wire: Wire) -> None:
    time.sleep(0.02)
    all_reduces.ring_all_reduce(buffer, wire)


def train_recorded(strategy: str, folder: str, *, looks: bool) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(Pause(), nn.Linear(17, 65), nn.Linear(65, 33), nn.Linear(33, 3))
    given = Strategy(name="slow", all_reduce=slow_ring) if strategy == "slow" else strategy
    ddp = DistributedDataParallel(net, strategy=given, bucket_cap_mb=SMALL_BUCKETS_MB, trace=folder)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
    ddp.defer(optimizer)
    for _ in range(6):
        ddp(torch.ones(4, 17)).square().sum().backward()
        optimizer.step()
        if looks and dist.get_rank() == 0:
            ddp.state_dict()


def test_what_hides_under_the_next_forward_is_not_exposed(tmp_path: Path) -> None:
    run_ranks(partial(train_recorded, looks=False), 2, "slow", str(tmp_path))
    trace = read_trace(tmp_path)
    assert trace.problems == ()
    breakdown = compute_breakdown(trace)
    settled = breakdown.step >= 3  # buckets are rebuilt, and the first forward was watched
    assert (breakdown.hidden_ns[settled, BLOCKS.index("forward")] > 0).all()
    waited = breakdown.waits.collective
    assert set(trace.collectives["step"].to_numpy()[waited] + 1 - breakdown.step[breakdown.wait_row]) <= {0, 1}
    phases = trace.phases.query("rank == 0 and step == 4")["phase"].tolist()
    # From the first module on a bucket is waited for, its parameters are updated, and the forward goes on.
    assert phases.count("finalize") - 1 == phases.count("forward") - 1 > 1
    assert phases[:4] == ["loop", "forward", "finalize", "optimizer"]


def test_a_decoupled_sum_is_recorded_as_its_two_halves(tmp_path: Path) -> None:
    run_ranks(partial(train_recorded, looks=False), 2, "decoupled", str(tmp_path))
    trace = read_trace(tmp_path)
    sums = trace.collectives.query("bucket >= 0 and rank == 0")
    assert sums["end_ns"].notna().all()
    for _, of_step in sums.groupby("step"):
        first = of_step[of_step["op"] == "reduce_scatter"].sort_values("launch_ns")
        second = of_step[of_step["op"] == "all_gather"].sort_values("launch_ns")
        assert len(first) + len(second) == len(of_step)
        assert first["bucket"].tolist() == second["bucket"].tolist()[::-1] == list(range(len(first)))
        assert second["launch_ns"].min() >= first["launch_ns"].max()


@pytest.mark.parametrize("strategy", ["overlapped", "decoupled", "priority"])
def test_ranks_that_look_at_their_parameters_at_different_times_have_not_drifted_apart(
    tmp_path: Path, strategy: str
) -> None:
    run_ranks(partial(train_recorded, looks=True), 2, strategy, str(tmp_path))
    diagnosis = Diagnosis.of(tmp_path)
    assert diagnosis is not None
    assert diagnosis.verdict.kind == "healthy"
    with pytest.raises(OverlapScopeError, match=f"strategy {strategy} with deferred"):
        advise(Analysis(read_trace(tmp_path)))


def train_in_slices(folder: str) -> None:
    strategy = replace(all_reduces.PRIORITY, slice_bytes=400)
    ddp = DistributedDataParallel(nn.Linear(40, 11), strategy=strategy, trace=folder)
    ddp(torch.ones(2, 40)).sum().backward()


@pytest.mark.parametrize("ranks", [2, 3])
def test_priority_sends_slices_around_a_ring_and_rank_0_says_which(tmp_path: Path, ranks: int) -> None:
    run_ranks(train_in_slices, ranks, str(tmp_path))
    slices = [100] * 4 + [51]  # elements, of 451
    sent = [[what for what, _ in logged(tmp_path, rank) if what.op == "send"] for rank in range(ranks)]
    assert {what.role for of_rank in sent for what in of_rank} == {"segment"}
    said = [what.peer for what in sent[0] if what.dtype == "int64"]
    assert sorted(said) == sorted([*range(1, ranks)] * len(slices))
    around = [what.elements for of_rank in sent for what in of_rank if what.dtype == "float32"]
    assert sum(around) == 2 * (ranks - 1) * sum(slices)


@pytest.mark.parametrize("ranks", [2, 3])
def test_decoupled_sends_what_a_ring_sends(tmp_path: Path, ranks: int) -> None:
    run_ranks(partial(train_recorded, looks=False), ranks, "decoupled", str(tmp_path))
    halves = read_trace(tmp_path).collectives.query("rank == 0 and op == 'all_gather'")
    sent = [what for rank in range(ranks) for what, _ in logged(tmp_path, rank) if what.op == "send"]
    assert sum(what.elements for what in sent) == 2 * (ranks - 1) * halves["elements"].sum()
