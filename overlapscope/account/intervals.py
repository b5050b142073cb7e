"""Unions of time intervals, for all groups of a table at once.

Sort the starts and the ends of a group separately: between the i-th end and the (i+1)-th start nothing is running
exactly if that start is later, because then all i intervals that have begun are over. That takes at most two sorts, no
loop over groups, and no arithmetic that could overflow or round: results are exact nanoseconds.

Example: of the intervals 0 to 4, 2 to 6 and 8 to 9, the starts are 0, 2, 8 and the ends 4, 6, 9. Start 2 is not later
than end 4, but start 8 is later than end 6, so the union is 0 to 6 and 8 to 9.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

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
