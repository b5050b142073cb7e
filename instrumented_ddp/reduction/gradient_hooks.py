"""Hooks that autograd calls for every gradient, after all hooks that users have registered on the parameter."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.autograd.graph import get_gradient_edge
from torch.utils.hooks import RemovableHandle


class GradientHooks:
    """The hooks of one model, on the nodes that accumulate gradients. They live as long as the parameters.

    Args:
        parameters: the parameters, each once.
    """

    def __init__(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        self.accumulators: list[Any] = [get_gradient_edge(parameter).node for parameter in parameters]
        """Leaf of the graph that accumulates each parameter's gradient."""
        self._spans_devices = len({parameter.device for parameter in parameters}) > 1
        self._handles: list[RemovableHandle] = []

    @property
    def are_registered(self) -> bool:
        """Return whether hooks are registered."""
        return bool(self._handles)

    def register(self, on_gradient: Callable[[int], None]) -> None:
        """Register a callback that gets the index of each parameter whose gradient was accumulated."""
        hooks = [_hook(index, on_gradient) for index in range(len(self.accumulators))]
        if self._spans_devices:
            lock = threading.RLock()
            hooks = [_one_at_a_time(hook, lock) for hook in hooks]
        self._handles = [node.register_hook(hook) for node, hook in zip(self.accumulators, hooks, strict=True)]

    def remove(self) -> None:
        """Remove all hooks. May be called twice."""
        for handle in self._handles:
            handle.remove()
        self._handles = []


def _hook(index: int, on_gradient: Callable[[int], None]) -> Callable[..., None]:
    def hook(*_: object) -> None:
        on_gradient(index)

    return hook


def _one_at_a_time(hook: Callable[..., None], lock: threading.RLock) -> Callable[..., None]:
    """Serialize calls of a hook, as autograd has a thread for each device of a module that spans several."""

    def locking_hook(*_: object) -> None:
        with lock:
            hook()

    return locking_hook
