"""Backend of a collective. A group may have one backend per device type, as in ``cpu:gloo,cuda:nccl``."""

from __future__ import annotations

import os
from typing import Final

import torch
import torch.distributed as dist

from overlapscope.errors import OverlapScopeError

_MIN_NCCL_FOR_SHARED_DEVICES: Final = (2, 30)
"""First NCCL version in which ranks can share a device. In older ones a ``NCCL_HOSTID`` per rank allows it, by making
them appear to be on separate hosts."""


def get_backend_name(group: dist.ProcessGroup, device: torch.device) -> str:
    """Return the backend of a group for tensors on a device: ``gloo``, ``nccl`` and so on.

    The group's name is that of one of its backends, or ``custom``.
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
    if backend != "nccl" or ranks <= devices or "NCCL_HOSTID" in os.environ:
        return
    if torch.cuda.nccl.version() < _MIN_NCCL_FOR_SHARED_DEVICES:
        found = f"{devices} CUDA device" + ("" if devices == 1 else "s")
        raise OverlapScopeError(
            f"{ranks} ranks on a host with {found}, and nccl needs one for each: start fewer, or give --backend gloo"
        )
