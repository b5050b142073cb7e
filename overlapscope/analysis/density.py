"""Index of the spans of a timeline lane for any zoom: the spans in view and, if they are too many, busy time per pixel.

A lane keeps its spans sorted by start, and their union with a running total of its length. The time that a lane was
busy before some moment is then one binary search in that total, and the busy time of a pixel is the difference at its
two edges: exact to the nanosecond, for any number of spans, and for all pixels of a lane at once.

Spans of one lane may overlap (gloo runs two all-reduces at a time). They are stacked in rows, so that each of them is
visible, and count once in the busy time.

Example: the spans 0 to 4 and 6 to 10 have the running total [0, 4, 8]. For the pixel edges 0, 5, 10 the lane was busy
for 0, 4 and 8 ns before, so both pixels are busy for 4 ns.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from overlapscope.account.intervals import Int64Array, merge_intervals

NO_CATEGORY = 255
"""Category of a pixel in which nothing happens."""


@dataclass(frozen=True, eq=False, kw_only=True)
class SpanIndex:
    """Searchable spans of one lane, made by ``index_spans``. Times are nanoseconds; a span of length 0 is an instant.

    Arrays are shared where they are equal: a lane without overlaps holds its starts and ends only once.
    """

    starts_ns: Int64Array
    """Starts of the spans, ascending."""
    ends_ns: Int64Array
    """Ends of the same spans."""
    categories: npt.NDArray[np.uint8]
    rows: npt.NDArray[np.int32]
    """Row of each span in the caller's table."""
    stack: npt.NDArray[np.uint16]
    """Row of the lane that each span is drawn on, from 0; spans of one row do not overlap."""
    stack_heights: npt.NDArray[np.uint16]
    """Number of rows in use in the interval of busy time that each span is part of."""
    sorted_ends_ns: Int64Array
    """Ends of all spans, ascending."""
    reach_ns: Int64Array
    """Running maximum of ``ends_ns``."""
    busy_starts_ns: Int64Array
    """Starts of the intervals of the union."""
    busy_ends_ns: Int64Array
    """Ends of the intervals of the union."""
    busy_before_ns: Int64Array
    """Length of the union before each of its intervals, followed by its total length."""

    def __len__(self) -> int:
        return len(self.starts_ns)

    def count(self, from_ns: int, to_ns: int) -> int:
        """Count the spans that touch the view, from ``from_ns`` to before ``to_ns``."""
        begun = np.searchsorted(self.starts_ns, to_ns, side="left")
        over = np.searchsorted(self.sorted_ends_ns, from_ns, side="left")
        return max(0, int(begun - over))

    def in_view(self, from_ns: int, to_ns: int) -> npt.NDArray[np.int64]:
        """Return the positions of the spans that ``count`` counts, by start."""
        first = int(np.searchsorted(self.reach_ns, from_ns, side="left"))
        last = int(np.searchsorted(self.starts_ns, to_ns, side="left"))
        return first + np.flatnonzero(self.ends_ns[first:last] >= from_ns)

    def begun(self, edges_ns: Int64Array) -> Int64Array:
        """Count the spans that begin between each edge and the next."""
        return np.diff(np.searchsorted(self.starts_ns, edges_ns, side="left"))

    def pixels(self, edges_ns: Int64Array) -> tuple[Int64Array, npt.NDArray[np.uint8]]:
        """Return the busy time between each edge and the next, and the category of one of the spans there.

        The time is exact. The category is a sample, taken half way through the busy time of the pixel: with many short
        spans in a pixel no single color is right.
        """
        if not len(self):
            nothing = np.zeros(len(edges_ns) - 1, dtype=np.int64)
            return nothing, np.full(len(nothing), NO_CATEGORY, dtype=np.uint8)
        until_ns = self._busy_until_ns(edges_ns)
        busy_ns = np.diff(until_ns)
        is_busy = busy_ns > 0
        half_ns = until_ns[:-1][is_busy] + busy_ns[is_busy] // 2
        interval = np.searchsorted(self.busy_before_ns, half_ns, side="right") - 1
        # A pixel in which nothing runs may still hold an instant: the last one that begins in it.
        moment_ns = edges_ns[1:] - 1
        moment_ns[is_busy] = self.busy_starts_ns[interval] + half_ns - self.busy_before_ns[interval]
        span = np.searchsorted(self.starts_ns, moment_ns, side="right") - 1
        sampled = self.categories[np.maximum(span, 0)]
        begins_before = (span < 0) | (self.starts_ns[np.maximum(span, 0)] < edges_ns[:-1])
        sampled[~is_busy & begins_before] = NO_CATEGORY
        return busy_ns, sampled

    def _busy_until_ns(self, times_ns: Int64Array) -> Int64Array:
        interval = np.searchsorted(self.busy_starts_ns, times_ns, side="right")
        busy_ns = self.busy_before_ns[interval]
        inside = interval > 0
        busy_ns[inside] -= np.maximum(0, self.busy_ends_ns[interval[inside] - 1] - times_ns[inside])
        return busy_ns


