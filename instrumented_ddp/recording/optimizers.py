"""Which optimizers update the parameters of DDP instances, and when they do."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Sequence

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.weak import WeakIdKeyDictionary

from instrumented_ddp.recording.guard import surviving


class Optimizers:
    """Tells of each update of the parameters that it was given.

    Args:
        begins: called with an optimizer before it updates.
        ends: called after it.
        on_error: called with what goes wrong here.
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
        self._is_ours: weakref.WeakKeyDictionary[torch.optim.Optimizer, bool] = weakref.WeakKeyDictionary()
        self._is_known: bool | None = None
        self._hooks = [
            register_optimizer_step_pre_hook(surviving(self._step, on_error)),
            register_optimizer_step_post_hook(surviving(self._stepped, on_error)),
        ]

    def add(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        """Tell of updates of these as well."""
        self._parameters.update(dict.fromkeys(parameters, True))
        self._is_ours.clear()

    def has_one(self) -> bool:
        """Whether an optimizer of torch updates our parameters, also one that has not stepped yet.

        Looked for among all objects, which takes a moment, once: after the first reduction without an update.
        """
        if self._is_known is None:
            optimizers = [thing for thing in gc.get_objects() if issubclass(type(thing), torch.optim.Optimizer)]
            self._is_known = any(self._updates_our_parameters(optimizer) for optimizer in optimizers)
        return self._is_known

    def close(self) -> None:
        """Tell of no more. May be called twice."""
        for hook in self._hooks:
            hook.remove()

    def _step(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        if self._updates_our_parameters(optimizer):
            self._begins(optimizer)

    def _stepped(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        if self._updates_our_parameters(optimizer):
            self._ends()
            self._is_known = True

    def _updates_our_parameters(self, optimizer: torch.optim.Optimizer) -> bool:
        known = self._is_ours.get(optimizer)
        if known is None:
            groups = getattr(optimizer, "param_groups", ())  # a class of the user's may do without
            known = any(p in self._parameters for group in groups for p in group["params"])
            self._is_ours[optimizer] = known
        return known
