"""The script's own collectives by process group and operation: how long they take, and who comes to them last.

Of groups beside that of DDP, such as those of tensor, pipeline and expert parallelism, the collective logs of the ranks
say what each rank has launched, when, and when it ended. The n-th collective of a group is the same one on all of its
ranks.

Example: ranks 0 and 1 arrive at an all-reduce at 10 and 30 ns, and both leave at 50 ns: it takes 40 and 20 ns, 20 of
which rank 0 waits for rank 1.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import pandas as pd

from overlapscope.breakdown.spans import Int64Array
from overlapscope.errors import OverlapScopeError
from overlapscope.trace.collective_log import AWAITED, FAILED, Entries, ProcessGroup, Signature
from overlapscope.trace.collective_log_reader import CollectiveLogFile, CollectiveLogs, open_collective_logs
from overlapscope.trace.communication import ENDS_TOGETHER, GroupCommunication, OwnCommunication
from overlapscope.trace.description import BY_HAND, describe_strategies
from overlapscope.trace.folders import find_rank_folders
from overlapscope.trace.json_files import read_lines
from overlapscope.trace.recording import Trace
from overlapscope.trace.schema import CREATED_GROUPS_FILE, NO_BUCKET, SIGNATURES_FILE

_JOIN: Final = "join"
_OWN_ROLES: Final = ("user", _JOIN)
_LOOKED_AT: Final = 32
"""Number of ranks about that are looked at to see whether the script has collectives at all."""
_MOST_ENTRIES: Final = 2_000_000
"""Maximum number of entries of all logs of a group that are read; of more, the latest."""
_WARM_UP_STEPS: Final = 3
_CLEAR_NS: Final = 10_000
"""By how much the last rank comes after the one before it to be called the last, beside the error of clocks."""
_DEFAULT: Final = "default_pg"
"""Description that torch gives the default group."""
_HOST_BACKENDS: Final = ("gloo", "mpi")
"""Backends whose collectives end where the host sees it. Those of devices end at times that only profiles have."""


def find_own_communication(trace: Trace, steps: Int64Array) -> OwnCommunication | None:
    """Summarize the script's own collectives; None if there are none.

    Args:
        trace: a recording.
        steps: steps that means are taken over. Without any, all that the logs have, or if the job had no steps either,
            everything.
    """
    try:
        folders = find_rank_folders(trace.path)
    except OverlapScopeError:  # on remote storage there are tables only
        return None
    some = [*folders][:: 1 + len(folders) // _LOOKED_AT]
    if not any({*read_lines(folders[rank] / SIGNATURES_FILE, [], _find_role)} & {*_OWN_ROLES} for rank in some):
        return None
    logs = open_collective_logs(folders)
    read = [one for group, files in logs.groups.items() if (one := _read_group(trace, logs, group, files)) is not None]
    if not read:
        return None
    counted = steps if len(steps) else _find_steps(read)
    titles = _name_groups([one.group for one in read], folders)
    table = pd.concat(
        [_compare_ranks(one, counted, trace).assign(title=titles[one.group]) for one in read], ignore_index=True
    )
    if table.empty:
        return None
    by_title: dict[str, list[ProcessGroup]] = {}
    for group, title in titles.items():
        by_title.setdefault(title, []).append(group)
    return OwnCommunication(
        steps=len(counted),
        ranks=int(table["rank"].nunique()),
        groups=_summarize(table, by_title),
        has_other_groups=any(not one.has_buckets and one.group.description != _DEFAULT for one in read),
    )


@dataclass(frozen=True, kw_only=True, eq=False)
class _ReadGroup:
    """The script's own collectives in one group."""

    group: ProcessGroup
    has_buckets: bool
    """True if it is a group of DDP's, or of ``fully_shard``."""
    is_on_host: bool
    """True if it is known when they ended."""
    entries: pd.DataFrame
    """Columns: rank, number, op, is_join, bytes, step, arrival_ns, end_ns, is_awaited; times of each rank's clock."""
    first_steps: Mapping[int, int]
    """By rank, the first step of which no entry has been overwritten."""


