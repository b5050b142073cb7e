"""Exposed communication: which bucket a rank waits for when its backward is over, and why that takes so long.

In *finalise* a rank waits for its buckets one after the other, in the order of their launch. So at each moment there is
one bucket that it waits for: the first that has not ended. That stretch is divided where the bucket is launched, where
the last rank arrives, and where the collectives before it leave it a lane.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Final

import numpy as np
import numpy.typing as npt
import pandas as pd

from overlapscope.account.arrivals import Matched
from overlapscope.account.intervals import Int64Array
from overlapscope.model.wire import lanes_of_backend
from overlapscope.trace.format import OPS
from overlapscope.trace.reader import Trace

REASONS: Final = ("launch", "later_rank", "behind", "transfer", "unknown")
"""Why a bucket has not ended. ``launch``: this rank has not launched it, or its device has not got there.
``later_rank``: another rank has not arrived. ``behind``: other collectives of the group are under way. ``transfer``: it
is under way. ``unknown``: which of the last three, as not all ranks left a log or their clocks can't be compared."""

NOBODY: Final = -1
LONG_AGO: Final = np.iinfo(np.int64).min


@dataclass(frozen=True, eq=False, kw_only=True)
class Starts:
    """What each row of ``trace.collectives`` has to wait for, N of them. Times are on the common clock."""

    own_ns: Int64Array
    """(N,) when this rank arrived."""
    last_ns: Int64Array
    """(N,) when the last rank arrived of which that is known; of a broadcast this rank or the one that sends."""
    last_rank: Int64Array
    """(N,) which one that is."""
    is_known: npt.NDArray[np.bool_]
    """(N,) whether that is the last of all ranks."""
    free_ns: Int64Array
    """(N,) when collectives of its group that were launched before it left it a lane; ``LONG_AGO`` if one was free."""
    freed_by: Int64Array
    """(N,) row of the one that did; ``NOBODY`` if one was free."""


def starts_of(trace: Trace, matched: Matched) -> Starts:
    """What collectives have to wait for.

    Args:
        matched: the collectives of all ranks.
    """
    table = trace.collectives
    own_ns = np.maximum(table["launch_ns"].to_numpy(np.int64), table["ready_ns"].fillna(0).to_numpy(np.int64))
    last_ns, last_rank = own_ns.copy(), table["rank"].to_numpy(np.int64).copy()
    is_known = np.zeros(len(table), dtype=bool)
    if len(matched.rows):
        arrival_ns = matched.arrival_ns
        # Buffers come from the lowest rank: nobody waits for another one.
        is_sent = (matched.op == OPS.index("broadcast"))[:, None]
        waits_for_sender = is_sent & (arrival_ns[:, :1] > arrival_ns)
        last_ns[matched.rows] = np.where(
            is_sent, np.maximum(arrival_ns, arrival_ns[:, :1]), arrival_ns.max(axis=1)[:, None]
        )
        last_rank[matched.rows] = np.where(
            is_sent,
            np.where(waits_for_sender, matched.ranks[0], matched.ranks),
            matched.ranks[arrival_ns.argmax(axis=1)][:, None],
        )
        is_known[matched.rows] = set(matched.ranks.tolist()) >= {*trace.expected_ranks, *trace.ranks["rank"].tolist()}
    free_ns, freed_by = _lanes_left(table, lanes_of_backend(str(trace.run.get("backend", ""))))
    return Starts(
        own_ns=own_ns, last_ns=last_ns, last_rank=last_rank, is_known=is_known, free_ns=free_ns, freed_by=freed_by
    )


@dataclass(frozen=True, eq=False, kw_only=True)
class Waits:
    """Stretches in which ranks wait for a bucket: W of them, by rank and time, those of a rank disjoint."""

    rank: Int64Array
    """(W,)"""
    start_ns: Int64Array
    """(W,) on the common clock."""
    end_ns: Int64Array
    """(W,)"""
    collective: Int64Array
    """(W,) row of what is waited for in ``trace.collectives``."""
    reason: npt.NDArray[np.int8]
    """(W,) place in ``REASONS``."""
    later_rank: Int64Array
    """(W,) who is waited for with the reason ``later_rank``; ``NOBODY`` with the others."""

    def of(self, which: npt.NDArray[np.bool_] | Int64Array) -> Waits:
        """Those that a mask (W,) or numbers select."""
        return Waits(**{field.name: getattr(self, field.name)[which] for field in fields(self)})


