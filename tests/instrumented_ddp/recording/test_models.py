"""Gradients that nobody has reduced count when an optimizer uses them, and not before."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import torch

from instrumented_ddp.recording.models import UnreducedGradientDetector
from overlapscope.trace.schema import NO_CALL_SITE

LINE = 7


def bypassed() -> tuple[UnreducedGradientDetector, torch.nn.Linear]:
    """A module whose gradients came from a pass that did not go through its wrapper."""
    module = torch.nn.Linear(2, 1)
    call_sites = SimpleNamespace(get_caller_number=lambda: LINE)
    bypass = UnreducedGradientDetector(
        [*module.parameters()], SimpleNamespace(call_sites=call_sites, elements_reduced_by_user=0)
    )  # type: ignore[arg-type]
    module(torch.ones(1, 2)).sum().backward()
    bypass.on_local_gradient()
    return bypass, module


def test_the_line_of_the_backward_is_known_better_than_that_of_the_forward() -> None:
    lines = iter((LINE, NO_CALL_SITE))
    for expected in (LINE, LINE - 1):  # on a thread of autograd that runs no user code, the forward's is the nearest
        call_sites = SimpleNamespace(
            get_caller_number=lambda: next(lines), is_user_frame=lambda _: True, number_of=lambda _: LINE - 1
        )
        module = torch.nn.Linear(2, 1)
        collectives = SimpleNamespace(call_sites=call_sites, elements_reduced_by_user=0)
        bypass = UnreducedGradientDetector([*module.parameters()], collectives)  # type: ignore[arg-type]
        bypass.on_module_access(sys._getframe())
        module(torch.ones(1, 2)).sum().backward()
        bypass.on_local_gradient()
        assert bypass.take_unreduced_call_site(torch.optim.SGD(module.parameters(), lr=0.1)) == expected


def test_its_own_optimizer_uses_them() -> None:
    bypass, module = bypassed()
    assert bypass.take_unreduced_call_site(torch.optim.SGD(module.parameters(), lr=0.1)) == LINE


def test_another_models_optimizer_leaves_them_to_be_set_to_zero() -> None:
    """A discriminator gets gradients from the loss of its generator."""
    bypass, module = bypassed()
    other = torch.optim.SGD(torch.nn.Linear(2, 1).parameters(), lr=0.1)
    assert bypass.take_unreduced_call_site(other) == NO_CALL_SITE
    own = torch.optim.SGD(module.parameters(), lr=0.1)
    own.zero_grad()
    assert bypass.take_unreduced_call_site(own) == NO_CALL_SITE


def test_another_models_optimizer_does_not_hide_them_from_their_own() -> None:
    bypass, module = bypassed()
    bypass.take_unreduced_call_site(torch.optim.SGD(torch.nn.Linear(2, 1).parameters(), lr=0.1))
    assert bypass.take_unreduced_call_site(torch.optim.SGD(module.parameters(), lr=0.1)) == LINE
