"""Which backend carries a collective. A group may have one for each kind of device, as ``cpu:gloo,cuda:nccl``."""

from __future__ import annotations

import torch
import torch.distributed as dist


def backend_of(group: dist.ProcessGroup, device: torch.device) -> str:
    """The backend of a group for tensors on a device: ``gloo``, ``nccl`` and so on.

    The group's own name is that of one of its backends, or ``custom``.
    """
    try:
        return str(group._get_backend(device).name())
    except Exception:  # a process group written in Python has no backends
        return str(group.name())
