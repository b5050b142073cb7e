"""Unions of time intervals, for all groups of a table at once.

Sort the starts and the ends of a group, each on its own: between the i-th end and the (i+1)-th start nothing is
running exactly if that start is later, because then all i intervals that have begun are over. That needs two sorts at
most, no loop over groups, and no arithmetic that could overflow or round: results are exact nanoseconds.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Int64Array = npt.NDArray[np.int64]
Float64Array = npt.NDArray[np.float64]


class Intervals(NamedTuple):
    """Disjoint, non-empty, half-open intervals, sorted by group and within it by time; touching ones are joined."""

    groups: npt.NDArray[Any]
    starts_ns: Int64Array
    ends_ns: Int64Array


def union(groups: npt.NDArray[Any], starts_ns: npt.NDArray[Any], ends_ns: npt.NDArray[Any]) -> Intervals:
    """The union of the intervals of each group.

    Args:
        groups: number of the group of each interval, from 0; those of 8 bits are sorted much quicker.
        starts_ns: in any order.
        ends_ns: an interval that does not end after its start is empty.
    """
    starts_ns, ends_ns = (np.asarray(edge, dtype=np.int64) for edge in (starts_ns, ends_ns))
    filled = ends_ns > starts_ns
    groups, starts_ns, ends_ns = groups[filled], starts_ns[filled], ends_ns[filled]
    by_start = order_of(starts_ns, groups)
    groups, starts_ns, ends_ns = groups[by_start], starts_ns[by_start], ends_ns[by_start]
    ends_ns = ends_ns[order_of(ends_ns, groups)]
    is_gap = (groups[1:] != groups[:-1]) | (starts_ns[1:] > ends_ns[:-1])
    edge = np.ones(min(1, len(groups)), dtype=bool)
    first, last = np.concatenate([edge, is_gap]), np.concatenate([is_gap, edge])
    return Intervals(groups[first], starts_ns[first], ends_ns[last])


def joined(spans_ns: Int64Array) -> Int64Array:
    """The union (2, m) of spans (2, n) of one group."""
    _, starts_ns, ends_ns = union(np.zeros(spans_ns.shape[1], dtype=np.int8), *spans_ns)
    return np.stack([starts_ns, ends_ns])


def order_of(values: npt.NDArray[Any], groups: npt.NDArray[Any]) -> Int64Array | slice:
    """What puts values (n,) in order group by group; of a recording, they are nearly always in order already."""
    ascends = (groups[1:] > groups[:-1]) | ((groups[1:] == groups[:-1]) & (values[1:] >= values[:-1]))
    return slice(None) if ascends.all() else np.lexsort((values, groups))
