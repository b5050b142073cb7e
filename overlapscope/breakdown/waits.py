"""Exposed communication: which bucket a rank waits for when its backward is over, and for which reason.

In *finalize* a rank waits for its buckets one after the other, in the order of their launch. So at each moment it waits
for exactly one bucket: the first that has not ended. Where updates are deferred to the next forward there are several
finalizes, each of which waits for the buckets that it hands over. The wait for a bucket is divided where this rank
launches the bucket, where the last rank arrives, and where earlier collectives leave it a lane.

Example: finalize begins at 100 ns. Bucket 0 ends at 130 and bucket 1 at 150, so the rank waits for bucket 0 from 100 to
130 and for bucket 1 from 130 to 150. This rank launched bucket 1 at 90, the last rank arrived at 135, and the
collectives before it left it a lane at 140. The reasons for bucket 1 are then ``straggler`` from 130 to 135,
``queued`` from 135 to 140 and ``transfer`` from 140 to 150.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt
import pandas as pd

from overlapscope.breakdown.arrivals import MatchedCollectives
from overlapscope.breakdown.spans import Int64Array, RowsByRank
from overlapscope.trace.collective_arrival import compute_arrival_ns
from overlapscope.trace.recording import Trace
from overlapscope.trace.schema import OPS, count_lanes

REASONS: Final = ("launch_delay", "straggler", "queued", "transfer", "unattributed")
"""Why a bucket has not ended. ``launch_delay``: this rank has not launched it, or its device has not got there.
``straggler``: another rank has not arrived. ``queued``: it is queued behind other collectives of the group.
``transfer``: it is in progress. ``unattributed``: one of the last three, but not all ranks left a log or their clocks
can't be compared."""

NOBODY: Final = -1
"""Rank or row number that stands for none."""
LONG_AGO: Final = np.iinfo(np.int64).min
"""Time that stands for "before the recording"."""


@dataclass(frozen=True, eq=False, kw_only=True)
class StartConditions:
    """Preconditions of each of the N rows of ``trace.collectives``: what has to happen before it begins.

    Times are on the common clock.
    """

    local_arrival_ns: Int64Array
    """(N,) When this rank arrived."""
    last_ns: Int64Array
    """(N,) When the last rank with a known arrival arrived; for a broadcast, the later of this rank and the sender."""
    last_rank: Int64Array
    """(N,) Which rank that is."""
    is_known: npt.NDArray[np.bool_]
    """(N,) True if the arrivals of all ranks are known."""
    free_ns: Int64Array
    """(N,) When earlier collectives of its group left it a lane; ``LONG_AGO`` if a lane was free."""
    freed_by_row: Int64Array
    """(N,) Row of the collective that left the lane; ``NOBODY`` if a lane was free."""


def find_start_conditions(trace: Trace, matched: MatchedCollectives) -> StartConditions:
    """Find what each collective has to wait for before it begins.

    Args:
        matched: Collectives matched across all ranks.
    """
    table = trace.collectives
    local_arrival_ns = compute_arrival_ns(table)
    last_ns, last_rank = local_arrival_ns.copy(), table["rank"].to_numpy(np.int64).copy()
    is_known = np.zeros(len(table), dtype=bool)
    if len(matched.rows):
        arrival_ns = matched.arrival_ns
        # Buffers come from the lowest rank, so ranks wait for no other one.
        is_sent = (matched.op == OPS.index("broadcast"))[:, None]
        waits_for_sender = is_sent & (arrival_ns[:, :1] > arrival_ns)
        all_last_ns, all_last = matched.find_last()
        last_ns[matched.rows] = np.where(is_sent, np.maximum(arrival_ns, arrival_ns[:, :1]), all_last_ns)
        last_rank[matched.rows] = np.where(
            is_sent,
            np.where(waits_for_sender, matched.ranks[0], matched.ranks),
            matched.ranks[all_last],
        )
        is_known[matched.rows] = set(matched.ranks.tolist()) >= {*trace.expected_ranks, *trace.ranks["rank"].tolist()}
    free_ns, freed_by_row = _find_free_lanes(table, count_lanes(str(trace.run.get("backend", ""))))
    return StartConditions(
        local_arrival_ns=local_arrival_ns,
        last_ns=last_ns,
        last_rank=last_rank,
        is_known=is_known,
        free_ns=free_ns,
        freed_by_row=freed_by_row,
    )


