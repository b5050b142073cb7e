"""Communication hooks, by which users replace a bucket's all-reduce.

A hook is called as ``hook(state, bucket)`` and returns a future of the tensor that replaces the buffer. What it gets
has the methods of ``torch.distributed.GradBucket``, so hooks written for torch run unchanged.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import BuiltinCommHookType  # type: ignore[attr-defined]
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

from instrumented_ddp.reduction.bucket import Bucket

Hook = Callable[["GradBucket"], "torch._C.Future[Any]"]
"""A hook bound to its state."""


class GradBucket:
    """A bucket as passed to a hook. Each reduction has a new one, because a hook may replace its buffer."""

    __slots__ = ("_buffer", "_is_last", "bucket")

    def __init__(self, bucket: Bucket, buffer: torch.Tensor, *, is_last: bool) -> None:
        self.bucket = bucket
        self._buffer = buffer
        self._is_last = is_last

    def index(self) -> int:
        """Return the index of the bucket in launch order."""
        return self.bucket.number

    def buffer(self) -> torch.Tensor:
        """Return the flat tensor that holds all gradients of the bucket, not yet divided."""
        return self._buffer

    def set_buffer(self, buffer: torch.Tensor) -> None:
        """Replace the buffer by another tensor."""
        self._buffer = buffer

    def gradients(self) -> list[torch.Tensor]:
        """Return a view of the buffer for each parameter, in its shape."""
        gradients, offset = [], 0
        for parameter in self.bucket.parameters:
            elements = parameter.numel()
            gradients.append(self._buffer[offset : offset + elements].view(parameter.shape))
            offset += elements
        return gradients

    def parameters(self) -> list[torch.Tensor]:
        """Return the parameters, in the order of their gradients in the buffer."""
        return list(self.bucket.parameters)

    def is_last(self) -> bool:
        """Return whether this is the last bucket to be launched."""
        return self._is_last


def python_hook(state: object, hook: Callable[[Any, Any], Any]) -> Hook:
    """Wrap a user's hook, which must return a future."""

    def run(bucket: GradBucket) -> torch._C.Future[Any]:
        future = hook(state, bucket)
        if not isinstance(future, torch._C.Future):  # the base class of torch.futures.Future
            kind = type(future)
            raise RuntimeError(
                "DDP communication hook's callback must return a torch.futures.Future object, but got "
                f"{kind.__module__}.{kind.__qualname__}"
            )
        return future

    return run


def builtin_hook(kind: BuiltinCommHookType, group: dist.ProcessGroup) -> Hook:
    """Return a hook that torch implements in C++."""
    hooks: dict[BuiltinCommHookType, Callable[[Any, Any], Any]] = {
        BuiltinCommHookType.ALLREDUCE: default_hooks.allreduce_hook,
        BuiltinCommHookType.FP16_COMPRESS: default_hooks.fp16_compress_hook,
    }
    return python_hook(group, hooks[kind])


def result_of(future: torch._C.Future[Any]) -> torch.Tensor:
    """Return the tensor that a completed hook returned in place of the buffer.

    Raises:
        RuntimeError: the result is not a tensor.
    """
    result = future.value()
    if isinstance(result, list) and len(result) == 1:  # as in the future of a collective
        result = result[0]
    if not isinstance(result, torch.Tensor):
        raise RuntimeError(
            f"DDP communication hook's future must hold one tensor, but holds a {type(result).__qualname__}."
        )
    return result
