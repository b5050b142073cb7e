"""JSON files next to the event log, ``run.json``, ``rank.json`` and ``plans.jsonl``, and the folder that holds them."""

from __future__ import annotations

import os
import platform
import re
import socket
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import fields, is_dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist

from instrumented_ddp import native
from instrumented_ddp.bucket_plan import BucketPlan, dtype_name
from instrumented_ddp.collectives.backends import get_backend_name
from overlapscope import __version__
from overlapscope.diagnosis.process_state import is_on_this_host, parse_written_ns, read_liveness, read_process_start_ns
from overlapscope.trace import clocks
from overlapscope.trace.clocks import host_now_ns
from overlapscope.trace.environment import read_recording_options
from overlapscope.trace.folders import attempt_number, find_latest_attempt, restart_folder
from overlapscope.trace.json_files import dump_json_line, read_json
from overlapscope.trace.schema import (
    ENDED_FILE,
    EVENTS_FILE,
    FORMAT_VERSION,
    JOINING_FILE,
    PLANS_FILE,
    RANK_FILE,
    SIGNATURES_FILE,
    rank_folder,
)

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


def find_attempt_folder(first: Path, rank: int) -> Path:
    """Return the folder of the attempt that this process belongs to: the given one, or one inside it.

    Launchers restart all ranks when one has failed, and set no variable that identifies the attempt on every host. But
    the processes of one attempt exist at the same time: a process whose rank was already taken by another process, or
    that began after some rank had ended, belongs to a new attempt.

    Args:
        first: folder of the run. If the script itself named it, it holds restarts of torchrun and nothing else: running
            such a script a second time is an error because the folder is in use.
        rank: rank of this process.

    Raises:
        OverlapScopeError: a variable has an invalid value.
    """
    recorded = read_recording_options(None)
    if _restarts() == 0 and (recorded is None or recorded.folder != first.absolute()):
        return first
    return _choose_attempt_folder(first.absolute(), rank, os.getpid())


@lru_cache(maxsize=8)
def _choose_attempt_folder(first: Path, rank: int, _pid: int) -> Path:
    """Choose the folder once per process, as the process would find its own files the next time."""
    latest = find_latest_attempt(first)
    if not has_attempt_ended(latest, rank, read_process_start_ns()):
        return latest
    # Use torchrun's count if it is higher: attempts that ended before any rank started have left no files.
    return restart_folder(first, max(attempt_number(latest) + 1, _restarts()))


def _restarts() -> int:
    """Return how often torchrun has restarted the ranks of this host."""
    count = os.environ.get("TORCHELASTIC_RESTART_COUNT", "")
    return int(count) if count.isdecimal() else 0


def has_attempt_ended(attempt: Path, rank: int, since_ns: int | None) -> bool:
    """Return whether an attempt ended before a process of a rank began; False while any of its processes is alive.

    Args:
        attempt: folder of the attempt.
        rank: rank of the process.
        since_ns: time at which the process began; None if not known.
    """
    found = {folder.name: _read_process(folder) for folder in attempt.glob("rank_*")}
    before = {name: where for name, where in found.items() if where is not None}
    if any(is_on_this_host(where) and read_liveness(where) != "gone" for where in before.values()):
        return False
    if rank_folder(attempt, rank).name in before:
        return True
    ends_ns = [_last_alive_ns(attempt / name, where) for name, where in before.items() if is_on_this_host(where)]
    return since_ns is not None and any(end_ns is not None and end_ns < since_ns for end_ns in ends_ns)


def _read_process(folder: Path) -> dict[str, Any] | None:
    """Return what a rank recorded about its process, empty if unreadable; None if no process has been this rank."""
    for name in (RANK_FILE, JOINING_FILE):
        if (folder / name).exists():
            return read_json(folder / name, [])
    return {} if (folder / EVENTS_FILE).exists() or (folder / SIGNATURES_FILE).exists() else None


def _last_alive_ns(folder: Path, where: dict[str, Any]) -> int | None:
    """Return the last time at which a process that is gone was known to be alive."""
    ended = read_json(folder / ENDED_FILE, []) if (folder / ENDED_FILE).exists() else {}
    return max((ns for ns in (parse_written_ns(where), parse_written_ns(ended)) if ns is not None), default=None)


def describe_run(group: dist.ProcessGroup, device: torch.device, detail: str) -> dict[str, Any]:
    """Return the content of ``run.json``, without models."""
    return {
        "format_version": FORMAT_VERSION,
        "world_size": dist.get_world_size() if dist.is_initialized() else group.size(),
        "ranks": dist.get_process_group_ranks(group) if dist.is_initialized() else list(range(group.size())),
        "backend": get_backend_name(group, device),
        "detail": detail,
        "recorder": describe_recorder(),
        "argv": sys.argv,
        "started_unix_ns": time.time_ns(),
        "timeout_s": timeout_s(group, device),
        "versions": collect_versions(),
        "environment": collect_environment(),
        "models": [],
    }


def describe_recorder() -> dict[str, str]:
    """Return the language that the recorder runs in, and why it is not C."""
    return {"language": "C"} if native.IS_NATIVE else {"language": "Python", "why": native.WHY_PYTHON}


def get_global_rank(group: dist.ProcessGroup) -> int:
    """Return the rank in the whole job, or in the group if there is no default process group."""
    return dist.get_rank() if dist.is_initialized() else group.rank()


def describe_rank(rank: int, device: torch.device) -> dict[str, Any]:
    """Return the content of ``rank.json``; ranks with one boot id share a clock, samples tie it to the wall clock."""
    return {
        "rank": rank,
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "is_launched": "TORCHELASTIC_RUN_ID" in os.environ,
        "device": str(device),
        "boot_id": clocks.get_boot_id(),
        "clock_samples": [{"monotonic_ns": host_now_ns(), "unix_ns": time.time_ns()}],
    }


def is_plain(value: object) -> bool:
    """Return whether a value can be stored in a recording as it is."""
    if isinstance(value, list | tuple):
        return all(is_plain(item) for item in value)
    return value is None or isinstance(value, bool | int | float | str)


def append_plan(folder: Path, *, model: int, epoch: int, plan: BucketPlan, reason: str) -> None:
    """Append a line to ``plans.jsonl``.

    Args:
        epoch: plan number of this model, from 0.
        reason: why it was made, as in ``Reducer.adopt``.
    """
    line = {
        "model": model,
        "epoch": epoch,
        "hash": plan.hash,
        "reason": reason,
        "buckets": [_describe_bucket(plan, bucket) for bucket in plan.buckets],
    }
    with (folder / PLANS_FILE).open("a", encoding="utf-8") as file:
        file.write(dump_json_line(line))


def _describe_bucket(plan: BucketPlan, bucket: tuple[int, ...]) -> dict[str, Any]:
    parameters = [(index, plan.parameters[index]) for index in bucket]
    _, first = parameters[0]
    return {
        "dtype": dtype_name(first.dtype),
        "device": str(first.device),
        "bytes": sum(parameter.bytes for _, parameter in parameters),
        "parameters": [
            {
                "index": index,
                "name": parameter.name,
                "shape": list(parameter.shape),
                "elements": parameter.elements,
                "bytes": parameter.bytes,
            }
            for index, parameter in parameters
        ],
    }
