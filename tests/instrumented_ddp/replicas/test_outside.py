"""Loops that average gradients by themselves: what they leave out, and what they mean to."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from instrumented_ddp.collectives.user_reductions import UserReductions
from instrumented_ddp.replicas.outside import ParametersOutside

STEPS = 24
EVERY = 6


class Recorded:
    """A loop of one rank, and what is recorded of its updates."""

    def __init__(self, *, has_wrappers: bool = False) -> None:
        self.step = 0
        self.found: list[tuple[str, int, tuple[int, ...]]] = []
        self.averaged: list[int] = []
        self.compared: list[int] = []
        self.reductions = UserReductions()
        self.module = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
        self.optimizer = torch.optim.SGD(self.module.parameters(), lr=0.1)
        models = SimpleNamespace(
            add_outside=lambda _: 1_000_000,
            record_unreduced_update=lambda _, found, step: self.found.append(
                (found.cause, step, tuple(found.parameters))
            ),
            on_averaging=lambda _: self.averaged.append(self.step),
            write_unreduced=lambda: None,
        )
        collectives = SimpleNamespace(
            user_reductions=self.reductions,
            names=SimpleNamespace(names_of=lambda *_: ()),
            call_sites=SimpleNamespace(find_caller_frame=lambda: None, get_caller_number=lambda: 1),
        )
        replicas = SimpleNamespace(add_outside=lambda *_: self.compared.append(self.step))
        self.outside = ParametersOutside(
            collectives,  # type: ignore[arg-type]
            models,  # type: ignore[arg-type]
            replicas,  # type: ignore[arg-type]
            lambda: self.step,
            _fail,
        )
        self.outside.has_wrappers = has_wrappers

    def train(
        self, reduce: Callable[[int], Any], after: Callable[[int], Any] = lambda _: None, *, is_over: bool = True
    ) -> None:
        for self.step in range(STEPS):
            self.optimizer.zero_grad()
            self.module(torch.randn(3, 4)).square().sum().backward()
            reduce(self.step)
            self.optimizer.step()
            after(self.step)
        if is_over:
            self.outside.close()

    def reduce_gradients(self, some: slice = slice(None)) -> None:
        for parameter in [*self.module.parameters()][some]:
            assert parameter.grad is not None
            self.reductions.on_reduction([parameter.grad], 1, (0, 1))

    def average_parameters(self) -> None:
        for parameter in self.module.parameters():
            self.reductions.on_reduction([parameter.data], 2, (0, 1))


def _fail(error: Exception) -> None:
    raise error


@pytest.fixture(autouse=True)
def initialized(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)


@pytest.mark.parametrize("left_out", [1, 7, STEPS - 1])
def test_an_update_without_the_usual_reduction_is_found(left_out: int) -> None:
    loop = Recorded()
    loop.train(lambda step: step == left_out or loop.reduce_gradients())
    assert loop.found == [("left out", left_out, (0, 1, 2, 3))]
    assert not loop.averaged


def test_parameters_that_are_never_reduced_with_the_others_are_found() -> None:
    loop = Recorded()
    loop.train(lambda _: loop.reduce_gradients(slice(1, None)))
    assert loop.found == [("in part", step, (0,)) for step in range(STEPS)]


def test_a_loop_that_reduces_all_is_compared_from_its_first_update_on() -> None:
    loop = Recorded()
    loop.train(lambda _: loop.reduce_gradients())
    assert (loop.found, loop.compared) == ([], [0])


def test_what_a_loop_reduces_is_known_when_its_optimizers_are_gone() -> None:
    """As where each epoch makes one, or the function that trains has returned."""
    loop = Recorded()
    for last in (False, True):
        loop.train(lambda step, last=last: (last and step == STEPS - 1) or loop.reduce_gradients(), is_over=last)
        loop.optimizer = torch.optim.SGD(loop.module.parameters(), lr=0.1)
    assert [(one.all, one.none) for one in loop.outside.list_user_reduced()] == [(STEPS, 0), (STEPS - 1, 1)]
    assert loop.found == [("left out", STEPS - 1, (0, 1, 2, 3))]


def test_ranks_that_train_alone_are_left_alone() -> None:
    loop = Recorded()
    loop.train(lambda _: loop.reductions.on_reduction([torch.ones(1)], 3, (0, 1)))
    assert (loop.found, loop.compared) == ([], [])


@pytest.mark.parametrize("warm_up", [0, EVERY, 2 * EVERY])
def test_parameters_that_are_averaged_now_and_then_need_no_reduction(warm_up: int) -> None:
    loop = Recorded()
    loop.train(
        lambda step: step < warm_up and loop.reduce_gradients(),
        lambda step: step % EVERY == EVERY - 1 and step > warm_up and loop.average_parameters(),
    )
    assert not [one for one in loop.found if one[1] < STEPS - EVERY]


def test_parameters_beside_a_wrapper_that_nobody_reduces_are_found_at_once() -> None:
    loop = Recorded(has_wrappers=True)
    loop.train(lambda _: None)
    assert loop.found[0] == ("outside", 0, (0, 1, 2, 3))
    assert loop.compared == [0]


def test_parameters_without_a_gradient_need_no_reduction() -> None:
    loop = Recorded()

    def reduce(step: int) -> None:
        last = [*loop.module.parameters()][-1]
        if step % 3 == 0:
            last.grad = None
        loop.reduce_gradients(slice(None, -1) if last.grad is None else slice(None))

    loop.train(reduce)
    assert not loop.found
