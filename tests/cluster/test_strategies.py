"""Ways to sum gradients: all come to what stock's DDP does, whatever goes on beside them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

from instrumented_ddp import DistributedDataParallel
from instrumented_ddp.strategies.registry import STRATEGIES, resolve_strategy
from instrumented_ddp.strategies.strategy import Strategy
from overlapscope.errors import OverlapScopeError
from tests.cluster.ranks import Ranks, run_ranks
from tests.cluster.same_as_stock.values import differences_of_values
from tests.shown import blocks

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

Weights = list[npt.NDArray[np.float32]]

LOSSY = {"fp16", "bf16", "power_sgd", "one_bit"}
OF_ONE_SIZE = {"naive", "per_parameter"}
"""A bucket a parameter, whatever else is asked for."""
EXACT = sorted(STRATEGIES.keys() - LOSSY - {"sharded"})  # which needs an optimizer of its own, see test_sharded.py
SUBJECTS = (
    "backward_passes",
    "parameter_kinds",
    "several_models",
    "static_graph",
    "uneven_inputs",
    "unused_parameters",
)
"""Files of scenarios, in ``tests.cluster.same_as_stock``."""
BY_DAY = ("backward_passes", "several_models")
SMALL_BUCKETS_MB = 0.005


def make(strategy: str | Strategy | None, module: nn.Module, **more: Any) -> nn.parallel.DistributedDataParallel:
    """Stock's class for None."""
    caps = {} if strategy in OF_ONE_SIZE else {"bucket_cap_mb": SMALL_BUCKETS_MB}
    if strategy is None:
        return nn.parallel.DistributedDataParallel(module, **caps)
    return DistributedDataParallel(module, strategy=strategy, **caps, **more)


def train(strategy: str | Strategy | None, steps: int = 6) -> Weights:
    """Layers of odd sizes, one that is shared, and one of a single element."""
    torch.manual_seed(0)
    shared = nn.Linear(33, 33)
    net = nn.Sequential(nn.Linear(17, 33), shared, nn.Tanh(), shared, nn.Tanh(), nn.Linear(33, 1))
    ddp = make(strategy, net)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05, momentum=0.9)
    data = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(steps):
        ddp(torch.randn(8, 17, generator=data)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [parameter.detach().numpy().copy() for parameter in net.parameters()]


@pytest.mark.parametrize("world_size", [2, 3, pytest.param(4, marks=pytest.mark.nightly)])
def test_all_ranks_come_to_what_stocks_ddp_comes_to_and_to_the_same_bits(
    ranks_of_module: Callable[[int], Ranks], world_size: int
) -> None:
    call = ranks_of_module(world_size).call
    (stock, *_) = call(train, None)
    for strategy in EXACT:
        first, *others = call(train, strategy)
        for other in others:
            assert all(np.array_equal(a, b) for a, b in zip(first, other, strict=True)), strategy
        for ours, theirs in zip(first, stock, strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6, err_msg=strategy)


def train_with_the_documented_strategy() -> Weights:
    (block,) = (block for block in blocks() if "def all_reduce(buffer, wire)" in block.text)
    defined: dict[str, Any] = {}
    exec(block.text.partition("\nmodel = ")[0], defined)
    return train(Strategy(name="star", all_reduce=defined["all_reduce"]))


@pytest.mark.nightly
def test_the_strategy_that_the_documents_show_comes_to_what_stocks_ddp_comes_to(
    ranks_of_module: Callable[[int], Ranks],
) -> None:
    call = ranks_of_module(3).call
    ours, theirs = call(train_with_the_documented_strategy)[2], call(train, None)[2]
    for one, other in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("strategy", "subject"),
    [
        *(pytest.param("ring", name, marks=[] if name in BY_DAY else [pytest.mark.nightly]) for name in SUBJECTS),
        *(("bucketed", subject) for subject in ("static_graph", "uneven_inputs", "unused_parameters")),
        *((strategy, "several_models") for strategy in ("double_tree", "round_robin")),
    ],
)
def test_on_two_ranks_whatever_stocks_ddp_can_do_comes_to_the_same_bits(
    ranks_of_module: Callable[[int], Ranks], strategy: str, subject: str
) -> None:
    call = ranks_of_module(2).call
    make_ddp = partial(DistributedDataParallel, strategy=strategy)
    assert call(differences_of_values, subject, make_ddp) == [[], []]