@dataclass(frozen=True, eq=False, kw_only=True)
class Waits:
    """Spans in which ranks wait for a bucket: W of them, by rank and time; those of one rank are disjoint."""

    rank: Int64Array
    """(W,) Rank that waits."""
    start_ns: Int64Array
    """(W,) Start, on the common clock."""
    end_ns: Int64Array
    """(W,) End, on the common clock."""
    collective: Int64Array
    """(W,) Row in ``trace.collectives`` of the collective that is waited for."""
    reason: npt.NDArray[np.int8]
    """(W,) Index in ``REASONS``."""
    straggler: Int64Array
    """(W,) Rank that is waited for if the reason is ``straggler``; ``NOBODY`` with other reasons."""

    def of(self, which: npt.NDArray[np.bool_] | Int64Array) -> Waits:
        """Return the waits that a mask (W,) or indices select."""
        return Waits(**{field.name: getattr(self, field.name)[which] for field in fields(self)})


def compute_waits(trace: Trace, starts: StartConditions) -> Waits:
    """Compute the spans for which ranks wait for their buckets, divided by reason."""
    table, phases = trace.collectives, trace.phases
    reduced = np.flatnonzero((table["bucket"] >= 0) & table["end_ns"].notna())
    finalize = np.flatnonzero(phases["phase"] == "finalize")
    buckets = _Spans(*(table[name].to_numpy(np.int64, na_value=0) for name in ("launch_ns", "end_ns")))
    hand_over_ns = _find_hand_over_ns(trace)
    every_phase = _Spans(*(phases[name].to_numpy(np.int64) for name in ("start_ns", "end_ns")))
    reduced_of = RowsByRank(table["rank"].to_numpy(np.int64)[reduced])
    finalize_of = RowsByRank(phases["rank"].to_numpy(np.int64)[finalize])
    found = [_no_waits()]
    # Rank by rank, so that the arrays of one fit into processor caches.
    for rank in reduced_of.ranks:
        rows, waiting = reduced[reduced_of[rank]], every_phase.of(finalize[finalize_of[rank]])
        finalize_index = _find_finalize(buckets.end_ns[rows], hand_over_ns[rows], waiting)
        order = np.lexsort((buckets.start_ns[rows], finalize_index))
        order = order[finalize_index[order] >= 0]
        row, finalize_index = rows[order], finalize_index[order]
        edges_ns = _find_reason_edges(row, finalize_index, buckets.end_ns[row], waiting.of(finalize_index), starts)
        found.append(_remove_overlaps(_split_by_reason(rank, row, edges_ns, starts)))
    columns = {field.name: [getattr(each, field.name) for each in found] for field in fields(Waits)}
    return Waits(**{name: np.concatenate(parts) for name, parts in columns.items()})


class _Spans(NamedTuple):
    """Collectives or phases, each (n,)."""

    start_ns: Int64Array
    """Start; for a collective, its launch."""
    end_ns: Int64Array

    def of(self, rows: Int64Array) -> _Spans:
        return _Spans(*(column[rows] for column in self))