def index_spans(
    starts_ns: npt.NDArray[Any], ends_ns: npt.NDArray[Any], categories: npt.NDArray[Any], rows: npt.NDArray[Any]
) -> SpanIndex:
    """Prepare the spans of one lane for searching.

    Args:
        starts_ns: Starts, in any order.
        ends_ns: Ends; an end before its start counts as equal to it.
        categories: What the color of each span stands for, below ``NO_CATEGORY``.
        rows: The caller's number for each span.
    """
    starts_ns = np.asarray(starts_ns, dtype=np.int64)
    ends_ns = np.maximum(np.asarray(ends_ns, dtype=np.int64), starts_ns)
    categories, rows = np.asarray(categories, dtype=np.uint8), np.asarray(rows, dtype=np.int32)
    if np.any(starts_ns[1:] < starts_ns[:-1]):
        order = np.argsort(starts_ns, kind="stable")
        starts_ns, ends_ns, categories, rows = starts_ns[order], ends_ns[order], categories[order], rows[order]

    if np.any(starts_ns[1:] < ends_ns[:-1]):
        reach_ns, sorted_ends_ns = np.maximum.accumulate(ends_ns), np.sort(ends_ns)
        stack = _stack(starts_ns, ends_ns)
        _, busy_starts_ns, busy_ends_ns = merge_intervals(np.zeros(len(starts_ns), dtype=np.int64), starts_ns, ends_ns)
        busy_interval = np.maximum(np.searchsorted(busy_starts_ns, starts_ns, side="right") - 1, 0)
        heights = np.zeros(max(1, len(busy_starts_ns)), dtype=np.uint16)
        np.maximum.at(heights, busy_interval, stack + np.uint16(1))
        stack_heights = heights[busy_interval]
    else:
        reach_ns = sorted_ends_ns = busy_ends_ns = ends_ns
        busy_starts_ns = starts_ns
        # Views of one number, not arrays with one number per span.
        stack = np.broadcast_to(np.uint16(0), starts_ns.shape)
        stack_heights = np.broadcast_to(np.uint16(1), starts_ns.shape)
    busy_before_ns = np.zeros(len(busy_starts_ns) + 1, dtype=np.int64)
    np.cumsum(busy_ends_ns - busy_starts_ns, out=busy_before_ns[1:])
    return SpanIndex(
        starts_ns=starts_ns,
        ends_ns=ends_ns,
        categories=categories,
        rows=rows,
        stack=stack,
        stack_heights=stack_heights,
        sorted_ends_ns=sorted_ends_ns,
        reach_ns=reach_ns,
        busy_starts_ns=busy_starts_ns,
        busy_ends_ns=busy_ends_ns,
        busy_before_ns=busy_before_ns,
    )


def pixel_edges(from_ns: int, to_ns: int, pixels: int) -> Int64Array:
    """Return the edges of pixels that cover a view, on a grid that stays fixed while the view is dragged.

    Pixels have equal whole nanoseconds and edges at multiples of these, so that the same pixels come back at every
    position of the view and an image of them does not shimmer.

    Example: 10 pixels for the view from 105 to 205 ns are 10 ns each, with edges 100, 110, ..., 210.

    Args:
        pixels: Approximate number; the view is covered by at least this many unless it has fewer nanoseconds.
    """
    pixel_ns = max(1, (to_ns - from_ns) // max(1, pixels))
    first, last = from_ns // pixel_ns, -(-to_ns // pixel_ns)
    return np.arange(first, max(last, first + 1) + 1, dtype=np.int64) * pixel_ns


def _stack(starts_ns: Int64Array, ends_ns: Int64Array) -> npt.NDArray[np.uint16]:
    """Put each span on the lowest row that is free when it starts.

    Example: the spans 0 to 5, 2 to 4 and 4 to 6 get the rows 0, 1 and 1.
    """
    stack = np.zeros(len(starts_ns), dtype=np.uint16)
    running: list[tuple[int, int]] = []
    free: list[int] = []
    height = 0
    for position, (start_ns, end_ns) in enumerate(zip(starts_ns.tolist(), ends_ns.tolist(), strict=True)):
        while running and running[0][0] <= start_ns:
            heapq.heappush(free, heapq.heappop(running)[1])
        if free:
            row = heapq.heappop(free)
        else:
            row, height = height, height + 1
        stack[position] = row
        heapq.heappush(running, (end_ns, row))
    return stack
