"""Waits for parameters that are still on their way, before the first module that uses them runs.

So what is communicated overlaps with the forward of the modules before it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import _disable_dynamo, nn  # type: ignore[attr-defined]
from torch.utils.hooks import RemovableHandle


class BeforeForward:
    """Calls who waits, from hooks in front of each module's forward.

    A module whose own forward has never been called, but whose parameters are used all the same (as ``out_proj`` in
    ``nn.MultiheadAttention``, whose weight the module above it reads), is waited for before the whole forward.

    Args:
        module: the root.
        parts: which part each parameter belongs to, by number.
        wait: called with a part's number before a forward uses it, perhaps several times: to wait until it is there.
    """

    def __init__(self, module: nn.Module, parts: Mapping[nn.Parameter, int], wait: Callable[[int], None]) -> None:
        self._wait = wait
        self._never_called: dict[nn.Module, tuple[int, ...]] = {}
        self._handles: list[RemovableHandle] = []
        for one in module.modules():
            used = dict.fromkeys(parts[parameter] for parameter in one.parameters(recurse=False) if parameter in parts)
            if used:
                self._never_called[one] = tuple(used)
                self._handles.append(one.register_forward_pre_hook(partial(self._before, tuple(used)), prepend=True))
        self._handles.append(module.register_forward_pre_hook(self._before_all, prepend=True))

    def remove(self) -> None:
        """Leave the modules alone. May be called twice."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    @_disable_dynamo
    def _before(self, parts: tuple[int, ...], module: nn.Module, _: tuple[torch.Tensor, ...]) -> None:
        self._never_called.pop(module, None)
        for part in parts:
            self._wait(part)

    @_disable_dynamo
    def _before_all(self, *_: object) -> None:
        for parts in self._never_called.values():
            for part in parts:
                self._wait(part)
