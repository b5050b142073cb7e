"""Backends of process groups: their names, and how a stream is made to wait for one of their works."""

from __future__ import annotations

import os
from collections.abc import Callable
from operator import methodcaller
from typing import Any, Final

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from overlapscope.errors import OverlapScopeError
from overlapscope.text import count_of

_MIN_NCCL_FOR_SHARED_DEVICES: Final = (2, 30)
"""First NCCL version in which ranks can share a device. In older ones a ``NCCL_HOSTID`` per rank allows it, by making
them appear to be on separate hosts."""


def get_backend_name(group: dist.ProcessGroup, device: torch.device) -> str:
    """Return the backend of a group for tensors on a device: ``gloo``, ``nccl`` and so on.

    A group may have one backend per device type, as in ``cpu:gloo,cuda:nccl``; its own name is that of one of them, or
    ``custom``. Since torch 2.15 a group that was made with ``nccl`` has the backend ``nccl2``.
    """
    try:
        return str(group._get_backend(device).name())
    except Exception:  # a process group written in Python has no backends
        return str(group.name())


def require_device_per_rank(backend: str) -> None:
    """Raise a short error early where NCCL would fail with many lines because ranks of this host share a device.

    Raises:
        OverlapScopeError: ranks share a device, and NCCL does not support it.
    """
    ranks, devices = int(os.environ.get("LOCAL_WORLD_SIZE", "1")), torch.cuda.device_count()
    if not backend.startswith("nccl") or ranks <= devices or "NCCL_HOSTID" in os.environ:
        return
    if torch.cuda.nccl.version() < _MIN_NCCL_FOR_SHARED_DEVICES:
        raise OverlapScopeError(
            f"{ranks} ranks on a host with {count_of(devices, 'CUDA device')}, and {backend} needs one for each: "
            "start fewer, or give --backend gloo"
        )


StreamWait = Callable[[dist.Work], Any]
"""Makes the current stream wait for a work. Launches nothing on it, and does not block the host."""


def find_stream_wait(group: dist.ProcessGroup, device: torch.device) -> StreamWait | None:
    """Return how a stream waits for works of a group's backend; None if only the host can know their end.

    Backends are told apart by their class, because a method of the same name does something else in the next:

    ``ProcessGroupNCCL``
        ``Work.block_current_stream`` (torch 2.8). Elsewhere it is that of the base class, a kernel that spins.
    ``ProcessGroupNCCL2``, ``ProcessGroupNCCLLazy`` (torch 2.14; ``nccl`` is the former since 2.15)
        ``Work.synchronize``: the stream waits for the event behind the collective. It also drops the work's references
        to its inputs, which somebody else must keep until the caller's own stream has waited: buckets are kept.
    """
    backend = _find_backend(group, device)
    if backend is None:
        return None
    if isinstance(backend, _class_named("ProcessGroupNCCL")):
        return methodcaller("block_current_stream") if hasattr(dist.Work, "block_current_stream") else None
    if isinstance(backend, (_class_named("ProcessGroupNCCL2"), _class_named("ProcessGroupNCCLLazy"))):
        return methodcaller("synchronize")
    return None


def explain_bounds(group: dist.ProcessGroup, device: torch.device) -> str | None:
    """Return why ends of buckets on a device are recorded as upper bounds; None if they are exact."""
    if device.type != "cuda" or find_stream_wait(group, device) is not None:
        return None
    name = get_backend_name(group, device)
    if isinstance(_find_backend(group, device), _class_named("ProcessGroupNCCL")):
        return "a stream can't wait for nccl alone in torch before 2.8"
    return f"a stream can't wait for the backend {name} alone"


def _find_backend(group: dist.ProcessGroup, device: torch.device) -> object | None:
    """Return the backend that runs a group's collectives on a device, without the wrapper of debugging."""
    try:
        backend: Any = group._get_backend(device)
    except RuntimeError:  # a process group that is written in Python has no backends
        return None
    wrapper = _class_named("_ProcessGroupWrapper")
    while isinstance(backend, wrapper):  # TORCH_DISTRIBUTED_DEBUG=DETAIL
        backend = backend.wrapped_pg
    return backend


def _class_named(name: str) -> type[Any] | tuple[()]:
    """Return a class of ``torch.distributed``, or what nothing is an instance of if this torch does not have it."""
    found: Any = getattr(dist, name, None)
    return found or getattr(distributed_c10d, name, ())
