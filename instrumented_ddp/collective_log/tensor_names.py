"""Names of tensors given to collectives: a parameter's name in its module, else the user's variable.

Two collectives of the same shape that one rank launches in another order give wrong numbers and no error. The only
thing that distinguishes them is which tensor each of them was given.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import islice
from types import FrameType
from typing import Any, Final

import torch
from torch.utils.weak import WeakIdKeyDictionary

from instrumented_ddp.collective_log.variables import read_variables

_MAX_CONTAINER_ITEMS: Final = 64
"""Maximum size of a container that is searched for tensors."""
_MAX_VALUES: Final = 512
"""Maximum number of objects searched per collective: about 50 µs, for scripts with all their data in globals."""


class TensorNames:
    """Lookup of names for the tensors that collectives are given."""

    def __init__(self) -> None:
        self._module_names: WeakIdKeyDictionary = WeakIdKeyDictionary()
        self._modules_known: WeakIdKeyDictionary = WeakIdKeyDictionary()

    def add_module(self, module: torch.nn.Module) -> None:
        """Register the parameters and buffers of a module by their names in it."""
        if module in self._modules_known:
            return
        self._modules_known[module] = True
        for name, tensor in (*module.named_parameters(), *module.named_buffers()):
            self._module_names.setdefault(tensor, name.removeprefix("module."))

    def names_of(self, tensors: Sequence[torch.Tensor], frame: FrameType | None) -> tuple[str, ...]:
        """Return the names of tensors in a frame of user code, omitting those without a name there.

        A tensor may have several names, for instance that of a loop variable as well; all are returned.
        """
        names: list[str] = [self._module_names[tensor] for tensor in tensors if tensor in self._module_names]
        if frame is None or not tensors:
            return tuple(names)
        by_id: dict[int, list[str]] = {id(tensor): [] for tensor in tensors}

        def look_for_them(variables: Mapping[str, Any]) -> None:
            for name, value in islice(_iter_values(variables), _MAX_VALUES):
                if (found := by_id.get(id(value))) is not None:
                    found.append(name)
                elif _is_parameter(value) and (found := by_id.get(id(value.grad))) is not None:
                    found.append(f"{self._module_names.get(value, name)}.grad")

        with suppress(Exception):  # from the user's objects, or because another thread changes them meanwhile
            read_variables(frame, look_for_them)
        return (*names, *(name for tensor in tensors for name in sorted(by_id[id(tensor)])))

    def note_modules(self, frame: FrameType) -> None:
        """Register the modules in the variables of a frame."""

        def note(variables: Mapping[str, Any]) -> None:
            for value in variables.values():
                if isinstance(value, torch.nn.Module):
                    self.add_module(value)

        with suppress(Exception):
            read_variables(frame, note)


def _iter_values(variables: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the variables of a frame, items of its containers and attributes of its ``self``, with their names."""
    for name, value in variables.items():
        if isinstance(value, dict) and len(value) <= _MAX_CONTAINER_ITEMS:
            for key, item in value.items():
                if isinstance(key, str | int):
                    yield f"{name}[{key!r}]", item
        elif isinstance(value, list | tuple) and len(value) <= _MAX_CONTAINER_ITEMS:
            for index, item in enumerate(value):
                yield f"{name}[{index}]", item
        elif name == "self" and hasattr(value, "__dict__"):
            for key, item in vars(value).items():
                yield f"self.{key}", item
        else:
            yield name, value


def _is_parameter(value: object) -> bool:
    """Return whether a value is a parameter, testing for tensors first as ``Parameter``'s check is Python code."""
    return isinstance(value, torch.Tensor) and isinstance(value, torch.nn.Parameter)