def _read_group(
    trace: Trace, logs: CollectiveLogs, group: ProcessGroup, files: Mapping[int, CollectiveLogFile]
) -> _ReadGroup | None:
    """Return the script's own collectives in a group that have ended; None if there are none."""
    most, by_hand = max(1, _MOST_ENTRIES // len(files)), _list_buckets_by_hand(trace)
    parts, first_steps, has_buckets = [], {}, False
    for rank, file in files.items():
        first = max(file.oldest, file.latest - most + 1)
        entries = file.read(first, file.latest)
        first_steps[rank] = int(entries["step"][0]) + 1 if first > 1 and len(entries) else 0
        numbers = set(np.unique(entries["signature"]).tolist())
        known = {number: one for number, one in logs.signatures(rank).items() if number in numbers}
        has_buckets |= any(one.bucket != NO_BUCKET for one in known.values())
        own = [number for number, one in known.items() if one.role in _OWN_ROLES and (one.op, one.bytes) not in by_hand]
        parts.append(_tabulate(rank, entries[np.isin(entries["signature"], own)], known))
    table = pd.concat(parts, ignore_index=True)
    if table.empty:
        return None
    is_on_host = group.backend in _HOST_BACKENDS or bool(table["is_awaited"].any())
    return _ReadGroup(
        group=group, has_buckets=has_buckets, is_on_host=is_on_host, entries=table, first_steps=first_steps
    )


def _list_buckets_by_hand(trace: Trace) -> set[tuple[str, int]]:
    """Return operation and size of the collectives that are the buckets of a loop that reduces gradients by hand."""
    if describe_strategies(trace.run) != BY_HAND:
        return set()
    kinds = trace.collectives[["op", "bytes"]].drop_duplicates()
    return set(zip(kinds["op"].astype(str).tolist(), kinds["bytes"].tolist(), strict=True))


def _tabulate(rank: int, entries: Entries, signatures: Mapping[int, Signature]) -> pd.DataFrame:
    entries = entries[(entries["completed_ns"] > 0) & ((entries["flags"] & FAILED) == 0)]
    of_entry = [signatures[number] for number in entries["signature"].tolist()]
    return pd.DataFrame(
        {
            "rank": rank,
            "number": entries["number"].astype(np.int64),
            "op": [one.op for one in of_entry],
            "is_join": [one.role == _JOIN for one in of_entry],
            "bytes": np.array([one.bytes for one in of_entry], dtype=np.int64),
            "step": entries["step"].astype(np.int64),
            "arrival_ns": entries["announced_ns"].astype(np.int64),
            "end_ns": entries["completed_ns"].astype(np.int64),
            "is_awaited": (entries["flags"] & AWAITED) != 0,
        }
    )


def _find_steps(read: Sequence[_ReadGroup]) -> Int64Array:
    """Return the steps of a job whose logs only have their numbers, without the first and the last, which may be cut.

    A job that never updates has none.
    """
    steps = np.unique(np.concatenate([one.entries["step"].to_numpy() for one in read]))
    return steps[_WARM_UP_STEPS:-1]


def _compare_ranks(one: _ReadGroup, steps: Int64Array, trace: Trace) -> pd.DataFrame:
    """Return the collectives of some steps: how long each took, and for how long its rank waited for the last one.

    Returns:
        rank, op, is_join, share (one over the number of steps of the rank that are counted), bytes, time_ns,
        awaited_ns, wait_ns, last_rank (-1 if none was clearly the last); NaN where it is unknown.
    """
    table = one.entries
    share = {rank: 1 / max(1, int((steps >= first).sum())) for rank, first in one.first_steps.items()}
    first_step = table["rank"].map(one.first_steps)
    if len(steps):
        table = table[table["step"].isin(steps) & (table["step"] >= first_step)]
    table = table.sort_values(["number", "rank"], ignore_index=True)
    time_ns = (table["end_ns"] - table["arrival_ns"]) * (1.0 if one.is_on_host else np.nan)
    table = table.assign(
        share=table["rank"].map(share),
        time_ns=time_ns,
        awaited_ns=time_ns.where(table["is_awaited"]),
        wait_ns=np.nan,
        last_rank=-1,
    )
    members = len(one.group.ranks)
    is_compared = table["op"].isin(ENDS_TOGETHER) & (table.groupby("number")["rank"].transform("size") == members)
    if members < 2 or one.group.is_point_to_point or not one.is_on_host or not is_compared.any():
        return table
    rows = np.flatnonzero(is_compared).reshape(-1, members)
    came_ns = table["arrival_ns"].to_numpy()[rows]
    if not _share_clock(trace, one.group.ranks):  # all leave together
        came_ns = -table["time_ns"].to_numpy()[rows]
    in_order_ns = np.sort(came_ns, axis=1)
    is_clear = in_order_ns[:, -1] - in_order_ns[:, -2] > _CLEAR_NS
    ranks = table["rank"].to_numpy()[rows]
    last = np.where(is_clear, ranks[np.arange(len(rows)), came_ns.argmax(axis=1)], -1)
    table.loc[rows.ravel(), "wait_ns"] = (in_order_ns[:, -1:] - came_ns).ravel().astype(np.float64)
    table.loc[rows.ravel(), "last_rank"] = np.repeat(last, members)
    return table


def _share_clock(trace: Trace, ranks: Sequence[int]) -> bool:
    boots = trace.ranks.loc[trace.ranks["rank"].isin(ranks), "boot"]
    return len(boots) == len(ranks) and boots.nunique(dropna=False) == 1 and bool(boots.notna().all())


def _summarize(table: pd.DataFrame, groups: Mapping[str, Sequence[ProcessGroup]]) -> tuple[GroupCommunication, ...]:
    """Return means of ranks by title of the group and operation, those that take longest first; of join() apart."""
    found = []
    for (title, op, is_join), own in table.groupby(["title", "op", "is_join"], sort=False):
        sums = own[["bytes", "time_ns", "awaited_ns", "wait_ns"]].mul(own["share"], axis=0).assign(count=own["share"])
        mean = sums.groupby(own["rank"]).sum().mean()
        is_known = own[["time_ns", "wait_ns"]].notna().all()
        of = own.loc[own["wait_ns"].notna(), "rank"].value_counts()
        last = Counter(own.loc[own["rank"] == own["last_rank"], "rank"].tolist())
        found.append(
            GroupCommunication(
                group=str(title),
                op=str(op),
                is_bucket=False,
                is_join=bool(is_join),
                ranks=own["rank"].nunique(),
                count=float(mean["count"]),
                bytes=float(mean["bytes"]),
                time_ns=float(mean["time_ns"]) if is_known["time_ns"] else None,
                exposed_ns=float(mean["awaited_ns"]) if own["is_awaited"].any() else None,
                wait_ns=float(mean["wait_ns"]) if is_known["wait_ns"] else None,
                last_ranks={str(rank): (count, int(of[rank])) for rank, count in last.most_common()},
                groups=len({one.name for one in groups[str(title)]}),
                members=max(len(one.ranks) for one in groups[str(title)]),
            )
        )
    return tuple(sorted(found, key=lambda one: -(one.time_ns or 0.0)))


def _name_groups(groups: Sequence[ProcessGroup], folders: Mapping[int, Path]) -> dict[ProcessGroup, str]:
    """Return a title for each group: its description, or the line that has made it. Groups of one kind share theirs.

    Example: ``[dist.new_group([2 * i, 2 * i + 1]) for i in range(2)]`` makes two groups, of ``train.py:12``.
    """
    titles = {}
    for group in groups:
        title = replace(group, is_point_to_point=False).title
        if group.description == _DEFAULT:
            title = "default group"
        elif group.description in ("", "undefined"):
            lines = read_lines(folders[min(folders.keys() & set(group.ranks))] / CREATED_GROUPS_FILE, [], _find_line)
            title = next((line for name, line in lines if name == group.name and line), f"group {group.name}")
        titles[group] = title
    return titles


def _find_role(signature: Any) -> list[str]:
    return [str(signature["role"])]


def _find_line(made: Any) -> list[tuple[str, str]]:
    site = made["call_site"]
    return [(str(made["name"]), "" if site is None else f"{Path(site['file']).name}:{site['line']}")]
