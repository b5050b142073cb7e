"""Updates that wait for the next forward: the results are those of training without, whoever looks at them when."""

from __future__ import annotations

import copy
import io
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
import torch.distributed as dist
from torch import nn

from instrumented_ddp import DistributedDataParallel
from instrumented_ddp.strategies import priority, ring
from instrumented_ddp.strategies.strategy import Strategy
from instrumented_ddp.strategies.wire import Wire
from overlapscope.account.blocks import BLOCKS, account_of
from overlapscope.analysis.advice import advise
from overlapscope.analysis.analysis import Analysis
from overlapscope.diagnosis.diagnosis import Diagnosis
from overlapscope.errors import OverlapScopeError
from overlapscope.trace.reader import read_trace
from tests.cluster.collective_logs import logged
from tests.cluster.ranks import run_ranks

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

Weights = list[npt.NDArray[np.float32]]
SMALL_BUCKETS_MB = 0.005
STRATEGIES = ("overlapped", "ring", "decoupled", "priority", "naive", "fp16")


class Net(nn.Module):
    """Shared layers, attention that reads the weights of a layer that it doesn't call, and a weight of the model's."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(32))
        self.first = nn.Linear(17, 32)
        self.shared = nn.Linear(32, 32)
        self.attention = nn.MultiheadAttention(32, 2, batch_first=True)
        self.norm = nn.LayerNorm(32)
        self.head = nn.Linear(32, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(B, T, 17) -> (B, T, 3)."""
        x = self.shared(torch.tanh(self.shared(self.first(x))))
        x, _ = self.attention(x, x, x)
        x = nn.functional.linear(x, self.shared.weight) + x  # again, by its weight
        return self.head(self.norm(x) * self.scale)


Optimizers: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9, weight_decay=0.01),
    "adam": lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
}


class Training:
    """Of one rank, deferred or not."""

    def __init__(self, strategy: str, *, defers: bool, optimizer: str = "sgd", **more: Any) -> None:
        torch.manual_seed(0)
        caps = {} if strategy == "naive" else {"bucket_cap_mb": SMALL_BUCKETS_MB}
        self.net = Net()
        self.ddp = DistributedDataParallel(self.net, strategy=strategy, **caps, **more)
        self.optimizer = Optimizers[optimizer](self.ddp.parameters())
        if defers:
            self.ddp.defer(self.optimizer)
        self.data = torch.Generator().manual_seed(dist.get_rank())

    def backward(self) -> float:
        loss = self.ddp(torch.randn(4, 5, 17, generator=self.data)).square().mean()
        loss.backward()
        return float(loss)

    def step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def weights(self) -> Weights:
        """Of the module, as they are now."""
        return [parameter.detach().numpy().copy() for parameter in self.net.parameters()]


def _plain(one: Training) -> None:
    one.backward()
    one.step()


def _scheduled(one: Training) -> None:
    for group in one.optimizer.param_groups:
        group["lr"] *= 0.9
    _plain(one)
    for group in one.optimizer.param_groups:
        group["lr"] *= 0.5


def _accumulated(one: Training) -> None:
    with one.ddp.no_sync():
        one.backward()
    one.backward()
    one.step()


def _reduced_twice(one: Training) -> None:
    one.backward()
    one.backward()
    one.step()


def _left_out(one: Training) -> None:
    one.backward()
    one.optimizer.zero_grad()
    _plain(one)


def _clipped(one: Training) -> None:
    one.backward()
    nn.utils.clip_grad_norm_(one.ddp.parameters(), 0.05)
    one.step()


def _clipped_by_module(one: Training) -> None:
    one.backward()
    one.ddp.synchronize()
    nn.utils.clip_grad_norm_(one.net.parameters(), 0.05)
    one.step()


def _evaluated(one: Training) -> None:
    _plain(one)
    one.ddp.eval()
    with torch.no_grad():
        one.ddp(torch.ones(1, 1, 17))
    one.ddp.train()


def _saved(one: Training) -> None:
    _plain(one)
    if dist.get_rank() == 0:
        torch.save({"model": one.ddp.state_dict(), "optimizer": one.optimizer.state_dict()}, io.BytesIO())


def _reloaded(one: Training) -> None:
    _plain(one)
    kept = copy.deepcopy((one.net.state_dict(), one.optimizer.state_dict()))
    _plain(one)
    one.net.load_state_dict(kept[0])
    one.optimizer.load_state_dict(kept[1])


def _zeroed_by_module(one: Training) -> None:
    one.net.zero_grad(set_to_none=False)
    one.backward()
    one.optimizer.step()


LOOPS: dict[str, Callable[[Training], None]] = {
    loop.__name__: loop
    for loop in (
        *(_plain, _scheduled, _accumulated, _reduced_twice, _left_out, _clipped, _clipped_by_module),
        *(_evaluated, _saved, _reloaded, _zeroed_by_module),
    )
}


