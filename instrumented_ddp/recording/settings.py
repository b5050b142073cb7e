"""Settings of this rank that should be equal on all ranks, recorded for comparison."""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import fields, is_dataclass
from typing import Any, Final

import torch
import torch.distributed as dist

from overlapscope import __version__

_COMPARED_DDP_ARGUMENTS: Final = (
    "broadcast_buffers",
    "forward_sync_buffers",
    "init_sync",
    "bucket_cap_mb",
    "bucket_cap_mb_list",
    "find_unused_parameters",
    "gradient_as_bucket_view",
    "static_graph",
    "mixed_precision",
    "skip_all_reduce_unused_params",
    "batched_grad_copy",
)
"""Arguments of torch's ``DistributedDataParallel`` that mean the same on every rank; not every version has them all."""

_COMPARED_VARIABLES: Final = re.compile(r"(NCCL|GLOO|TORCH)_\w+|(OMP|MKL)_NUM_THREADS|PYTORCH_CUDA_ALLOC_CONF")
_HOST_SPECIFIC_OR_SECRET: Final = re.compile(
    r"^NCCL_DEBUG|_(IFNAME|HCA|HOSTID|FILE|DIR|PATH|HOME|OUT|TRACE|CACHE)(_|$)|TOKEN|SECRET|KEY|PASS"
)
"""Variables that are host-specific, a path, or secret."""
_PLAIN: Final = re.compile(r"[\w.,:=+-]{0,48}")


def collect_model_settings(arguments: Mapping[str, Any], *, wrapper: str) -> dict[str, str]:
    """Return the settings of a DDP instance, by name.

    Args:
        arguments: arguments of its constructor, defaults included.
        wrapper: package that defines the wrapper class.
    """
    known = {name: _text(arguments[name]) for name in _COMPARED_DDP_ARGUMENTS if name in arguments}
    if known.get("broadcast_buffers") == "None":  # torch 2.13: the default
        known["broadcast_buffers"] = "True"
    return {"wrapper": wrapper} | known


def collect_reduction_settings(ddp: torch.nn.parallel.DistributedDataParallel) -> dict[str, str]:
    """Return what reduces its gradients, by name, if it is not a bucketing reducer.

    With ``torch._dynamo.config.optimize_ddp`` set to ``"python_reducer"``, torch's DDP reduces each gradient in a
    Python hook, and inductor may fuse these in a compiled backward
    (``torch._inductor.config._fuse_ddp_communication``).
    """
    return {"reduced_by": "python_reducer"} if is_reduced_in_python(ddp) else {}


def is_reduced_in_python(ddp: torch.nn.parallel.DistributedDataParallel) -> bool:
    """Return whether torch's Python reducer is used. Older torch (2.7) decides at the end of the constructor."""
    decided: bool | None = getattr(ddp, "_use_python_reducer", None)
    if decided is None:
        return bool(torch._dynamo.utils.get_optimize_ddp_mode() == "python_reducer")
    return decided


def collect_versions() -> dict[str, str]:
    """Return the versions that ranks must have in common, by name."""
    found = {"overlapscope": __version__, "torch": torch.__version__, "python": platform.python_version()}
    with suppress(Exception):  # a build without NCCL
        found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    return found


def collect_environment(variables: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return variables that configure communication and threads, without values that may be a path or a secret."""
    return {
        name: value
        for name, value in sorted(variables.items())
        if _COMPARED_VARIABLES.fullmatch(name) and not _HOST_SPECIFIC_OR_SECRET.search(name) and _PLAIN.fullmatch(value)
    }


def timeout_s(group: dist.ProcessGroup, device: torch.device) -> float | None:
    """Return the timeout of a group's backend, in seconds; None if unknown."""
    with suppress(Exception):
        return float(group._get_backend(device).options._timeout.total_seconds())
    return None


def _text(value: object) -> str:
    if is_dataclass(value):  # mixed precision
        given = {field.name: getattr(value, field.name) for field in fields(value)}
        return ", ".join(f"{name}={setting}" for name, setting in given.items())
    return str(value)