# -- fewer bytes -----------------------------------------------------------------------------------------------------


def learn(strategy: str) -> tuple[list[float], list[bytes]]:
    """Losses of a task that can be learned, and the weights in the end."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4))
    ddp = make(strategy, net)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.3)
    data = torch.Generator().manual_seed(dist.get_rank())
    losses = []
    for _ in range(150):
        x = torch.randn(32, 16, generator=data)
        loss = functional.cross_entropy(ddp(x), x[:, :4].argmax(1))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, [parameter.detach().numpy().tobytes() for parameter in net.parameters()]


@pytest.mark.parametrize("strategy", sorted(LOSSY))
def test_with_fewer_bytes_replicas_stay_the_same_and_a_task_is_learned(
    ranks_of_module: Callable[[int], Ranks], strategy: str
) -> None:
    call = ranks_of_module(2).call
    ranks = call(learn, strategy)
    assert ranks[0][1] == ranks[1][1]
    losses = np.mean([losses for losses, _ in ranks], axis=0)
    assert losses[-20:].mean() < 0.6 * losses[:5].mean()


def train_beside_other_collectives(strategy: str) -> Weights:
    """DDP's own bitmaps and buffers, and the user's all-reduces, are launched while buckets are summed."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.Linear(32, 32), nn.Linear(32, 4))
    ddp = make(strategy, net, find_unused_parameters=True)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
    data = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(30):
        net[2].weight.register_hook(lambda _: dist.all_reduce(torch.ones(3)))
        ddp(torch.randn(8, 16, generator=data)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [parameter.detach().numpy().copy() for parameter in net.parameters()]


@pytest.mark.parametrize("strategy", ["ring", "fp16", "power_sgd", "one_bit"])
def test_other_collectives_are_not_mistaken_for_those_of_a_strategy(
    ranks_of_module: Callable[[int], Ranks], strategy: str
) -> None:
    call = ranks_of_module(2).call
    first, second = call(train_beside_other_collectives, strategy)
    assert all(np.array_equal(a, b) for a, b in zip(first, second, strict=True))


# -- what can't be ---------------------------------------------------------------------------------------------------


def ask_for(**arguments: Any) -> str:
    try:
        DistributedDataParallel(nn.Linear(2, 2), **arguments)
    except OverlapScopeError as error:
        return str(error)
    return ""


def test_what_nobody_knows_or_contradicts_itself_is_refused_in_one_line(golden: Callable[[str, str], None]) -> None:
    (said,) = run_ranks(ask_for_both, 1)
    golden("refused/strategy", "\n".join(said))


def ask_for_both() -> list[str]:
    return [ask_for(strategy="rings"), ask_for(strategy="naive", bucket_cap_mb=1)]


def send_over_gloo_from_a_device() -> list[str]:
    said = []
    for name in STRATEGIES:
        try:
            resolve_strategy(name).check(dist.group.WORLD, [torch.device("cuda", 0)])
        except OverlapScopeError as error:
            said.append(str(error).split(" sends ")[0])
    return said


def test_what_gloo_can_not_send_from_a_device_is_refused() -> None:
    """It would send the address: the process ends with "writev: Bad address"."""
    (said,) = run_ranks(send_over_gloo_from_a_device, 1)
    assert {"strategy='ring'", "strategy='parameter_server'", "strategy='decoupled'"} <= set(said)
    assert not {f"strategy={name!r}" for name in ("overlapped", "bucketed", "bf16", "power_sgd")} & set(said)