def trained(strategy: str, loop: str, defers: bool, optimizer: str = "sgd") -> Weights:
    one = Training(strategy, defers=defers, optimizer=optimizer)
    for _ in range(5):
        LOOPS[loop](one)
    one.ddp.synchronize()
    return one.weights()


def same(ours: Weights, theirs: Weights) -> bool:
    return all(np.array_equal(a, b) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("loop", LOOPS)
def test_results_are_those_of_the_same_training_without_deferred_updates_to_the_bit(loop: str) -> None:
    expected = run_ranks(trained, 2, "overlapped", loop, False)
    for strategy in ("decoupled", "priority"):
        for ours, theirs in zip(run_ranks(trained, 2, strategy, loop, True), expected, strict=True):
            assert same(ours, theirs), strategy


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("optimizer", Optimizers)
def test_any_strategy_and_optimizer_can_be_deferred(strategy: str, optimizer: str) -> None:
    expected = run_ranks(trained, 2, strategy, "_plain", False, optimizer)
    for ours, theirs in zip(run_ranks(trained, 2, strategy, "_plain", True, optimizer), expected, strict=True):
        assert same(ours, theirs)


@pytest.mark.parametrize("strategy", ["decoupled", "priority"])
def test_so_it_is_on_three_ranks(strategy: str) -> None:
    expected, *_ = run_ranks(trained, 3, "ring", "_plain", False)
    first, *others = run_ranks(trained, 3, strategy, "_plain", True)
    assert all(same(first, other) for other in others)
    for ours, theirs in zip(first, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)


# -- what is recorded ------------------------------------------------------------------------------------------------


class Pause(nn.Module):
    """A part of a model that takes a while and has no parameters: something to hide communication under."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(...) -> (...)"""
        time.sleep(0.05)
        return x


def slow_ring(buffer: torch.Tensor, wire: Wire) -> None:
    time.sleep(0.02)
    ring.all_reduce(buffer, wire)


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
    account = account_of(trace)
    settled = account.step >= 3  # buckets are rebuilt, and the first forward was watched
    assert (account.hidden_ns[settled, BLOCKS.index("forward")] > 0).all()
    waited = account.waits.collective
    assert set(trace.collectives["step"].to_numpy()[waited] + 1 - account.step[account.wait_row]) <= {0, 1}
    phases = trace.phases.query("rank == 0 and step == 4")["phase"].tolist()
    # From the first module on a bucket is waited for, its parameters are updated, and the forward goes on.
    assert phases.count("finalise") - 1 == phases.count("forward") - 1 > 1
    assert phases[:4] == ["data_wait", "forward", "finalise", "optimizer"]


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
    with pytest.raises(OverlapScopeError, match=f"reduced by strategy {strategy} with deferred updates"):
        advise(Analysis(read_trace(tmp_path)))


# -- what can't be ---------------------------------------------------------------------------------------------------


def change_a_gradient() -> str:
    one = Training("decoupled", defers=True)
    one.backward()
    nn.utils.clip_grad_norm_(one.net.parameters(), 0.1)
    try:
        one.optimizer.step()
    except RuntimeError as error:
        return str(error)
    return ""


def test_gradients_that_are_changed_before_they_are_averaged_are_an_error() -> None:
    for said in run_ranks(change_a_gradient, 2):
        assert said.startswith("The gradient of scale was changed after the backward, but it is not averaged yet")


def ask_to_defer() -> list[str]:
    return [
        refusal(lambda net: torch.optim.SGD(net.first.parameters())),
        refusal(lambda net: torch.optim.SGD([*net.parameters(), torch.zeros(1, requires_grad=True)])),
        refusal(lambda net: torch.optim.LBFGS(net.parameters())),
        refusal(lambda net: torch.optim.SGD(net.parameters()), find_unused_parameters=True),
        refusal(lambda net: torch.optim.SGD(net.parameters()), gradient_as_bucket_view=True),
    ]


def refusal(make_optimizer: Callable[[Any], torch.optim.Optimizer], **arguments: Any) -> str:
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    net.first = net[0]  # type: ignore[assignment]
    try:
        DistributedDataParallel(net, **arguments).defer(make_optimizer(net))
    except OverlapScopeError as error:
        return str(error)
    return ""


def test_what_can_not_be_deferred_is_refused_in_one_line() -> None:
    (said,) = run_ranks(ask_to_defer, 1)
    assert said == [
        "defer(): the optimizer does not update 1.weight, 1.bias",
        "defer(): the optimizer updates parameters that are not reduced",
        "defer(): LBFGS needs all gradients at once",
        "defer(): find_unused_parameters=True and static_graph=True are not supported",
        "defer(): gradient_as_bucket_view=True is not supported",
    ]


# -- bytes -----------------------------------------------------------------------------------------------------------


def train_in_slices(folder: str) -> None:
    strategy = replace(priority.STRATEGY, slice_bytes=400)
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
