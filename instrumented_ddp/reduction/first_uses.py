"""Parameters that each module's forward needs: those registered with it, and those that it was first seen to use."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves


class FirstUseTracker(TorchFunctionMode):
    """Tracks in one forward which modules use parameters of other modules, as attention does with its projections.

    A parameter that was not seen, because a compiled or scripted part uses it, is needed from the beginning.

    Args:
        module: the module whose forward runs inside this context.
        parameters: parameters to look for.
    """

    def __init__(self, module: nn.Module, parameters: Sequence[nn.Parameter]) -> None:
        super().__init__()
        self._root = module
        self._index_of = {id(parameter): index for index, parameter in enumerate(parameters)}
        self._current_module = module
        self._user_of: dict[int, nn.Module] = {}

    def enter_module(self, module: nn.Module) -> None:
        """Note that the forward of a module begins."""
        self._current_module = module

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Note the parameters among the arguments of a call."""
        kwargs = kwargs or {}
        for leaf in tree_leaves((args, kwargs)):
            if isinstance(leaf, torch.Tensor) and (index := self._index_of.get(id(leaf))) is not None:
                self._user_of.setdefault(index, self._current_module)
        return func(*args, **kwargs)

    def needs(self) -> dict[nn.Module, tuple[int, ...]]:
        """Return the indices of the parameters that the forward of each module needs, by module."""
        needs: dict[nn.Module, set[int]] = {module: set() for module in self._root.modules()}
        for module, numbers in needs.items():
            own = (self._index_of.get(id(parameter)) for parameter in module.parameters(recurse=False))
            numbers.update(index for index in own if index is not None)
        for index in self._index_of.values():
            needs.setdefault(self._user_of.get(index, self._root), set()).add(index)
        return {module: tuple(sorted(numbers)) for module, numbers in needs.items() if numbers}
