"""JSON files next to the event log: ``run.json``, ``rank.json`` and ``plans.jsonl``."""

from __future__ import annotations

import os
import socket
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from instrumented_ddp.bucket_plan import BucketPlan, dtype_name
from instrumented_ddp.collective_log.backends import get_backend_name
from instrumented_ddp.recording.settings import collect_environment, collect_versions, timeout_s
from overlapscope.trace import host
from overlapscope.trace.checksum import dump_json_line
from overlapscope.trace.format import FORMAT_VERSION, PLANS_FILE
from overlapscope.trace.host import host_now_ns


def describe_run(group: dist.ProcessGroup, device: torch.device, detail: str) -> dict[str, Any]:
    """Return the content of ``run.json``, without models."""
    return {
        "format_version": FORMAT_VERSION,
        "world_size": dist.get_world_size() if dist.is_initialized() else group.size(),
        "ranks": dist.get_process_group_ranks(group) if dist.is_initialized() else list(range(group.size())),
        "backend": get_backend_name(group, device),
        "detail": detail,
        "argv": sys.argv,
        "started_unix_ns": time.time_ns(),
        "timeout_s": timeout_s(group, device),
        "versions": collect_versions(),
        "environment": collect_environment(),
        "models": [],
    }


def get_global_rank(group: dist.ProcessGroup) -> int:
    """Return the rank in the whole job, or in the group if there is no default process group."""
    return dist.get_rank() if dist.is_initialized() else group.rank()


def describe_rank(rank: int, device: torch.device) -> dict[str, Any]:
    """Return the content of ``rank.json``; ranks with one boot id share a clock, samples tie it to the wall clock."""
    return {
        "rank": rank,
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "device": str(device),
        "boot_id": host.get_boot_id(),
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
