"""Reduced coverage of one wrapped module: which gradients an update is about to use that were never averaged.

Nothing fails in any of these, all ranks do the same, and their models diverge from that update on:

- ``ddp.module(x)`` is called in place of the wrapper;
- a backward under ``no_sync()`` comes after the one that was reduced, or instead of it;
- a second backward belongs to a forward from before the reduction, which expects no more gradients;
- a bucket never has all its gradients, and the error of the next forward is never reached;
- the module was cast or moved, and autograd has made new accumulators, without the reducer's hooks.

What is counted are backwards and the gradients that arrive while no reduction waits for them. Parameters are looked at
one by one only if an update follows a backward that no reduction followed.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Final

import torch

from instrumented_ddp.collectives.log import CollectiveRecorder
from overlapscope.diagnosis.evidence import UnreducedCause
from overlapscope.trace.schema import NO_CALL_SITE

_MAX_BACKWARDS: Final = 256
"""Maximum number of backwards of one update whose lines are kept."""

FindUnfinished = Callable[[], tuple[UnreducedCause, Sequence[int]]]
"""Returns why the reduction that is expected never ended, and the parameters whose gradients wait for it."""


@dataclass(slots=True)
class _Backward:
    """A backward through the wrapper that no reduction has followed yet."""

    call_site: int
    no_sync: bool
    has_local_gradient: bool = False
    """True if a gradient arrived that no reduction waited for."""


@dataclass(frozen=True, kw_only=True)
class UnreducedUpdate:
    """An update that is about to use gradients of this rank alone."""

    cause: UnreducedCause
    parameters: Sequence[int]
    """Parameters by their index."""
    call_sites: Sequence[int]
    """Call site of each backward that was not reduced; of the access to the module if it was called itself."""
    reduced_backwards: int
    """Number of backwards since the last update that were reduced."""


class ReductionCoverage:
    """Detector of updates of one wrapped module that use gradients that were never reduced.

    Args:
        parameters: trained parameters of the module, in the reducer's order.
        collectives: source of the user's call sites and of the volume that users reduce themselves.
    """

    def __init__(self, parameters: Sequence[torch.nn.Parameter], collectives: CollectiveRecorder) -> None:
        self._parameters = [weakref.ref(parameter) for parameter in parameters]
        self._elements = [parameter.numel() for parameter in parameters]
        self._collectives = collectives
        self._access_call_site = self._bypass_call_site = NO_CALL_SITE
        self._is_local = bytearray(len(parameters))
        """1 for each parameter with a gradient that no reduction has waited for."""
        self._backwards: list[_Backward] = []
        self._reduced_backwards = 0
        self._reduced_in_step: int | None = None
        self._reduced_by_user_before = 0
        self._indices: weakref.WeakKeyDictionary[torch.optim.Optimizer, tuple[int, tuple[int, ...]]] = (
            weakref.WeakKeyDictionary()
        )
        self.find_unfinished: weakref.WeakMethod[FindUnfinished] | None = None
        """Method of the reducer, for backwards that should have been reduced and were not."""
        self.has_gap = False
        """True if the latest update used gradients that DDP had not averaged, even if the user had."""

    def on_module_access(self, frame: FrameType) -> None:
        """Note that the user accesses the wrapped module, perhaps to call it."""
        if self._collectives.call_sites.is_user_frame(frame):
            self._access_call_site = self._collectives.call_sites.number_of(frame)

    def on_backward(self, *, no_sync: bool) -> None:
        """Note that a backward has reached the wrapper's output.

        Args:
            no_sync: whether its forward was not to be reduced.
        """
        self._begin()
        if len(self._backwards) < _MAX_BACKWARDS:
            self._backwards.append(_Backward(self._collectives.position.backward_call_site, no_sync))

    def on_local_gradient(self, index: int, *, in_backward: bool) -> None:
        """Note a gradient that no reduction waits for.

        Args:
            index: index of its parameter.
            in_backward: whether a backward has reached the output of a wrapper.
        """
        if in_backward and self._backwards:
            self._backwards[-1].has_local_gradient = True
        elif self._bypass_call_site == NO_CALL_SITE:
            self._begin()
            # Autograd's thread for a device runs no user code: the line that took the module is the nearest known.
            self._bypass_call_site = self._collectives.call_sites.get_caller_number() or self._access_call_site
        self._is_local[index] = 1

    def on_gradients_reduced(self) -> None:
        """Note that the current gradients are averages."""
        self._reduced_backwards += len(self._backwards)
        self._reduced_in_step = self._collectives.position.step
        self._forget()

    @property
    def has_reduced(self) -> bool:
        """Return whether all gradients are averages of this step."""
        is_of_this_step = self._reduced_in_step == self._collectives.position.step
        return is_of_this_step and not self._backwards and self._bypass_call_site == NO_CALL_SITE

    def take_unreduced_update(
        self, optimizer: torch.optim.Optimizer, others: Sequence[ReductionCoverage] = ()
    ) -> UnreducedUpdate | None:
        """Return what is not reduced of the gradients that an update is about to use. Called before each update.

        Args:
            optimizer: optimizer that is about to update. Gradients that another model's optimizer ignores may still be
                set to zero: a discriminator gets gradients from its generator's loss.
            others: wrappers that have reduced all gradients of theirs. A module that was wrapped again has two.
        """
        self.has_gap = False
        if not self._backwards and self._bypass_call_site == NO_CALL_SITE:
            self._access_call_site, self._reduced_backwards = NO_CALL_SITE, 0
            return None
        indices = self._indices_in(optimizer)
        found = self._find_unreduced(indices) if indices else None
        if found is None:
            return None
        if self._are_reduced_by(others, found.parameters):
            self._forget()
            self._reduced_backwards = 0
            return None
        self.has_gap = True
        by_user = self._collectives.elements_reduced_by_user - self._reduced_by_user_before
        elements = sum(self._elements[index] for index in found.parameters)
        self._forget()
        self._reduced_backwards = 0
        return None if 2 * by_user >= elements else found

    def _are_reduced_by(self, others: Sequence[ReductionCoverage], indices: Sequence[int]) -> bool:
        reduced = {id(reference()) for other in others if other is not self for reference in other._parameters}
        return bool(reduced) and all(id(self._parameters[index]()) in reduced for index in indices)

    def _find_unreduced(self, indices: Sequence[int]) -> UnreducedUpdate | None:
        awaited = self._find_awaited(indices)
        if awaited is not None and awaited.cause == "hooks lost":  # also where backwards under no_sync() came before it
            return awaited
        return self._find_local(indices) or awaited

    def _find_local(self, indices: Sequence[int]) -> UnreducedUpdate | None:
        """Return an update with gradients that no reduction has waited for."""
        parameters = self._with_gradient(index for index in indices if self._is_local[index])
        backwards = [backward for backward in self._backwards if backward.has_local_gradient]
        if not backwards:
            return self._make_update("bypassed", parameters, [self._bypass_call_site])
        cause: UnreducedCause = "no_sync" if all(backward.no_sync for backward in backwards) else "late"
        return self._make_update(cause, parameters, [backward.call_site for backward in backwards])

    def _find_awaited(self, indices: Sequence[int]) -> UnreducedUpdate | None:
        """Return an update with gradients whose reduction was expected and never ended."""
        call_sites = [backward.call_site for backward in self._backwards if not backward.no_sync]
        find_unfinished = self.find_unfinished() if self.find_unfinished is not None else None
        if not call_sites or find_unfinished is None:
            return None
        cause, waiting = find_unfinished()
        return self._make_update(cause, self._with_gradient(set(waiting).intersection(indices)), call_sites)

    def _make_update(
        self, cause: UnreducedCause, parameters: Sequence[int], call_sites: Sequence[int]
    ) -> UnreducedUpdate | None:
        if not parameters:
            return None
        return UnreducedUpdate(
            cause=cause, parameters=parameters, call_sites=call_sites, reduced_backwards=self._reduced_backwards
        )

    def _with_gradient(self, indices: Iterable[int]) -> list[int]:
        gradients = {index: getattr(self._parameters[index](), "grad", None) for index in indices}
        return sorted(index for index, gradient in gradients.items() if gradient is not None)

    def _begin(self) -> None:
        if not self._backwards and self._bypass_call_site == NO_CALL_SITE:
            self._reduced_by_user_before = self._collectives.elements_reduced_by_user

    def _forget(self) -> None:
        """Forget the gradients so far."""
        if self._backwards or self._bypass_call_site != NO_CALL_SITE:
            self._backwards.clear()
            self._is_local = bytearray(len(self._is_local))
        self._bypass_call_site = self._access_call_site = NO_CALL_SITE

    def _indices_in(self, optimizer: torch.optim.Optimizer) -> tuple[int, ...]:
        """Return the parameters that an optimizer holds. Called only if there is an unreduced gradient."""
        groups = getattr(optimizer, "param_groups", ())
        count = sum(len(group["params"]) for group in groups)
        known = self._indices.get(optimizer)
        if known is None or known[0] != count:
            own = {id(reference()): index for index, reference in enumerate(self._parameters)}
            held = (own.get(id(parameter)) for group in groups for parameter in group["params"])
            known = self._indices[optimizer] = count, tuple(index for index in held if index is not None)
        return known[1]
