"""Parameters that are on their way are waited for when a module needs them, and not sooner."""

from __future__ import annotations

import torch
from torch import nn

from instrumented_ddp.strategies.sharded.shards import PreForwardWait


class Watched(nn.Module):
    """Notes when it computes."""

    def __init__(self, name: str, happened: list[str | int]) -> None:
        super().__init__()
        self.name, self.happened = name, happened
        self.weight = nn.Parameter(torch.ones(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.happened.append(self.name)
        return x * self.weight


class Reader(nn.Module):
    """Uses the weight of a module that it never calls."""

    def __init__(self, happened: list[str | int]) -> None:
        super().__init__()
        self.first, self.read = Watched("first", happened), Watched("read", happened)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.first(x) + self.read.weight


def test_a_part_is_waited_for_just_before_the_module_that_holds_it() -> None:
    happened: list[str | int] = []
    a, b = Watched("a", happened), Watched("b", happened)
    net = nn.Sequential(a, b, a)
    PreForwardWait(net, {a.weight: 0, b.weight: 1}, happened.append)
    net(torch.ones(2))
    happened.clear()
    net(torch.ones(2))
    assert happened == [0, "a", 1, "b", 0, "a"]


def test_before_it_is_known_which_modules_are_called_everything_is_waited_for_first() -> None:
    happened: list[str | int] = []
    net = nn.Sequential(Watched("a", happened), Watched("b", happened))
    PreForwardWait(net, {net[0].weight: 0, net[1].weight: 1}, happened.append)
    net(torch.ones(2))
    assert happened[:2] == [0, 1]


def test_what_a_module_above_reads_is_waited_for_before_the_whole_forward() -> None:
    happened: list[str | int] = []
    net = Reader(happened)
    PreForwardWait(net, {net.first.weight: 0, net.read.weight: 1}, happened.append)
    for _ in range(3):
        happened.clear()
        net(torch.ones(2))
        assert happened.index(1) < happened.index("first")


def test_a_module_that_shares_a_weight_waits_for_it_too() -> None:
    happened: list[str | int] = []
    a, b = Watched("a", happened), Watched("b", happened)
    b.weight = a.weight
    PreForwardWait(nn.Sequential(a, b), {a.weight: 7}, happened.append)
    b(torch.ones(2))
    assert happened == [7, "b"]


def test_hooks_that_change_weights_come_after_the_wait() -> None:
    happened: list[str | int] = []
    net = Watched("net", happened)
    net.register_forward_pre_hook(lambda *_: happened.append("hook of the user's"))
    PreForwardWait(net, {net.weight: 0}, happened.append)
    net(torch.ones(2))
    assert happened.index(0) < happened.index("hook of the user's")


def test_nothing_is_waited_for_once_it_is_removed() -> None:
    happened: list[str | int] = []
    net = Watched("net", happened)
    hooks = PreForwardWait(net, {net.weight: 0}, happened.append)
    hooks.remove()
    hooks.remove()
    net(torch.ones(2))
    assert happened == ["net"]