def waits_of(trace: Trace, starts: Starts) -> Waits:
    """Divide the time for which ranks wait for their buckets."""
    table, finalise = trace.collectives, trace.phases[trace.phases["phase"] == "finalise"]
    row, place = _in_finalise(table, finalise)
    from_ns, until_ns = (finalise[name].to_numpy(np.int64)[place] for name in ("start_ns", "end_ns"))
    ended_ns = np.clip(table["end_ns"].to_numpy(np.int64, na_value=LONG_AGO)[row], from_ns, until_ns) - from_ns
    latest_ns = _running_max(ended_ns, place)
    is_first = np.append(True, place[1:] != place[:-1])[: len(place)]
    edges_ns = np.empty((5, len(row)), dtype=np.int64)
    edges_ns[0], edges_ns[4] = from_ns + np.where(is_first, 0, np.roll(latest_ns, 1)), from_ns + latest_ns
    for number, moment_ns in enumerate((starts.own_ns, starts.last_ns, starts.free_ns), start=1):
        edges_ns[number] = np.clip(moment_ns[row], edges_ns[number - 1], edges_ns[4])
    reason = np.repeat(np.arange(4, dtype=np.int8)[:, None], len(row), axis=1)
    reason[2:, ~starts.is_known[row]] = REASONS.index("unknown")
    part, which = np.nonzero(edges_ns[1:] > edges_ns[:-1])
    collective, reason = row[which], reason[part, which]
    is_late = reason == REASONS.index("later_rank")
    return _disjoint(
        Waits(
            rank=table["rank"].to_numpy(np.int64)[collective],
            start_ns=edges_ns[part, which],
            end_ns=edges_ns[part + 1, which],
            collective=collective,
            reason=reason,
            later_rank=np.where(is_late, starts.last_rank[collective], NOBODY),
        )
    )


def _in_finalise(table: pd.DataFrame, finalise: pd.DataFrame) -> tuple[Int64Array, Int64Array]:
    """Rows of completed collectives of buckets, and the row of the finalise that waits for each, by both."""
    rows = np.flatnonzero((table["bucket"] >= 0) & table["end_ns"].notna())
    launch_ns = table["launch_ns"].to_numpy(np.int64)
    end_ns = finalise["end_ns"].to_numpy(np.int64)
    place = np.full(len(table), -1, dtype=np.int64)
    of_model = finalise.groupby(["rank", "model"], sort=False).indices
    for key, own in table.iloc[rows].groupby(["rank", "model"], sort=False).indices.items():
        if key not in of_model:
            continue
        candidates = np.sort(of_model[key])
        candidates = candidates[np.argsort(end_ns[candidates], kind="stable")]
        # It waits for what has been launched since the one before it.
        found = np.searchsorted(end_ns[candidates], launch_ns[rows[own]])
        is_found = found < len(candidates)
        place[rows[own[is_found]]] = candidates[found[is_found]]
    rows = rows[place[rows] >= 0]
    order = np.lexsort((rows, launch_ns[rows], place[rows]))
    return rows[order], place[rows[order]]


def _disjoint(waits: Waits) -> Waits:
    """By rank and time, and without overlaps: models that are reduced at the same time are waited for one by one."""
    order = np.lexsort((waits.end_ns, waits.start_ns, waits.rank))
    waits = waits.of(order)
    begin_ns = int(waits.start_ns.min()) if len(order) else 0
    done_ns = begin_ns + _running_max(waits.end_ns - begin_ns, waits.rank)
    is_first = np.append(True, waits.rank[1:] != waits.rank[:-1])[: len(order)]
    start_ns = np.maximum(waits.start_ns, np.where(is_first, waits.start_ns, np.roll(done_ns, 1)))
    waits = replace(waits, start_ns=start_ns)
    return waits.of(waits.end_ns > waits.start_ns)


def _running_max(values: Int64Array, groups: Int64Array) -> Int64Array:
    """The largest value so far in each run of equal groups; values from 0, groups ascending."""
    step = int(values.max(initial=0)) + 1
    number = np.cumsum(np.append(False, groups[1:] != groups[:-1])[: len(groups)])
    latest: Int64Array = np.maximum.accumulate(values + number * step) - number * step
    return latest


def _lanes_left(table: pd.DataFrame, lanes: int) -> tuple[Int64Array, Int64Array]:
    """(N,) with L lanes, when the L-th last to end of those before each does, and which row that is."""
    left_ns, left_by = np.full(len(table), LONG_AGO), np.full(len(table), NOBODY, dtype=np.int64)
    end_ns = table["end_ns"].to_numpy(np.int64, na_value=LONG_AGO)
    rank, group, launch_ns = (table[name].to_numpy(np.int64) for name in ("rank", "group", "launch_ns"))
    order = np.lexsort((launch_ns, group, rank))
    edges = np.flatnonzero((np.diff(rank[order]) != 0) | (np.diff(group[order]) != 0)) + 1
    for rows in np.split(order, edges):
        ends_ns = end_ns[rows]
        for _ in range(lanes):
            last_ns = np.maximum.accumulate(ends_ns)
            # Whatever is not the last is a candidate for the second last, and so on.
            ends_ns = np.append(LONG_AGO, np.minimum(ends_ns[1:], last_ns[:-1]))[: len(rows)]
        left_ns[rows[1:]] = last_ns[:-1]
        by_end = np.argsort(end_ns[rows], kind="stable")
        # The first of them to be launched with that end, and so one before it.
        left_by[rows[1:]] = rows[by_end[np.searchsorted(end_ns[rows][by_end], last_ns[:-1])]]
    return left_ns, np.where(left_ns == LONG_AGO, NOBODY, left_by)
