"""What is recorded of a sharded optimizer: its bytes, its waits, and who is named when a rank hangs."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from instrumented_ddp import DistributedDataParallel, ShardedOptimizer
from overlapscope.advice.advice import advise
from overlapscope.analysis import Analysis
from overlapscope.diagnosis.from_recording import read_evidence
from overlapscope.diagnosis.judge import judge
from overlapscope.errors import OverlapScopeError
from overlapscope.trace.recording import read_trace
from tests.cluster.collective_logs import logged, reports_of
from tests.cluster.ranks import run_ranks

pytestmark = [pytest.mark.cluster, pytest.mark.slow]


class TwoPrecisions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.single, self.short = nn.Linear(17, 33), nn.Linear(33, 65, dtype=torch.bfloat16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.short(self.single(x).to(torch.bfloat16))


def train_recorded(folder: str) -> list[tuple[int, int]]:
    """Elements of each bucket, and bytes of one of its parameters."""
    torch.manual_seed(0)
    net = TwoPrecisions()
    ddp = DistributedDataParallel(net, strategy="sharded", bucket_cap_mb=0.0001, trace=folder)
    optimizer = ShardedOptimizer(ddp, torch.optim.SGD, lr=0.01)
    for _ in range(3):
        ddp(torch.ones(2, 17)).sum().backward()
        optimizer.step()
    ddp(torch.ones(2, 17))
    layout = ddp.shards.layout
    return [(layout.elements(number), layout.dtype(number).itemsize) for number in range(len(layout.buckets))]


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_as_many_bytes_are_sent_as_the_layout_says_padding_included(tmp_path: Path, world_size: int) -> None:
    (buckets, *_) = run_ranks(train_recorded, world_size, str(tmp_path))
    assert len(buckets) > 2
    trace = read_trace(tmp_path)
    assert trace.problems == ()
    of_step = trace.collectives.query("rank == 0 and step == 1 and bucket >= 0")
    seen = {op: rows.sort_values("bucket")["bytes"].tolist() for op, rows in of_step.groupby("op", observed=True)}
    assert seen == {
        "reduce_scatter": [4 * elements for elements, _ in buckets],
        "all_gather": [itemsize * elements for elements, itemsize in buckets],
    }
    expected = 3 * (world_size - 1) * sum(elements * (4 + itemsize) for elements, itemsize in buckets) // world_size
    for rank in range(world_size):
        entries = [what for what, _ in logged(tmp_path, rank) if what.op == "send"]
        assert {what.role for what in entries} == {"segment"}
        assert {what.peer for what in entries} == {(rank + 1) % world_size}
        assert sum(what.bytes for what in entries) == expected


def test_advice_on_buckets_says_that_it_does_not_apply(tmp_path: Path) -> None:
    run_ranks(train_recorded, 2, str(tmp_path))
    with pytest.raises(OverlapScopeError, match="by strategy sharded"):
        advise(Analysis(read_trace(tmp_path)))


class Layers:
    """A loop over a model with many buckets."""

    def __init__(self, folder: str, **settings: Any) -> None:
        net = nn.Sequential(*(nn.Linear(64, 64) for _ in range(6)))
        self.ddp = DistributedDataParallel(net, strategy="sharded", bucket_cap_mb=0.01, trace=folder, **settings)
        self.optimizer = ShardedOptimizer(self.ddp, torch.optim.AdamW, lr=0.01)

    def step(self) -> None:
        self.ddp(torch.randn(8, 64)).square().mean().backward()
        self.optimizer.step()


def train_healthily(folder: str) -> None:
    loop = Layers(folder)
    for _ in range(100):
        loop.step()


def test_a_healthy_recording_is_healthy_and_its_waits_are_exposed_communication(tmp_path: Path) -> None:
    run_ranks(train_healthily, 2, str(tmp_path))
    verdict = judge(read_evidence(tmp_path)[0])
    assert verdict.kind == "healthy"
    trace = read_trace(tmp_path)
    breakdown = Analysis(trace).breakdown
    waited_for = trace.collectives["op"].iloc[breakdown.waits.collective]
    assert set(waited_for) == {"reduce_scatter", "all_gather"}
    inside = trace.phases.query("phase in ('forward', 'finalize')").sort_values(["rank", "start_ns"])
    for _, own in inside.groupby("rank"):
        assert (own["start_ns"].to_numpy()[1:] >= own["end_ns"].to_numpy()[:-1]).all()


def hang_in_update(folder: str, saves: bool) -> None:
    """Until that is reported."""
    loop = Layers(folder)
    for number in range(40):
        if number == 20 and dist.get_rank() == 1:
            loop.optimizer.inner.register_step_pre_hook(lambda *_: sleep_until_reported(Path(folder)))
        loop.step()
        if saves:
            loop.ddp.state_dict()


def sleep_until_reported(folder: Path) -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and not reports_of(folder, 0):
        time.sleep(0.05)
    time.sleep(1)  # who goes on while his report is being written refutes it


@pytest.mark.parametrize(
    "saves",
    [
        pytest.param(False, id="in_their_forward", marks=pytest.mark.nightly),
        pytest.param(True, id="in_state_dict", marks=pytest.mark.nightly),
    ],
)
def test_a_rank_that_hangs_before_it_sends_its_shards_is_named_by_those_that_wait(tmp_path: Path, saves: bool) -> None:
    run_ranks(hang_in_update, 3, str(tmp_path), saves)
    verdict = reports_of(tmp_path, 0)[0]["verdict"]
    assert (verdict["kind"], verdict["step"]) == ("stuck", 20)
    assert verdict["sentence"].startswith("Rank 1 ")
    assert "in the optimizer" in verdict["sentence"]
