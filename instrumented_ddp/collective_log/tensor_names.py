"""What a tensor is called where it is used: a parameter by its place in the module, else by the user's variable.

Two collectives of the same shape that one rank launches in another order give wrong numbers and no error. The only
thing that tells them apart is which tensor each of them was given.
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

_MOST_ITEMS: Final = 64
"""Of a container in which a tensor is looked for."""
_MOST_THINGS: Final = 512
"""Looked at for one collective: about 50 µs, for scripts that keep everything in global variables."""


class TensorNames:
    """Names for the tensors that collectives are given."""

    def __init__(self) -> None:
        self._of_module: WeakIdKeyDictionary = WeakIdKeyDictionary()
        self._modules_known: WeakIdKeyDictionary = WeakIdKeyDictionary()

    def add_module(self, module: torch.nn.Module) -> None:
        """Know the parameters and buffers of a module by their names in it."""
        if module in self._modules_known:
            return
        self._modules_known[module] = True
        for name, tensor in (*module.named_parameters(), *module.named_buffers()):
            self._of_module.setdefault(tensor, name.removeprefix("module."))

    def names_of(self, tensors: Sequence[torch.Tensor], frame: FrameType | None) -> tuple[str, ...]:
        """What tensors are called in a frame of the user's; those that have no name there are left out.

        A tensor may have several names, in a loop for instance that of the loop's variable; all are given.
        """
        names: list[str] = [self._of_module[tensor] for tensor in tensors if tensor in self._of_module]
        if frame is None or not tensors:
            return tuple(names)
        by_id: dict[int, list[str]] = {id(tensor): [] for tensor in tensors}

        def look_for_them(variables: Mapping[str, Any]) -> None:
            for name, value in islice(_things_in(variables), _MOST_THINGS):
                if (found := by_id.get(id(value))) is not None:
                    found.append(name)
                elif _is_parameter(value) and (found := by_id.get(id(value.grad))) is not None:
                    found.append(f"{self._of_module.get(value, name)}.grad")

        with suppress(Exception):  # of the user's objects, or because another thread changes them meanwhile
            read_variables(frame, look_for_them)
        return (*names, *(name for tensor in tensors for name in sorted(by_id[id(tensor)])))

    def note_modules(self, frame: FrameType) -> None:
        """Know the modules that a frame holds in its variables."""

        def note(variables: Mapping[str, Any]) -> None:
            for value in variables.values():
                if isinstance(value, torch.nn.Module):
                    self.add_module(value)

        with suppress(Exception):
            read_variables(frame, note)


def _things_in(variables: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Variables of a frame, items of its containers and attributes of its ``self``, with their names."""
    for name, value in variables.items():
        if isinstance(value, dict) and len(value) <= _MOST_ITEMS:
            for key, item in value.items():
                if isinstance(key, str | int):
                    yield f"{name}[{key!r}]", item
        elif isinstance(value, list | tuple) and len(value) <= _MOST_ITEMS:
            for place, item in enumerate(value):
                yield f"{name}[{place}]", item
        elif name == "self" and hasattr(value, "__dict__"):
            for key, item in vars(value).items():
                yield f"self.{key}", item
        else:
            yield name, value


def _is_parameter(value: object) -> bool:
    """``isinstance(value, Parameter)`` is Python code, and most things are no tensors."""
    return isinstance(value, torch.Tensor) and isinstance(value, torch.nn.Parameter)
