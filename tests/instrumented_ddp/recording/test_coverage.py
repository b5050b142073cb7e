"""Gradients that nobody has reduced count when an optimizer uses them, and not before."""

from __future__ import annotations

import sys
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from instrumented_ddp.recording.coverage import ReductionCoverage, UnreducedUpdate
from overlapscope.diagnosis.evidence import UnreducedCause
from overlapscope.trace.schema import NO_CALL_SITE

LINE = 7


class Wrapped:
    """A module with a weight and a bias, its optimizer, and what DDP would report of it."""

    def __init__(self) -> None:
        self.module = torch.nn.Linear(2, 1)
        self.optimizer = torch.optim.SGD(self.module.parameters(), lr=0.1)
        self.collectives = SimpleNamespace(
            call_sites=SimpleNamespace(get_caller_number=lambda: LINE),
            elements_reduced_by_user=0,
            position=SimpleNamespace(backward_call_site=LINE, step=0),
        )
        self.coverage = ReductionCoverage([*self.module.parameters()], self.collectives)  # type: ignore[arg-type]
        self.coverage.find_unfinished = weakref.WeakMethod(self.find_unfinished)
        self.unfinished: tuple[UnreducedCause, list[int]] = "incomplete", []

    def find_unfinished(self) -> tuple[UnreducedCause, list[int]]:
        return self.unfinished

    def backward(self, how: str) -> None:
        """Run a backward, with the events of one that is reduced, under ``no_sync``, late, bypassed or unseen."""
        self.module(torch.ones(1, 2)).sum().backward()
        if how != "bypassed":
            self.coverage.on_backward(no_sync=how == "no_sync")
        if how in ("no_sync", "late", "bypassed"):
            for index in range(2):
                self.coverage.on_local_gradient(index, in_backward=how != "bypassed")
        if how == "reduced":
            self.coverage.on_gradients_reduced()

    def update(self, optimizer: torch.optim.Optimizer | None = None) -> UnreducedUpdate | None:
        return self.coverage.take_unreduced_update(optimizer or self.optimizer)


def other_optimizer() -> torch.optim.Optimizer:
    return torch.optim.SGD(torch.nn.Linear(2, 1).parameters(), lr=0.1)


def test_gradients_of_a_module_that_was_called_itself_are_not_reduced() -> None:
    wrapped = Wrapped()
    wrapped.backward("bypassed")
    found = wrapped.update()
    assert found is not None
    assert (found.cause, list(found.parameters), list(found.call_sites)) == ("bypassed", [0, 1], [LINE])


@pytest.mark.parametrize("way", ["in this step", "in the step before", "not at all"])
def test_what_another_wrapper_of_the_same_module_has_reduced_is_reduced(way: str) -> None:
    """As if the module had been wrapped again: the first wrapper's hooks still see the gradients."""
    first, again = Wrapped(), Wrapped()
    parameters = [*first.module.parameters()]
    again.coverage = ReductionCoverage(parameters, again.collectives)  # type: ignore[arg-type]
    if way != "not at all":
        again.coverage.on_backward(no_sync=False)
        again.coverage.on_gradients_reduced()
    again.collectives.position.step += way == "in the step before"
    first.backward("bypassed")
    others = [one for one in (first.coverage, again.coverage) if one.has_reduced]
    found = first.coverage.take_unreduced_update(first.optimizer, others)
    assert (found is None) == (way == "in this step")
    assert first.coverage.has_gap == (way != "in this step")


def test_the_line_of_the_backward_is_known_better_than_that_of_the_forward() -> None:
    lines = iter((LINE, NO_CALL_SITE))
    for expected in (LINE, LINE - 1):  # on a thread of autograd that runs no user code, the forward's is the nearest
        wrapped = Wrapped()
        wrapped.collectives.call_sites = SimpleNamespace(
            get_caller_number=lambda: next(lines), is_user_frame=lambda _: True, number_of=lambda _: LINE - 1
        )
        wrapped.coverage.on_module_access(sys._getframe())
        wrapped.module(torch.ones(1, 2)).sum().backward()
        wrapped.coverage.on_local_gradient(0, in_backward=False)
        found = wrapped.update()
        assert found is not None
        assert found.call_sites == [expected]


