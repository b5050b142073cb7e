"""Interception of every collective of the process on torch's dispatcher.

Python functions of ``torch.distributed``, methods of a process group, the C++ reducer of stock DDP and compiled code
all end in operators of the library ``c10d``. A kernel for the key ``BackendSelect``, which is part of every call, is
called before that of the device, and redispatches to it with the keys below its own.
(torch/csrc/distributed/c10d/Ops.cpp has the operators, their schemas and what calls them.)
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any, Final, Protocol

import torch
import torch.distributed as dist
from torch._C import DispatchKey

_HOST: Final = torch.device("cpu")


@dataclass(frozen=True, kw_only=True)
class Operator:
    """Operation and argument names of one operator of ``c10d``."""

    name: str
    """Name of the operation in ``torch.distributed``."""
    tensors: str | None
    """Argument with this rank's input; for scatter and receive operations, with its output."""
    peer: str | None = None
    """Argument with the rank of the peer or root in the group."""


_OPERATORS: Final = {
    "allreduce_": Operator(name="all_reduce", tensors="tensors"),
    "allreduce_coalesced_": Operator(name="all_reduce", tensors="tensors"),
    "broadcast_": Operator(name="broadcast", tensors="tensors", peer="root_rank"),
    "reduce_": Operator(name="reduce", tensors="tensors", peer="root_rank"),
    "allgather_": Operator(name="all_gather", tensors="input_tensors"),
    "_allgather_base_": Operator(name="all_gather", tensors="input_tensor"),
    "allgather_coalesced_": Operator(name="all_gather", tensors="input_list"),
    "allgather_into_tensor_coalesced_": Operator(name="all_gather", tensors="inputs"),
    "reduce_scatter_": Operator(name="reduce_scatter", tensors="output_tensors"),
    "_reduce_scatter_base_": Operator(name="reduce_scatter", tensors="output_tensor"),
    "reduce_scatter_tensor_coalesced_": Operator(name="reduce_scatter", tensors="outputs"),
    "gather_": Operator(name="gather", tensors="input_tensors", peer="root_rank"),
    "gather_into_tensor_": Operator(name="gather", tensors="input_tensor", peer="root_rank"),  # torch 2.14
    "scatter_": Operator(name="scatter", tensors="output_tensors", peer="root_rank"),
    "alltoall_": Operator(name="all_to_all", tensors="input_tensors"),
    "alltoall_base_": Operator(name="all_to_all", tensors="input"),
    "barrier": Operator(name="barrier", tensors=None),
    "monitored_barrier_": Operator(name="monitored_barrier", tensors=None),
    "send": Operator(name="send", tensors="tensors", peer="dst"),
    "recv_": Operator(name="recv", tensors="tensors", peer="src"),
    "recv_any_source_": Operator(name="recv", tensors="tensors"),
}
_LIBRARY: Final = "c10d"


def find_unknown_operators() -> list[str]:
    """Return the collective operators of this torch that are not intercepted, because a later torch has added them."""
    names = {name.partition(".")[0] for name in torch._C._dispatch_get_all_op_names()}
    unknown = {name.removeprefix(f"{_LIBRARY}::") for name in names if name.startswith(f"{_LIBRARY}::")}
    return sorted(name for name in unknown.difference(_OPERATORS) if _is_collective(getattr(torch.ops.c10d, name)))


def _is_collective(operator: Any) -> bool:
    arguments = [getattr(operator, name)._schema.arguments for name in operator.overloads()]
    return any(argument.name == "process_group" for of_overload in arguments for argument in of_overload)


@dataclass(slots=True, kw_only=True)
class Call:
    """One call of an operator."""

    op: str
    group: dist.ProcessGroup
    tensors: Sequence[torch.Tensor]
    device: torch.device
    """Device on which it runs."""
    peer: int | None
    """Rank of the peer in the group; None without one, and for a receive from any source."""
    tag: int
    is_awaited: bool
    """True if the caller continues only when it has ended; unknown before torch 2.8, whose callers wait themselves."""
    caller: FrameType | None = None
    """Frame that has called the operator; None on a thread without one, such as autograd's."""


