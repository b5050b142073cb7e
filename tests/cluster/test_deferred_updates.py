"""Updates that wait for the next forward: the results are those of training without, whoever looks at them when."""

from __future__ import annotations

import copy
import io
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
import torch.distributed as dist
from torch import nn

from instrumented_ddp import DistributedDataParallel
from overlapscope.errors import OverlapScopeError
from tests.cluster.processes import Program, run_together
from tests.cluster.ranks import Ranks, run_ranks

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
def test_results_are_those_of_the_same_training_without_deferred_updates_to_the_bit(
    ranks_of_module: Callable[[int], Ranks], loop: str
) -> None:
    call = ranks_of_module(2).call
    expected = call(trained, "overlapped", loop, False)
    for strategy in ("decoupled", "priority"):
        for ours, theirs in zip(call(trained, strategy, loop, True), expected, strict=True):
            assert same(ours, theirs), strategy


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("optimizer", Optimizers)
def test_any_strategy_and_optimizer_can_be_deferred(
    ranks_of_module: Callable[[int], Ranks], strategy: str, optimizer: str
) -> None:
    call = ranks_of_module(2).call
    expected = call(trained, strategy, "_plain", False, optimizer)
    for ours, theirs in zip(call(trained, strategy, "_plain", True, optimizer), expected, strict=True):
        assert same(ours, theirs)


@pytest.mark.parametrize("strategy", ["decoupled", "priority"])
def test_so_it_is_on_three_ranks(ranks_of_module: Callable[[int], Ranks], strategy: str) -> None:
    call = ranks_of_module(3).call
    expected, *_ = call(trained, "ring", "_plain", False)
    first, *others = call(trained, strategy, "_plain", True)
    assert all(same(first, other) for other in others)
    for ours, theirs in zip(first, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)


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


def test_gradients_that_are_changed_before_they_are_averaged_are_an_error(
    ranks_of_module: Callable[[int], Ranks],
) -> None:
    call = ranks_of_module(2).call
    for said in call(change_a_gradient):
        assert "gradient of scale was changed" in said


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


def test_what_can_not_be_deferred_is_refused_in_one_line(golden: Callable[[str, str], None]) -> None:
    (said,) = run_ranks(ask_to_defer, 1)
    golden("refused/defer", "\n".join(said))


ENDS_AT_ONCE = """
import os, sys, time, torch, torch.distributed as dist
from instrumented_ddp import DistributedDataParallel

strategy, rendezvous = sys.argv[1:]
rank = int(os.environ["RANK"])
dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=2)
model = DistributedDataParallel(torch.nn.Linear(512, 512), strategy=strategy)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model.defer(optimizer)
for step in range(3):
    time.sleep(3 * (step == 2 and rank == 1))
    model(torch.ones(4, 512)).sum().backward()
    optimizer.step()
"""


@pytest.mark.nightly
@pytest.mark.parametrize("strategy", ["priority", "decoupled"])
def test_a_training_that_ends_with_its_last_step_waits_for_what_is_still_summed(strategy: str, tmp_path: Path) -> None:
    """Rank 1 is 3 s late there, and needs rank 0 for its sums."""
    arguments = ["-c", ENDS_AT_ONCE, strategy, str(tmp_path / "rendezvous")]
    ranks = [Program(arguments, {**os.environ, "RANK": str(rank)}) for rank in range(2)]
    run_together(ranks, 60, "spawn")
