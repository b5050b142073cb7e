"""Which backend carries a collective. A group may have one for each kind of device, as ``cpu:gloo,cuda:nccl``."""

from __future__ import annotations

import os
from typing import Final

import torch
import torch.distributed as dist

from overlapscope.errors import OverlapScopeError

_RANKS_SHARE_DEVICES: Final = (2, 30)
"""NCCL from this version on. Before, ranks with a ``NCCL_HOSTID`` each do: they seem to be on hosts of their own."""


def backend_of(group: dist.ProcessGroup, device: torch.device) -> str:
    """The backend of a group for tensors on a device: ``gloo``, ``nccl`` and so on.

    The group's own name is that of one of its backends, or ``custom``.
    """
    try:
        return str(group._get_backend(device).name())
    except Exception:  # a process group written in Python has no backends
        return str(group.name())


def require_a_device_for_each_rank(backend: str) -> None:
    """Say so at once where NCCL would fail, with many lines, as ranks of this host share a device.

    Raises:
        OverlapScopeError: they do.
    """
    ranks, devices = int(os.environ.get("LOCAL_WORLD_SIZE", "1")), torch.cuda.device_count()
    if backend != "nccl" or ranks <= devices or "NCCL_HOSTID" in os.environ:
        return
    if torch.cuda.nccl.version() < _RANKS_SHARE_DEVICES:
        found = f"{devices} CUDA device" + ("" if devices == 1 else "s")
        raise OverlapScopeError(
            f"{ranks} ranks on a host with {found}, and nccl needs one for each: start fewer, or give --backend gloo"
        )
