"""Durations of collectives for torch.compile: a profile that Inductor's overlap scheduling estimates with.

Inductor (``torch._inductor.fx_passes.profile_guided_estimation``, torch 2.13) reads a trace of torch.profiler and takes
the durations of its kernels, which include the wait for the last rank. Here they are those of the transfer alone, from
all ranks: from the last arrival, or the end of the collective queued before, to the end.

Groups that do the same at the same time, as those of a mesh's dimension, have one duration: ranks that estimated
differently would order their collectives differently, and hang.

Example: a kernel runs from 10 to 50 on rank 0, and the last rank arrives at 30: 20 are written, not 40.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import pandas as pd

from overlapscope.analysis import Analysis
from overlapscope.breakdown.arrivals import MatchedCollectives
from overlapscope.errors import OverlapScopeError
from overlapscope.trace.schema import OPS

_NAMES: Final = {
    "all_reduce": "allreduce",
    "all_gather": "_allgather_base",
    "reduce_scatter": "_reduce_scatter_base",
}
"""Names of operations in a profile."""
_DTYPES: Final = {
    "float32": "Float",
    "float64": "Double",
    "float16": "Half",
    "bfloat16": "BFloat16",
    "int64": "Long",
    "int32": "Int",
    "int8": "Char",
    "uint8": "Byte",
}
"""Names of element types in a profile."""


@dataclass(frozen=True, kw_only=True)
class TransferTime:
    """How long all collectives of one kind took after the last rank had arrived."""

    op: str
    dtype: str
    elements: int
    """Number of elements of the whole buffer: of what is gathered, or is reduced and scattered."""
    transfer_ns: float
    """Median of all steps and ranks."""
    count: int
    groups: tuple[tuple[int, ...], ...]
    """Ranks of each group in which they are."""

    @property
    def members(self) -> int:
        """Return the number of ranks that take part in each."""
        return len(self.groups[0])


def compute_transfer_times(analysis: Analysis) -> list[TransferTime]:
    """Compute how long each kind of collective takes without waiting: of DDP's buckets and FSDP2's parameter groups.

    Raises:
        OverlapScopeError: the arrivals of all ranks are not known, or the collectives are of several process groups.
    """
    trace, breakdown = analysis.trace, analysis.breakdown
    matched, starts = breakdown.matched, breakdown.starts
    ops = np.array(OPS)[matched.op]
    steady = analysis.summary.steady.steps
    is_wanted = (matched.bucket >= 0) & np.isin(ops, list(_NAMES))
    is_wanted &= np.isin(matched.step, steady) if len(steady) else True
    rows = matched.rows[is_wanted]
    if len(matched.ranks) < 2 or not len(rows) or not starts.is_known[rows].all():
        raise OverlapScopeError(
            f"{trace.path}: it is not known when all ranks arrived at collectives of gradients; record all ranks, with "
            "clocks that can be compared"
        )
    table = trace.collectives
    groups = {op: _list_groups(matched, op) for op in np.unique(ops[is_wanted]).tolist()}
    is_of_all = np.isin(ops[is_wanted], [op for op, found in groups.items() if len(found) == 1])
    if is_of_all.any() and np.ptp(table["group"].to_numpy()[rows[is_of_all]]):
        raise OverlapScopeError(f"{trace.path}: has collectives of several process groups, whose ranks it does not say")
    begin_ns = np.maximum(starts.last_ns, starts.free_ns)[rows]
    first = table.iloc[rows[:, 0]]
    found = pd.DataFrame(
        {
            "op": ops[is_wanted],
            "dtype": first["dtype"].astype(str).to_numpy(),
            "elements": first["elements"].to_numpy(),
            "transfer_ns": np.median(np.maximum(matched.end_ns[is_wanted] - begin_ns, 1), axis=1),
        }
    )
    found = found[found["dtype"].isin(list(_DTYPES)) & (found["elements"] > 0)]
    return [
        TransferTime(
            op=str(op),
            dtype=str(dtype),
            elements=int(str(elements)),
            transfer_ns=float(own["transfer_ns"].median()),
            count=len(own),
            groups=groups[str(op)],
        )
        for (op, dtype, elements), own in found.groupby(["op", "dtype", "elements"])
    ]


def _list_groups(matched: MatchedCollectives, op: str) -> tuple[tuple[int, ...], ...]:
    number_of = matched.groups.get(OPS.index(op), np.zeros(len(matched.ranks), dtype=np.int64))
    return tuple(tuple(matched.ranks[number_of == number].tolist()) for number in np.unique(number_of))


def build_inductor_profile(analysis: Analysis) -> dict[str, Any]:
    """Build a trace with one kernel for each kind of collective.

    Raises:
        OverlapScopeError: durations without waits are not known.
    """
    times, ranks = compute_transfer_times(analysis), analysis.breakdown.matched.ranks.tolist()
    if not times:
        raise OverlapScopeError(f"{analysis.trace.path}: the sizes of its collectives are not known")
    names = {group: str(number) for number, group in enumerate(dict.fromkeys(g for one in times for g in one.groups))}
    configs = [
        {"pg_name": name, "pg_desc": "default_pg", "pg_size": len(group), "ranks": list(group)}
        for group, name in names.items()
    ]
    events = [_make_event(one, group, name) for one in times for group, name in names.items() if group in one.groups]
    return {
        "schemaVersion": 1,
        "distributedInfo": {
            "rank": ranks[0],
            "world_size": len(ranks),
            "pg_count": len(configs),
            "pg_config": configs,
        },
        "traceEvents": [event | {"ts": number} for number, event in enumerate(events)],
    }


def _make_event(one: TransferTime, group: tuple[int, ...], group_name: str) -> dict[str, Any]:
    shard = one.elements // one.members
    arguments = {
        "Collective name": _NAMES[one.op],
        "In msg nelems": shard if one.op == "all_gather" else one.elements,
        "Out msg nelems": shard if one.op == "reduce_scatter" else one.elements,
        "dtype": _DTYPES[one.dtype],
        "Group size": one.members,
        "Process Group Name": group_name,
        "Process Group Ranks": str(list(group)),
        "Observations": one.count,
    }
    name = f"{one.op} without waits"
    kernel = {"ph": "X", "cat": "kernel", "name": name, "pid": 0, "tid": 0, "dur": one.transfer_ns / 1e3}
    return kernel | {"args": arguments}
