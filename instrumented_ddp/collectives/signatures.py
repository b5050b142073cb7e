"""Table of distinct collective signatures: a number for each, and a line in ``signatures.jsonl``."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path
from types import FrameType
from typing import Any, Final

import torch
from torch.utils.weak import WeakIdKeyDictionary

from instrumented_ddp.bucket_plan import dtype_name
from instrumented_ddp.collectives.call_sites import read_variables
from instrumented_ddp.collectives.dispatch import Call
from instrumented_ddp.collectives.roles import CollectiveRole
from overlapscope.trace.collective_log import CollectiveLogHeader, Signature
from overlapscope.trace.schema import SIGNATURES_FILE

_MAX_CONTAINER_ITEMS: Final = 64
"""Maximum size of a container that is searched for tensors."""
_MAX_VALUES: Final = 512
"""Maximum number of objects searched per collective: about 50 µs, for scripts with all their data in globals."""


class TensorNames:
    """Names of the tensors that collectives are given: a parameter's in its module, else the user's variable.

    Two collectives of the same shape that one rank launches in another order give wrong numbers and no error. The only
    thing that distinguishes them is which tensor each of them was given.
    """

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


_MAX_SIGNATURES: Final = 100_000
"""Limit for collectives whose shapes change all the time; signatures beyond it get number 0, but the right hash."""
_MAX_FRAMES_TO_REDUCTION: Final = 2
"""Maximum number of frames from the operator to the ``torch.distributed`` function called by the user."""


class SignatureTable:
    """The signatures of this process, each written when it is first seen.

    Args:
        folder: folder of this rank.

    Raises:
        OSError: the file can't be written; ``FileExistsError`` if it exists.
    """

    def __init__(self, folder: Path) -> None:
        self.known: list[Signature] = []
        """Known signatures, indexed by number - 1."""
        self._file = (folder / SIGNATURES_FILE).open("x", encoding="utf-8")
        self._numbers: dict[tuple[Any, ...], int] = {}
        self._lock = threading.Lock()

    def of(
        self, call: Call, purpose: CollectiveRole | None, header: CollectiveLogHeader, names: tuple[str, ...]
    ) -> tuple[int, Signature]:
        """Return the number and the signature of a call.

        Args:
            purpose: declared purpose, if any.
            header: header of its group.
            names: names of its tensors.
        """
        tensors = call.tensors
        reduce_op = read_reduce_op(call)
        key = (
            call.op,
            purpose,
            names,
            reduce_op,
            call.peer,
            call.tag,
            header.ranks,
            tensors[0].dtype if tensors else None,
            *(tensor.shape for tensor in tensors),
        )
        number = self._numbers.get(key)
        if number is not None:
            return number, self.known[number - 1]
        what = purpose or CollectiveRole(role="user")
        is_known_peer = call.peer is not None and 0 <= call.peer < len(header.ranks)
        signature = Signature(
            op=call.op,
            reduce_op=reduce_op,
            dtype=dtype_name(tensors[0].dtype) if tensors else "",
            shapes=tuple(tuple(tensor.shape) for tensor in tensors),
            elements=sum(tensor.numel() for tensor in tensors),
            bytes=sum(tensor.numel() * tensor.element_size() for tensor in tensors),
            peer=header.ranks[call.peer] if call.peer is not None and is_known_peer else call.peer,
            tag=call.tag,
            names=names,
            role=what.role,
            model=what.model,
            plan_epoch=what.plan_epoch,
            plan_hash=what.plan_hash,
            bucket=what.bucket,
            strategy=what.strategy,
            phase=what.phase,
            round=what.round,
            rounds=what.rounds,
        )
        with self._lock:
            if len(self.known) >= _MAX_SIGNATURES:
                return 0, signature
            self.known.append(signature)
            number = self._numbers[key] = len(self.known)
            with suppress(OSError, ValueError):  # a full disk, or closed a moment ago
                self._file.write(signature.to_json(number))
                self._file.flush()
        return number, signature

    def close(self) -> None:
        """Close the file; signatures stay known."""
        self._file.close()


def read_reduce_op(call: Call) -> str:
    """Return the reduce operation from the caller's frame: the dispatcher's boxed argument can't be unpacked.

    Returns:
        ``sum``, ``max`` ...; empty if it reduces nothing, or a process group was called in another way.
    """
    if "reduce" not in call.op:
        return ""
    frame = call.caller
    for _ in range(_MAX_FRAMES_TO_REDUCTION):
        if frame is None:
            break
        is_function = "op" in frame.f_code.co_varnames
        if is_function and frame.f_globals.get("__name__") == "torch.distributed.distributed_c10d":
            op = frame.f_locals.get("op")
            return str(getattr(op, "op", op)).rpartition(".")[2].lower()
        frame = frame.f_back
    return ""
