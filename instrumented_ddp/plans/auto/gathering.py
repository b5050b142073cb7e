"""Gathering of bucket cycles from all ranks, which exchange nothing but these numbers; no clocks."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import AllgatherOptions  # type: ignore[attr-defined]

from instrumented_ddp.collective_log.completion import NO_TIMEOUT
from overlapscope.model.bucket_cycles import BucketCycles
from overlapscope.model.partition import Int64Array

MAX_RANKS: Final = 8
"""Maximum number of ranks considered. Of more ranks the slowest are used."""


def gather_cycles(own: BucketCycles, group: dist.ProcessGroup, device: torch.device) -> tuple[BucketCycles, Int64Array]:
    """Gather the same cycles of all ranks, or of the slowest ones. Called on all ranks.

    Args:
        own: cycles of this rank, of the same shape on all ranks.
        device: device on which the group communicates.

    Returns:
        Cycles of R ranks, on every rank, with its own steps and epochs; and the (R,) ranks.
    """
    lateness = torch.tensor([np.nan_to_num(np.median(own.backward_end_ns[0]))], device=device)
    everyones = [torch.empty_like(lateness) for _ in range(group.size())]
    group.allgather([everyones], [lateness], AllgatherOptions()).wait(NO_TIMEOUT)
    latest_first = torch.cat(everyones).argsort(descending=True, stable=True)
    ranks = np.sort(latest_first[:MAX_RANKS].cpu().numpy())
    parts = (own.moments_ns, own.ready_ns, own.buckets_ns)
    flat = np.concatenate([part.ravel() for part in parts])
    sum_of_one = torch.zeros((len(ranks), len(flat)), dtype=torch.float64, device=device)
    if group.rank() in ranks:
        sum_of_one[int(np.searchsorted(ranks, group.rank()))] = torch.from_numpy(flat)
    group.allreduce([sum_of_one], dist.AllreduceOptions()).wait(NO_TIMEOUT)
    columns = np.split(sum_of_one.cpu().numpy(), np.cumsum([part.size for part in parts])[:-1], axis=1)
    moments, ready, buckets = (
        column.reshape(len(ranks), *part.shape[1:]) for column, part in zip(columns, parts, strict=True)
    )
    return replace(own, moments_ns=moments, ready_ns=ready, buckets_ns=buckets), ranks