def _find_hand_over_ns(trace: Trace) -> Int64Array:
    """Return when the result of each collective (N,) was copied to the parameters, else when the rank entered it.

    Gathered parameters are not copied anywhere: ranks wait for them until they have ended.
    """
    table, copies = trace.collectives, trace.copies[trace.copies["direction"] == "out"]
    moment_ns = compute_arrival_ns(table)
    gathered = ((table["op"] == "all_gather") & table["end_ns"].notna()).to_numpy(dtype=bool)
    moment_ns[gathered] = table["end_ns"].to_numpy(np.int64, na_value=0)[gathered]
    if copies.empty:  # gradients are views of the buckets
        return moment_ns
    columns = [
        np.concatenate([table[name].to_numpy(np.int64), copies[name].to_numpy(np.int64)])
        for name in ("bucket", "model", "rank")
    ]
    time_ns = np.concatenate([moment_ns, copies["end_ns"].to_numpy(np.int64)])
    order = np.lexsort((time_ns, *columns))
    is_copy = order >= len(table)
    is_next = ~is_copy[:-1] & is_copy[1:]
    for column in columns:
        is_next &= column[order[:-1]] == column[order[1:]]
    moment_ns[order[:-1][is_next]] = time_ns[order[1:][is_next]]
    return moment_ns


def _find_finalize(end_ns: Int64Array, hand_over_ns: Int64Array, finalize: _Spans) -> Int64Array:
    """Return the index of the finalize that waits for each completed bucket (B,) of a rank; -1 if none does.

    It is the finalize that hands the bucket over or, without copies, the first that ends after the rank entered the
    collective, of whichever model, as phases don't record theirs. If finalizes follow each other without a gap, as
    those of several models do, it is the one in which the collective ends.

    Example: finalizes from 100 to 130, from 130 to 160 and from 300 to 320. A bucket entered at 120 that ends at 125
    belongs to the first (0). One entered at 120 that ends at 150 belongs to the second (1), which follows at once. One
    entered at 200 that ends at 310 belongs to the third (2).
    """
    by_end = np.argsort(finalize.end_ns, kind="stable")
    starts_ns, ends_ns = finalize.start_ns[by_end], finalize.end_ns[by_end]
    number = np.arange(len(by_end))
    is_adjacent = np.append(starts_ns[1:] == ends_ns[:-1], False)[: len(by_end)]
    last = np.minimum.accumulate(np.where(is_adjacent, len(by_end), number)[::-1])[::-1]
    first = np.searchsorted(ends_ns, hand_over_ns)
    found = np.maximum(first, np.searchsorted(ends_ns, end_ns))
    return np.append(by_end, -1)[np.minimum(found, np.append(last, len(by_end))[first])]


def _find_reason_edges(
    row: Int64Array, finalize_index: Int64Array, end_ns: Int64Array, finalize: _Spans, starts: StartConditions
) -> Int64Array:
    """Return when a rank begins to wait for each bucket, and when each of the first four ``REASONS`` is over (5, B).

    Args:
        row: (B,) Rows of the buckets, in the order in which they are waited for.
        finalize_index: (B,) Index of the finalize that waits for each.
        end_ns: (B,) Ends of the buckets.
        finalize: (B,) The finalize that waits for each.
    """
    from_ns = finalize.start_ns
    latest_ns = _running_max(np.clip(end_ns, from_ns, finalize.end_ns) - from_ns, finalize_index)
    is_first = np.append(True, finalize_index[1:] != finalize_index[:-1])[: len(finalize_index)]
    edges_ns = np.empty((5, len(row)), dtype=np.int64)
    edges_ns[0], edges_ns[4] = from_ns + np.where(is_first, 0, np.roll(latest_ns, 1)), from_ns + latest_ns
    for number, moment_ns in enumerate((starts.local_arrival_ns, starts.last_ns, starts.free_ns), start=1):
        edges_ns[number] = np.clip(moment_ns[row], edges_ns[number - 1], edges_ns[4])
    return edges_ns


def _split_by_reason(rank: int, row: Int64Array, edges_ns: Int64Array, starts: StartConditions) -> Waits:
    """Return the non-empty waits of a rank between the edges (5, B)."""
    reason = np.repeat(np.arange(4, dtype=np.int8)[:, None], len(row), axis=1)
    reason[2:, ~starts.is_known[row]] = REASONS.index("unattributed")
    part, which = np.nonzero(edges_ns[1:] > edges_ns[:-1])
    collective, reason = row[which], reason[part, which]
    is_late = reason == REASONS.index("straggler")
    return Waits(
        rank=np.full(len(which), rank, dtype=np.int64),
        start_ns=edges_ns[part, which],
        end_ns=edges_ns[part + 1, which],
        collective=collective,
        reason=reason,
        straggler=np.where(is_late, starts.last_rank[collective], NOBODY),
    )


