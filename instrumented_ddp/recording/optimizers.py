"""Optimizers that update the parameters of DDP instances, and the times of their updates."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Sequence

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.weak import WeakIdKeyDictionary

from instrumented_ddp.recording.guard import never_raising


class OptimizerHooks:
    """Hooks that report each update of registered parameters.

    Args:
        begins: called with an optimizer before it updates.
        ends: called after the update.
        on_error: called with internal errors.
    """

    def __init__(
        self,
        begins: Callable[[torch.optim.Optimizer], None],
        ends: Callable[[], None],
        on_error: Callable[[Exception], None],
    ) -> None:
        self._begins = begins
        self._ends = ends
        self._parameters = WeakIdKeyDictionary()
        self._is_relevant: weakref.WeakKeyDictionary[torch.optim.Optimizer, bool] = weakref.WeakKeyDictionary()
        self._has_optimizer: bool | None = None
        self._hooks = [
            register_optimizer_step_pre_hook(never_raising(self._before_step, on_error)),
            register_optimizer_step_post_hook(never_raising(self._after_step, on_error)),
        ]

    def add(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        """Register parameters whose updates are reported."""
        self._parameters.update(dict.fromkeys(parameters, True))
        self._is_relevant.clear()

    def has_optimizer(self) -> bool:
        """Return whether a torch optimizer updates the registered parameters, even if it has not stepped yet.

        Searches all objects, which takes a moment, but only once: after the first reduction without an update.
        """
        if self._has_optimizer is None:
            optimizers = [thing for thing in gc.get_objects() if issubclass(type(thing), torch.optim.Optimizer)]
            self._has_optimizer = any(self._updates_our_parameters(optimizer) for optimizer in optimizers)
        return self._has_optimizer

    def close(self) -> None:
        """Stop reporting. May be called twice."""
        for hook in self._hooks:
            hook.remove()

    def _before_step(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        if self._updates_our_parameters(optimizer):
            self._begins(optimizer)

    def _after_step(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        if self._updates_our_parameters(optimizer):
            self._ends()
            self._has_optimizer = True

    def _updates_our_parameters(self, optimizer: torch.optim.Optimizer) -> bool:
        known = self._is_relevant.get(optimizer)
        if known is None:
            groups = getattr(optimizer, "param_groups", ())  # a user's class may lack it
            known = any(p in self._parameters for group in groups for p in group["params"])
            self._is_relevant[optimizer] = known
        return known