class CollectiveObserver(Protocol):
    """Receiver of every collective."""

    def announce(self, call: Call) -> Any:
        """Handle a collective about to be launched; the return value is passed to ``launched`` or ``failed``."""

    def launched(self, announced: Any, work: dist.Work | None) -> None:
        """Handle acceptance by the backend, without a work if synchronous. May wait for what the caller awaits."""

    def failed(self, announced: Any) -> None:
        """Handle rejection by the backend."""

    def on_unparsed_collective(self, error: Exception) -> None:
        """Handle a collective that is about to be launched but could not be parsed."""


class DispatchInterceptor:
    """Kernels that intercept collectives until ``close``.

    Args:
        observer: receives every collective of the process from now on.
    """

    def __init__(self, observer: CollectiveObserver) -> None:
        self._library = torch.library.Library(_LIBRARY, "IMPL")
        for name, operator in _OPERATORS.items():
            if hasattr(torch.ops.c10d, name):
                kernel = _kernel(getattr(torch.ops.c10d, name).default, operator, observer)
                self._library.impl(name, kernel, "BackendSelect", with_keyset=True)

    def close(self) -> None:
        """Remove the kernels. May be called twice."""
        self._library._destroy()


def _kernel(overload: Any, operator: Operator, observer: CollectiveObserver) -> Callable[..., Any]:
    work_at, is_tuple = _work_index(overload), len(overload._schema.returns) > 1
    announce = _announcer(overload, operator, observer)
    redispatch = overload.redispatch
    keys_below = torch._C._dispatch_keyset_full_after(DispatchKey.BackendSelect)

    def kernel(keys: Any, *args: Any) -> Any:
        announced = announce(args, sys._getframe().f_back)
        try:
            result = redispatch(keys & keys_below, *args)
        except BaseException:
            observer.failed(announced)
            raise
        boxed = None if work_at is None else result[work_at] if is_tuple else result
        observer.launched(announced, None if boxed is None else dist.Work.unbox(boxed))
        return result

    return kernel


def _announcer(
    overload: Any, operator: Operator, observer: CollectiveObserver
) -> Callable[[tuple[Any, ...], FrameType | None], Any]:
    argument_index = {argument.name: number for number, argument in enumerate(overload._schema.arguments)}
    group_at, tag_at = argument_index["process_group"], argument_index.get("tag")
    async_at = argument_index.get("async_op", argument_index.get("asyncOp"))  # true if omitted
    tensors_at = None if operator.tensors is None else argument_index[operator.tensors]
    peer_at = None if operator.peer is None else argument_index[operator.peer]
    is_synchronous = _work_index(overload) is None

    def announce(args: tuple[Any, ...], caller: FrameType | None) -> Any:
        try:
            tensors = () if tensors_at is None else args[tensors_at]
            call = Call(
                op=operator.name,
                group=dist.ProcessGroup.unbox(args[group_at]),
                tensors=(tensors,) if isinstance(tensors, torch.Tensor) else tensors,
                device=_device_of(args),
                peer=None if peer_at is None else args[peer_at],
                tag=0 if tag_at is None else args[tag_at],
                is_awaited=is_synchronous or not (async_at is None or all(args[async_at : async_at + 1])),
                caller=caller,
            )
        except Exception as error:
            observer.on_unparsed_collective(error)
            return None
        return observer.announce(call)

    return announce


def _work_index(overload: Any) -> int | None:
    """Return which result of an operator is its work; None if it returns when it has ended."""
    return next((at for at, value in enumerate(overload._schema.returns) if "Work" in str(value.type)), None)


def _device_of(arguments: Sequence[Any]) -> torch.device:
    """Return the device by which torch's dispatcher selects the backend: that of the first tensor.

    A barrier has an empty tensor for that purpose alone. The first argument of a gather has tensors on the root only.
    """
    for argument in arguments:
        while isinstance(argument, list | tuple) and argument:
            argument = argument[0]
        if isinstance(argument, torch.Tensor):
            return argument.device
    return _HOST
