"""A sharded optimizer comes to what stock's DDP and the same optimizer come to."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils.parametrizations import weight_norm
from torch.utils.checkpoint import checkpoint

from instrumented_ddp import DistributedDataParallel, ShardedOptimizer
from overlapscope.errors import OverlapScopeError
from tests.cluster.ranks import Ranks, run_ranks

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

Weights = dict[str, npt.NDArray[Any]]


class Tied(nn.Module):
    """An embedding that the head shares, attention (which reads a weight of a module that it never calls), sizes from
    one element to many, and a parameter of double precision."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 24)
        self.attention = nn.MultiheadAttention(24, 2)
        self.wide = nn.Sequential(nn.Linear(24, 301), nn.Tanh(), nn.Linear(301, 24))
        self.norm = nn.BatchNorm1d(24)
        self.head = nn.Linear(24, 11, bias=False)
        self.head.weight = self.embedding.weight
        self.scale = nn.Parameter(torch.ones(()))
        self.precise = nn.Parameter(torch.ones(3, dtype=torch.float64))
        self.frozen = nn.Parameter(torch.ones(5), requires_grad=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        x = x + self.attention(x, x, x)[0]
        x = self.norm(x + self.wide(x))
        return self.head(x) * self.scale + self.precise.sum()


class Unusual(nn.Module):
    """A recurrent layer, a weight that is computed from others, complex numbers, and a part that is computed twice."""

    def __init__(self) -> None:
        super().__init__()
        self.recurrent = nn.LSTM(6, 10, 2)
        self.normed = weight_norm(nn.Linear(10, 4))
        self.turned = nn.Linear(4, 4, dtype=torch.complex64)
        self.twice = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.normed(self.recurrent(x)[0])
        return checkpoint(self.twice, self.turned(x.to(torch.complex64)).abs(), use_reentrant=False)


class Branches(nn.Module):
    """One of which is never used, and one by rank 0 alone."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.sometimes, self.never = nn.Linear(7, 5), nn.Linear(7, 5), nn.Linear(7, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.used(x) + (self.sometimes(x) if dist.get_rank() == 0 else 0)


OPTIMIZERS: dict[str, Callable[..., tuple[type[torch.optim.Optimizer], dict[str, Any]]]] = {
    # The gradient of a key's bias is 0 but for rounding: a larger eps keeps Adam from making a step of that.
    "adamw": lambda: (torch.optim.AdamW, {"lr": 0.01, "eps": 1e-3}),
    "sgd": lambda: (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.01, "nesterov": True}),
}


def wrap(module: nn.Module, name: str, *, is_sharded: bool, **settings: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    optimizer_class, arguments = OPTIMIZERS[name]()
    plain = [parameter for parameter in module.parameters() if parameter.requires_grad]
    groups = [{"params": plain[:2], "lr": 0.002}, {"params": plain[2:]}]
    if not is_sharded:
        return nn.parallel.DistributedDataParallel(module, **settings), optimizer_class(groups, **arguments)
    ddp = DistributedDataParallel(module, strategy="sharded", **{"bucket_cap_mb": 0.01} | settings)
    return ddp, ShardedOptimizer(ddp, optimizer_class, groups, **arguments)


def train(name: str, is_sharded: bool, accumulate: int = 1, clip: float | None = None) -> Weights:
    torch.manual_seed(0)
    ddp, optimizer = wrap(Tied(), name, is_sharded=is_sharded)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
    data = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(5):
        for turn in range(accumulate):
            ddp.require_backward_grad_sync = turn == accumulate - 1
            ddp(torch.randint(0, 11, (6, 4), generator=data).flatten().view(-1)).square().mean().backward()
        if clip is not None and is_sharded:
            optimizer.clip_grad_norm_(clip)
        elif clip is not None:
            nn.utils.clip_grad_norm_(ddp.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
    with torch.no_grad():
        ddp.eval()(torch.arange(4))
    return {key: value.numpy().copy() for key, value in ddp.module.state_dict().items()}


def assert_same(ours: list[Weights], stock: Weights, *, to_the_bit: bool) -> None:
    for rank in ours:
        for key, value in rank.items():
            if "running" in key:  # each rank's own statistics; rank 0's are compared
                continue
            np.testing.assert_array_equal(value, ours[0][key], err_msg=key)
    for key, value in ours[0].items():
        tolerance = {"rtol": 0, "atol": 0} if to_the_bit else {"rtol": 2e-4, "atol": 1e-5}
        np.testing.assert_allclose(value, stock[key], err_msg=key, **tolerance)


@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_ranks_come_to_what_stock_comes_to_and_two_of_them_to_the_same_bits(
    ranks_of_module: Callable[[int], Ranks], name: str, world_size: int
) -> None:
    call = ranks_of_module(world_size).call
    (stock, *_) = call(train, name, False)
    assert_same(call(train, name, True), stock, to_the_bit=world_size == 2)


def test_gradients_accumulated_under_no_sync_come_to_the_same_bits(ranks_of_module: Callable[[int], Ranks]) -> None:
    call = ranks_of_module(2).call
    (stock, _) = call(train, "adamw", False, 3)
    assert_same(call(train, "adamw", True, 3), stock, to_the_bit=True)


@pytest.mark.parametrize("world_size", [2, 3])
def test_gradients_are_clipped_by_the_norm_of_all_shards(
    ranks_of_module: Callable[[int], Ranks], world_size: int
) -> None:
    call = ranks_of_module(world_size).call
    (stock, *_) = call(train, "sgd", False, 1, 0.1)
    assert_same(call(train, "sgd", True, 1, 0.1), stock, to_the_bit=False)
    (unclipped, *_) = call(train, "sgd", False)
    assert not np.allclose(stock["wide.0.weight"], unclipped["wide.0.weight"], rtol=2e-4)


def train_unusual(is_sharded: bool, is_compiled: bool) -> Weights:
    torch.manual_seed(0)
    caps = {"bucket_cap_mb": 2} if is_compiled else {}  # what a compiler makes of them has to be larger
    ddp, optimizer = wrap(Unusual(), "adamw", is_sharded=is_sharded, **caps)
    model = torch.compile(ddp, backend="eager") if is_compiled else ddp
    data = torch.Generator().manual_seed(dist.get_rank())

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(torch.randn(5, 3, 6, generator=data)).square().mean()
        loss.backward()
        return loss

    for _ in range(5):
        assert optimizer.step(closure).item() > 0
    return {key: value.numpy().copy() for key, value in ddp.module.state_dict().items()}


@pytest.mark.parametrize("is_compiled", [False, True])
def test_unusual_modules_come_to_the_same_bits(is_compiled: bool) -> None:
    (stock, _) = run_ranks(train_unusual, 2, False, is_compiled)
    assert_same(run_ranks(train_unusual, 2, True, is_compiled), stock, to_the_bit=True)


def train_branches(is_sharded: bool) -> Weights:
    torch.manual_seed(0)
    ddp, optimizer = wrap(Branches(), "sgd", is_sharded=is_sharded, find_unused_parameters=True)
    for step in range(4):
        ddp(torch.full((3, 7), float(step))).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return {key: value.numpy().copy() for key, value in ddp.module.state_dict().items()}


def test_parameters_without_a_gradient_on_any_rank_are_left_alone_as_by_stock(
    ranks_of_module: Callable[[int], Ranks],
) -> None:
    call = ranks_of_module(2).call
    (stock, _) = call(train_branches, False)
    assert_same(call(train_branches, True), stock, to_the_bit=True)


def train_reduced_twice(is_sharded: bool) -> Weights:
    """Two backwards are reduced, and their averages are added, before there is an update."""
    torch.manual_seed(0)
    ddp, optimizer = wrap(nn.Linear(9, 9), "sgd", is_sharded=is_sharded)
    for step in range(6):
        ddp(torch.full((3, 9), 0.1 * step + dist.get_rank())).square().mean().backward()
        if step % 2:
            optimizer.step()
            optimizer.zero_grad()
    return {key: value.numpy().copy() for key, value in ddp.module.state_dict().items()}


def test_averages_of_several_backwards_add_up_until_they_are_used(ranks_of_module: Callable[[int], Ranks]) -> None:
    call = ranks_of_module(2).call
    (stock, _) = call(train_reduced_twice, False)
    assert_same(call(train_reduced_twice, True), stock, to_the_bit=False)


def train_half_precision(is_sharded: bool) -> tuple[Weights, set[torch.dtype]]:
    """Stock: single precision throughout, and the weights rounded after each update, as the forward sees them."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(16, 33), nn.Linear(33, 5))
    net = net.to(torch.bfloat16)
    ddp, optimizer = wrap(net, "sgd", is_sharded=is_sharded)
    start = {key: value.float().numpy().copy() for key, value in net.state_dict().items()}
    for _ in range(200):
        ddp(torch.ones(4, 16, dtype=torch.bfloat16)).sum().backward()
        for group in optimizer.param_groups:
            group["lr"] = 1e-7
        optimizer.step()
        optimizer.zero_grad()
    end = ddp.module.state_dict()
    moved = {key: value.float().numpy() - start[key] for key, value in end.items()}
    return moved, {value.dtype for value in end.values()}


def test_half_precision_has_main_weights_that_small_updates_are_not_lost_in(
    ranks_of_module: Callable[[int], Ranks],
) -> None:
    call = ranks_of_module(2).call
    for moved, dtypes in call(train_half_precision, True):
        assert dtypes == {torch.bfloat16}
        assert all(np.any(value != 0) for key, value in moved.items() if "weight" in key)


def bytes_of_state() -> int:
    net = nn.Sequential(*(nn.Linear(128, 128) for _ in range(8)))
    ddp, optimizer = wrap(net, "adamw", is_sharded=True)
    ddp(torch.ones(2, 128)).sum().backward()
    optimizer.step()
    state = optimizer.inner.state.values()
    return sum(value.nbytes for one in state for value in one.values() if value.dim())


@pytest.mark.parametrize("world_size", [2, 4])
def test_a_rank_keeps_its_share_of_the_optimizers_state(
    ranks_of_module: Callable[[int], Ranks], world_size: int
) -> None:
    call = ranks_of_module(world_size).call
    ours = call(bytes_of_state)
    everything = 2 * 4 * 8 * (128 * 128 + 128)
    assert sum(ours) == everything
    assert max(ours) <= 1.02 * everything / world_size  # buckets of few elements end with padding


def memories_of_parameters() -> list[tuple[torch.dtype, int]]:
    ddp = DistributedDataParallel(Tied(), strategy="sharded", bucket_cap_mb=0.01)
    assert len(ddp.shards.layout.buckets) > 3
    return [(p.dtype, p.untyped_storage().data_ptr()) for p in ddp.parameters() if p.requires_grad]


def test_parameters_of_a_dtype_lie_in_one_buffer() -> None:
    (memories,) = run_ranks(memories_of_parameters, 1)
    assert len(set(memories)) == len({dtype for dtype, _ in memories}) == 2


def train_and_leave_the_wrapper() -> tuple[Weights, Weights]:
    """Weights as soon as the wrapper is gone, although shards were on their way, and after another one's training."""
    torch.manual_seed(0)
    net = nn.Sequential(*(nn.Linear(200, 200) for _ in range(4)))
    found = []
    for _ in range(2):
        ddp, optimizer = wrap(net, "sgd", is_sharded=True)
        ddp(torch.ones(2, 200)).square().mean().backward()
        optimizer.step()
        del ddp, optimizer
        gc.collect()
        assert not net._forward_pre_hooks
        found.append({name: value.detach().numpy().copy() for name, value in net.named_parameters()})
    return found[0], found[1]


def test_a_module_whose_wrapper_is_gone_is_whole_and_can_be_wrapped_again() -> None:
    first, second = run_ranks(train_and_leave_the_wrapper, 2)
    for ours, theirs in zip(first, second, strict=True):
        assert all(np.array_equal(ours[name], theirs[name]) for name in ours)
    assert not np.array_equal(first[0]["0.weight"], first[1]["0.weight"])


# -- what can't be ---------------------------------------------------------------------------------------------------


def refusals() -> list[str]:
    said = []

    def refused(act: Callable[[], object]) -> None:
        try:
            act()
        except OverlapScopeError as error:
            said.append(str(error))

    def without_optimizer() -> None:
        ddp = DistributedDataParallel(nn.Linear(2, 2), strategy="sharded")
        ddp(torch.ones(1, 2)).sum().backward()
        ddp(torch.ones(1, 2))

    def moved() -> None:
        ddp = DistributedDataParallel(nn.Linear(2, 2), strategy="sharded")
        ddp.double()(torch.ones(1, 2))

    def joined() -> None:
        ddp = DistributedDataParallel(nn.Linear(2, 2), strategy="sharded")
        with ddp.join():
            ddp(torch.ones(1, 2))

    tied = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    tied[1].weight.data = tied[0].weight.data
    sharded = DistributedDataParallel(nn.Linear(2, 2), strategy="sharded")
    refused(lambda: ShardedOptimizer(DistributedDataParallel(nn.Linear(2, 2)), torch.optim.SGD, lr=1))
    refused(lambda: ShardedOptimizer(sharded, torch.optim.LBFGS))
    refused(lambda: ShardedOptimizer(sharded, torch.optim.SGD, nn.Linear(2, 2).parameters(), lr=1))
    refused(lambda: ShardedOptimizer(sharded, torch.optim.SGD, lr=1).state_dict())
    refused(lambda: DistributedDataParallel(nn.Embedding(3, 3, sparse=True), strategy="sharded"))
    refused(lambda: DistributedDataParallel(tied, strategy="sharded"))
    refused(lambda: DistributedDataParallel(nn.Linear(2, 2), strategy="sharded", bucket_cap_mb="auto"))
    refused(without_optimizer)
    refused(moved)
    refused(joined)
    return said


def test_what_a_sharded_optimizer_cannot_do_is_refused_in_one_line(golden: Callable[[str, str], None]) -> None:
    (said,) = run_ranks(refusals, 1)
    golden("refused/sharded", "\n".join(said))