def _no_waits() -> Waits:
    nothing = np.zeros(0, dtype=np.int64)
    return Waits(
        rank=nothing,
        start_ns=nothing,
        end_ns=nothing,
        collective=nothing,
        reason=nothing.astype(np.int8),
        straggler=nothing,
    )


def _remove_overlaps(waits: Waits) -> Waits:
    """Return the waits of one rank by time and without overlaps.

    Models that are reduced at the same time are waited for one by one.
    """
    waits = waits.of(np.lexsort((waits.end_ns, waits.start_ns)))
    done_ns = np.maximum.accumulate(waits.end_ns)
    start_ns = waits.start_ns.copy()
    start_ns[1:] = np.maximum(start_ns[1:], done_ns[:-1])
    waits = replace(waits, start_ns=start_ns)
    return waits.of(waits.end_ns > waits.start_ns)


def _running_max(values: Int64Array, groups: Int64Array) -> Int64Array:
    """Return the running maximum in each run of equal groups; values are 0 or more, groups ascend.

    Example: values [3, 1, 2] of groups [0, 0, 1] give [3, 3, 2].
    """
    step = int(values.max(initial=0)) + 1
    number = np.cumsum(np.append(False, groups[1:] != groups[:-1])[: len(groups)])
    latest: Int64Array = np.maximum.accumulate(values + number * step) - number * step
    return latest


def _find_free_lanes(table: pd.DataFrame, lanes: int) -> tuple[Int64Array, Int64Array]:
    """Return when a lane becomes free for each collective (N,), and the row that frees it.

    With L lanes that is when the L-th last to end of the earlier collectives of its rank and group ends.
    """
    left_ns, left_by = np.full(len(table), LONG_AGO), np.full(len(table), NOBODY, dtype=np.int64)
    end_ns = table["end_ns"].to_numpy(np.int64, na_value=LONG_AGO)
    rank, group, launch_ns = (table[name].to_numpy(np.int64) for name in ("rank", "group", "launch_ns"))
    number, rows_of = np.arange(len(table)), RowsByRank(rank)
    for one in rows_of.ranks:
        own = rows_of[one]
        order = number[own][np.lexsort((launch_ns[own], group[own]))]
        for rows in np.split(order, np.flatnonzero(np.diff(group[order])) + 1):
            last_ns, last_by = _running_kth_largest(lanes - 1, end_ns[rows])
            left_ns[rows[1:]], left_by[rows[1:]] = last_ns[:-1], rows[last_by[:-1]]
    return left_ns, np.where(left_ns == LONG_AGO, NOBODY, left_by)


def _running_kth_largest(others: int, end_ns: Int64Array) -> tuple[Int64Array, Int64Array]:
    """Return the running (others + 1)-th largest end (n,), ``LONG_AGO`` if there is none, and its first index.

    Example: with ``others`` = 1 and ends [30, 10, 20], the second largest so far is [``LONG_AGO``, 10, 20].
    """
    by = np.arange(len(end_ns))
    for turn in range(others + 1):
        last_ns = np.maximum.accumulate(end_ns)
        is_later = np.append(True, end_ns[1:] > last_ns[:-1])[: len(end_ns)]
        last_by = by[np.maximum.accumulate(np.where(is_later, np.arange(len(end_ns)), 0))]
        if turn < others:
            # Whatever is not the largest is a candidate for the second largest, and so on.
            is_passed = end_ns[1:] >= last_ns[:-1]
            end_ns = np.append(LONG_AGO, np.where(is_passed, last_ns[:-1], end_ns[1:]))
            by = np.append(0, np.where(is_passed, last_by[:-1], by[1:]))
    return last_ns, last_by
