"""Unions of time intervals, for all groups of a table at once.

Sort the starts and the ends of a group separately: between the i-th end and the (i+1)-th start nothing is running
exactly if that start is later, because then all i intervals that have begun are over. That takes at most two sorts, no
loop over groups, and no arithmetic that could overflow or round: results are exact nanoseconds.

Example: of the intervals 0 to 4, 2 to 6 and 8 to 9, the starts are 0, 2, 8 and the ends 4, 6, 9. Start 2 is not later
than end 4, but start 8 is later than end 6, so the union is 0 to 6 and 8 to 9.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import pandas as pd

Int64Array = npt.NDArray[np.int64]
Float64Array = npt.NDArray[np.float64]


class Intervals(NamedTuple):
    """Disjoint, non-empty, half-open intervals, sorted by group and then by time; touching ones are joined."""

    groups: npt.NDArray[Any]
    starts_ns: Int64Array
    ends_ns: Int64Array


def merge_intervals(groups: npt.NDArray[Any], starts_ns: npt.NDArray[Any], ends_ns: npt.NDArray[Any]) -> Intervals:
    """Compute the union of the intervals of each group.

    Args:
        groups: Number of the group of each interval, from 0; arrays of 8 bits are sorted much faster.
        starts_ns: Starts, in any order.
        ends_ns: Ends; an interval that does not end after its start is empty.
    """
    starts_ns, ends_ns = (np.asarray(edge, dtype=np.int64) for edge in (starts_ns, ends_ns))
    filled = ends_ns > starts_ns
    groups, starts_ns, ends_ns = groups[filled], starts_ns[filled], ends_ns[filled]
    by_start = sort_order(starts_ns, groups)
    groups, starts_ns, ends_ns = groups[by_start], starts_ns[by_start], ends_ns[by_start]
    ends_ns = ends_ns[sort_order(ends_ns, groups)]
    is_gap = (groups[1:] != groups[:-1]) | (starts_ns[1:] > ends_ns[:-1])
    edge = np.ones(min(1, len(groups)), dtype=bool)
    first, last = np.concatenate([edge, is_gap]), np.concatenate([is_gap, edge])
    return Intervals(groups[first], starts_ns[first], ends_ns[last])


def merge_spans(spans_ns: Int64Array) -> Int64Array:
    """Compute the union (2, m) of spans (2, n) of one group."""
    _, starts_ns, ends_ns = merge_intervals(np.zeros(spans_ns.shape[1], dtype=np.int8), *spans_ns)
    return np.stack([starts_ns, ends_ns])


def sort_order(values: npt.NDArray[Any], groups: npt.NDArray[Any]) -> Int64Array | slice:
    """Return the index that sorts values (n,) group by group; in a recording they nearly always are sorted already."""
    ascends = (groups[1:] > groups[:-1]) | ((groups[1:] == groups[:-1]) & (values[1:] >= values[:-1]))
    return slice(None) if ascends.all() else np.lexsort((values, groups))


# Rows and spans of a table by rank, looked up without scanning those of other ranks.

Rows = Int64Array | slice
"""Ascending row numbers, to index columns with."""

_NONE: Final = slice(0, 0)


class RowsByRank:
    """The rows of a table by rank.

    Example: ranks [0, 0, 1, 0] give rows [0, 1, 3] for rank 0 and [2] for rank 1.

    Args:
        rank: (N,) Rank of each row, in any order. If ranks ascend, as in a recording, rows are slices, which copy
            nothing.
    """

    def __init__(self, rank: npt.ArrayLike) -> None:
        rank = np.asarray(rank, dtype=np.int64)
        order = None if (rank[1:] >= rank[:-1]).all() else np.argsort(rank, kind="stable")
        rank = rank if order is None else rank[order]
        edges = [0, *(np.flatnonzero(rank[1:] != rank[:-1]) + 1).tolist(), len(rank)] if len(rank) else []
        self._rows: dict[int, Rows] = {
            int(rank[begin]): slice(begin, end) if order is None else order[begin:end] for begin, end in pairwise(edges)
        }

    @property
    def ranks(self) -> list[int]:
        """Return the ranks that have a row, ascending."""
        return list(self._rows)

    def __getitem__(self, rank: int) -> Rows:
        """Return the rows of a rank; empty if it has none."""
        return self._rows.get(rank, _NONE)


class SpansByRank:
    """Spans of all ranks, by rank.

    Args:
        rank: (N,) Rank of each span, in any order.
        start_ns: (N,)
        end_ns: (N,)
    """

    def __init__(self, rank: Int64Array, start_ns: Int64Array, end_ns: Int64Array) -> None:
        self.rows = RowsByRank(rank)
        self._start_ns, self._end_ns = start_ns, end_ns

    @classmethod
    def of(cls, table: pd.DataFrame, start: str = "start_ns") -> SpansByRank:
        """Create from the spans of a table, all of which have ended."""
        return cls(*(table[name].to_numpy(np.int64) for name in ("rank", start, "end_ns")))

    def __getitem__(self, rank: int) -> Int64Array:
        """Return the starts and ends of the spans of a rank (2, n)."""
        rows = self.rows[rank]
        return np.stack([self._start_ns[rows], self._end_ns[rows]])


# Cutting of spans at step boundaries.


class StepParts(NamedTuple):
    """The parts of spans that lie within steps, P of them."""

    which: Int64Array
    """(P,) Index of the span, ascending."""
    row: Int64Array
    """(P,) Row of the step."""
    edges_ns: Int64Array
    """(2, P) Start and end of each part."""


class StepsByRank:
    """The steps of all ranks, G of them; those of one rank are disjoint.

    Args:
        rank: (G,) in any order.
        start_ns: (G,)
        end_ns: (G,)
    """

    def __init__(self, rank: Int64Array, start_ns: Int64Array, end_ns: Int64Array) -> None:
        self._row = np.arange(len(rank))[sort_order(start_ns, rank)]
        self._edges_ns, self._rows_of = np.stack([start_ns, end_ns])[:, self._row], RowsByRank(rank[self._row])

    def of_rank(self, rank: int) -> tuple[Int64Array, Int64Array]:
        """Return the rows (n,) of the steps of a rank by time, and their starts and ends (2, n)."""
        own = self._rows_of[rank]
        return self._row[own], self._edges_ns[:, own]

    def cut(self, rank: int, spans_ns: Int64Array) -> StepParts:
        """Cut spans (2, n) of one rank at step boundaries.

        Example: with steps from 0 to 10 and from 10 to 20, a span from 5 to 25 has two parts, from 5 to 10 and from 10
        to 20.
        """
        row, steps_ns = self.of_rank(rank)
        first = np.searchsorted(steps_ns[1], spans_ns[0], side="right")
        count = np.maximum(0, np.searchsorted(steps_ns[0], spans_ns[1], side="left") - first)
        which = np.repeat(np.arange(len(count)), count)
        position = first[which] + np.arange(len(which)) - np.repeat(np.cumsum(count) - count, count)
        from_ns = np.maximum(spans_ns[0, which], steps_ns[0, position])
        until_ns = np.minimum(spans_ns[1, which], steps_ns[1, position])
        return StepParts(which, row[position], np.stack([from_ns, until_ns]))
