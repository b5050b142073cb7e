"""Forward pre-hooks that wait for in-flight parameters just before the first module that uses them.

Communication thus overlaps with the forward of the preceding modules.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import _disable_dynamo, nn  # type: ignore[attr-defined]
from torch.utils.hooks import RemovableHandle


class PreForwardWait:
    """Pre-hooks on each module's forward that wait for the parameters the module uses.

    Some modules' own forward is never called although their parameters are used (such as ``out_proj`` in
    ``nn.MultiheadAttention``, whose weight the parent module reads); their parameters are waited for before the root's
    forward.

    Args:
        module: the root.
        parts: number of the part that each parameter belongs to.
        wait: called with a part's number before a forward uses it, perhaps several times; blocks until the part is
            available.
    """

    def __init__(self, module: nn.Module, parts: Mapping[nn.Parameter, int], wait: Callable[[int], None]) -> None:
        self._wait = wait
        self._uncalled_modules: dict[nn.Module, tuple[int, ...]] = {}
        self._handles: list[RemovableHandle] = []
        for one in module.modules():
            used = dict.fromkeys(parts[parameter] for parameter in one.parameters(recurse=False) if parameter in parts)
            if used:
                self._uncalled_modules[one] = tuple(used)
                self._handles.append(one.register_forward_pre_hook(partial(self._before, tuple(used)), prepend=True))
        self._handles.append(module.register_forward_pre_hook(self._before_all, prepend=True))

    def remove(self) -> None:
        """Remove the hooks. May be called twice."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    @_disable_dynamo
    def _before(self, parts: tuple[int, ...], module: nn.Module, _: tuple[torch.Tensor, ...]) -> None:
        self._uncalled_modules.pop(module, None)
        for part in parts:
            self._wait(part)

    @_disable_dynamo
    def _before_all(self, *_: object) -> None:
        for parts in self._uncalled_modules.values():
            for part in parts:
                self._wait(part)