def test_another_models_optimizer_leaves_them_to_be_set_to_zero() -> None:
    """A discriminator gets gradients from the loss of its generator."""
    wrapped = Wrapped()
    wrapped.backward("bypassed")
    assert wrapped.update(other_optimizer()) is None
    wrapped.optimizer.zero_grad()
    assert wrapped.update() is None


def test_another_models_optimizer_does_not_hide_them_from_their_own() -> None:
    wrapped = Wrapped()
    wrapped.backward("bypassed")
    wrapped.update(other_optimizer())
    assert wrapped.update() is not None


@pytest.mark.parametrize(
    ("backwards", "cause", "unreduced", "reduced"),
    [
        (["reduced", "no_sync", "no_sync"], "no_sync", 2, 1),
        (["no_sync", "no_sync"], "no_sync", 2, 0),
        (["no_sync", "reduced", "no_sync"], "no_sync", 1, 2),
        (["reduced", "late"], "late", 1, 1),
    ],
)
def test_backwards_after_the_reduction_are_counted(
    backwards: list[str], cause: str, unreduced: int, reduced: int
) -> None:
    wrapped = Wrapped()
    for how in backwards:
        wrapped.backward(how)
    found = wrapped.update()
    assert found is not None
    assert (found.cause, len(found.call_sites), found.reduced_backwards) == (cause, unreduced, reduced)
    wrapped.backward("reduced")
    assert wrapped.update() is None


@pytest.mark.parametrize("backwards", [["reduced"], ["no_sync", "no_sync", "reduced"], ["bypassed", "reduced"], []])
def test_a_reduction_covers_all_gradients_before_it(backwards: list[str]) -> None:
    wrapped = Wrapped()
    for how in backwards:
        wrapped.backward(how)
    assert wrapped.update() is None
    assert not wrapped.coverage.has_gap


@pytest.mark.parametrize("unfinished", [("hooks lost", [0, 1]), ("incomplete", [1])])
def test_a_reduction_that_is_expected_and_does_not_come_is_looked_into(unfinished: Any) -> None:
    wrapped = Wrapped()
    wrapped.unfinished = unfinished
    wrapped.backward("unseen")
    found = wrapped.update()
    assert found is not None
    assert (found.cause, list(found.parameters)) == unfinished


def test_hooks_that_were_lost_are_the_cause_and_not_the_backwards_under_no_sync_before() -> None:
    wrapped = Wrapped()
    wrapped.unfinished = "hooks lost", [0, 1]
    wrapped.backward("no_sync")
    wrapped.backward("unseen")
    found = wrapped.update()
    assert found is not None
    assert (found.cause, list(found.parameters), len(found.call_sites)) == ("hooks lost", [0, 1], 1)


def test_a_backward_that_reaches_no_parameter_is_no_gap() -> None:
    """``autograd.grad`` of a penalty passes through the output and accumulates nothing."""
    wrapped = Wrapped()
    wrapped.backward("reduced")
    wrapped.coverage.on_backward(no_sync=False)
    assert wrapped.update() is None


@pytest.mark.parametrize(("elements", "is_reduced"), [(3, True), (1, False)])
def test_the_users_own_reduction_counts_if_it_is_of_their_size(elements: int, is_reduced: bool) -> None:
    wrapped = Wrapped()
    wrapped.backward("no_sync")
    wrapped.collectives.elements_reduced_by_user += elements
    assert (wrapped.update() is None) == is_reduced
    assert wrapped.coverage.has_gap


def test_an_optimizer_of_other_parameters_of_the_model_is_not_concerned() -> None:
    wrapped = Wrapped()
    wrapped.module.weight.requires_grad_(False)
    wrapped.module(torch.ones(1, 2)).sum().backward()
    wrapped.coverage.on_backward(no_sync=True)
    wrapped.coverage.on_local_gradient(1, in_backward=True)
    assert wrapped.update(torch.optim.SGD([wrapped.module.weight], lr=0.1)) is None
    found = wrapped.update(torch.optim.SGD([wrapped.module.bias], lr=0.1))
    assert found is not None
    assert list(found.parameters) == [1]
