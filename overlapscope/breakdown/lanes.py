"""Lanes of a timeline: the phases, gradients, buckets and communication of each rank.

Every span has a category, which its color stands for: a phase by its name, everything that concerns a bucket by the
bucket. There are more buckets than colors that people can tell apart, so buckets cycle through ``BUCKET_SLOTS`` colors,
and those of one color cycle through ``PATTERNS`` patterns.

Example: with 8 slots and 4 patterns, bucket 19 has the color of slot 3 and pattern 2.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final, overload

import numpy as np
import numpy.typing as npt
import pandas as pd

from overlapscope.breakdown.spans import Int64Array, merge_intervals
from overlapscope.breakdown.steady_steps import find_steps_without_end
from overlapscope.trace.recording import Trace
from overlapscope.trace.tables import PHASE_NAMES

# Index of the spans of a timeline lane for any zoom: the spans in view and, if they are too many, busy time per
# pixel.
#
# A lane keeps its spans sorted by start, and their union with a running total of its length. The time that a lane was
# busy before some moment is then one binary search in that total, and the busy time of a pixel is the difference at
# its two edges: exact to the nanosecond, for any number of spans, and for all pixels of a lane at once.
#
# Spans of one lane may overlap (gloo runs two all-reduces at a time). They are stacked in rows, so that each of them
# is visible, and count once in the busy time.
#
# Example: the spans 0 to 4 and 6 to 10 have the running total [0, 4, 8]. For the pixel edges 0, 5, 10 the lane was
# busy for 0, 4 and 8 ns before, so both pixels are busy for 4 ns.

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


BUCKET_SLOTS: Final = 8
"""Number of colors for buckets."""
CATEGORIES: Final = (*PHASE_NAMES, *(f"bucket_{slot}" for slot in range(BUCKET_SLOTS)), "no_bucket", "exposed")
"""Names of the categories by number: phases, slots of buckets, what belongs to no bucket, and exposed communication. A
number that is larger by a multiple of their count has the same color and another pattern."""

PATTERNS: Final = 4
"""Number of patterns, the first of which is plain."""

LANE_NAMES: Final = ("phases", "gradients", "buckets", "communication")
"""The lanes of each rank, from top to bottom."""

_FIRST_SLOT: Final = len(PHASE_NAMES)
_NO_BUCKET: Final = CATEGORIES.index("no_bucket")


@dataclass(frozen=True, eq=False, kw_only=True)
class Lane:
    """One lane of one rank on the timeline.

    ``spans.rows`` are row indices in the table that the lane is made of: ``trace.phases``, ``trace.gradients``,
    ``trace.collectives``; in the lane of buckets, waits for launch are rows of ``trace.collectives``, and copies are
    rows of ``trace.copies``, counted on from these.
    """

    rank: int
    name: str
    """One of ``LANE_NAMES``."""
    spans: SpanIndex
    collectives: int = 0
    """Number of rows of ``trace.collectives``."""

    def is_wait(self, rows: npt.NDArray[np.int32]) -> npt.NDArray[np.bool_]:
        """Return which rows are waits of a ready bucket for its launch, in which nothing is done."""
        return (rows < self.collectives) & (self.name == "buckets")

    @property
    def is_instants(self) -> bool:
        """Return True if the lane holds instants instead of spans of time."""
        return self.name == "gradients"


class LaneSequence(Sequence[Lane]):
    """Lanes of some ranks, each built when it is first asked for.

    Args:
        ranks: the ranks from top to bottom.
        lane_of: returns the lane of a rank by its name.
    """

    def __init__(self, ranks: Sequence[int], lane_of: Callable[[int, str], Lane]) -> None:
        self._ranks, self._lane_of = ranks, lane_of

    def __len__(self) -> int:
        return len(self._ranks) * len(LANE_NAMES)

    @overload
    def __getitem__(self, number: int) -> Lane: ...
    @overload
    def __getitem__(self, number: slice) -> list[Lane]: ...
    def __getitem__(self, number: int | slice) -> Lane | list[Lane]:
        if isinstance(number, slice):
            return [self[each] for each in range(len(self))[number]]
        position, index = divmod(range(len(self))[number], len(LANE_NAMES))
        return self._lane_of(self._ranks[position], LANE_NAMES[index])


@dataclass(frozen=True, eq=False, kw_only=True)
class Timeline:
    """Lanes of some ranks of a recording. Times are nanoseconds from ``begin_ns`` of the common clock."""

    ranks: tuple[int, ...]
    """The ranks from top to bottom."""
    lanes: Sequence[Lane]
    """Lanes from top to bottom: rank by rank, and for each rank in the order of ``LANE_NAMES``."""
    begin_ns: int
    """The earliest moment recorded: time 0 of the timeline, on the trace's clock."""
    length_ns: int
    """Length of the timeline."""
    steps: pd.DataFrame
    """step, start_ns, end_ns: from the start on the first rank to the end on the last one, or of the recording."""
    step_starts: Callable[[int], pd.DataFrame]
    """Return step, start_ns and is_finished of a rank's steps."""
    unfinished_of: Callable[[int], pd.DataFrame]
    """Return row, start_ns, end_ns and bucket of a rank's collectives that were launched and never seen to complete.
    ``end_ns`` is how long that is known: the end of the step, or of the recording if the step has none."""


class LaneCache:
    """The lanes of a recording, each built on first access and cached.

    A thousand ranks have millions of rows: each table is split by rank once, and not searched again for every lane.
    """

    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        self._begin_ns, self._end_ns = _extent_ns(trace)
        self._rows = {
            name: _rows_by_rank(getattr(trace, name), trace.ranks["rank"].to_numpy(dtype=np.int64))
            for name in ("steps", "phases", "gradients", "copies", "collectives")
        }
        steps = (
            _select_aligned(trace, trace.steps)
            .groupby("step", as_index=False)
            .agg(start_ns=("start_ns", "min"), end_ns=("end_ns", "max"))
        )
        steps[["start_ns", "end_ns"]] -= self._begin_ns
        self._bounds_of_steps = steps.sort_values("start_ns", ignore_index=True)
        self._lanes: dict[tuple[int, str], Lane] = {}
        self._starts: dict[int, pd.DataFrame] = {}

    def timeline(self, ranks: Sequence[int], *, is_over: bool = False) -> Timeline:
        """Return the timeline of some ranks; its steps and its length are those of all ranks.

        Args:
            ranks: Ranks from top to bottom.
            is_over: True to include steps that no rank finished, as none will.
        """
        return Timeline(
            ranks=tuple(ranks),
            lanes=LaneSequence(tuple(ranks), self._lane_of),
            begin_ns=self._begin_ns,
            length_ns=max(1, self._end_ns - self._begin_ns),
            steps=self._bounds_of_begun_steps if is_over else self._bounds_of_steps,
            step_starts=self._step_starts,
            unfinished_of=self._unfinished_of,
        )

    @cached_property
    def _bounds_of_begun_steps(self) -> pd.DataFrame:
        phases = _select_aligned(self._trace, self._trace.phases)
        without_end = phases[phases["step"].isin(find_steps_without_end(self._trace))]
        begun = without_end.groupby("step", as_index=False).agg(start_ns=("start_ns", "min"))
        begun = begun.assign(start_ns=begun["start_ns"] - self._begin_ns, end_ns=self._end_ns - self._begin_ns)
        return pd.concat([self._bounds_of_steps, begun], ignore_index=True)

    def _lane_of(self, rank: int, name: str) -> Lane:
        if (rank, name) not in self._lanes:
            spans = self._index(rank, name)
            self._lanes[rank, name] = Lane(rank=rank, name=name, spans=spans, collectives=len(self._trace.collectives))
        return self._lanes[rank, name]

    def _index(self, rank: int, name: str) -> SpanIndex:
        trace, begin_ns = self._trace, self._begin_ns
        if name == "phases":
            return _phases(trace.phases, self._rows["phases"][rank], begin_ns)
        if name == "gradients":
            return _gradients(trace, self._rows["gradients"][rank], begin_ns)
        rows = self._rows["collectives"][rank]
        if name == "communication":
            return _communication(self._collectives, rows)
        return _buckets(self._collectives, rows, trace.copies, self._rows["copies"][rank], begin_ns)

    @cached_property
    def _collectives(self) -> _OpenCollectives:
        return _add_open_ends(self._trace, self._begin_ns, self._end_ns)

    def _unfinished_of(self, rank: int) -> pd.DataFrame:
        found, rows = self._collectives, self._rows["collectives"][rank]
        rows = rows[found.is_unfinished[rows]]
        times = {"start_ns": found.from_ns[rows], "end_ns": found.to_ns[rows]}
        return pd.DataFrame({"row": rows, **times, "bucket": found.bucket[rows]})

    def _step_starts(self, rank: int) -> pd.DataFrame:
        if rank not in self._starts:
            columns = []
            for table, name in ((self._trace.steps, "steps"), (self._trace.phases, "phases")):
                columns += [table[column].to_numpy()[self._rows[name][rank]] for column in ("step", "start_ns")]
            steps, starts_ns, phases_of, phase_starts_ns = columns
            is_begun = ~np.isin(phases_of, steps)
            begun, first = np.unique(phases_of[is_begun], return_index=True)
            found = pd.DataFrame(
                {
                    "step": np.concatenate([steps, begun]),
                    "start_ns": np.concatenate([starts_ns, phase_starts_ns[is_begun][first]]) - self._begin_ns,
                    "is_finished": np.arange(len(steps) + len(begun)) < len(steps),
                }
            )
            self._starts[rank] = found.sort_values("start_ns", ignore_index=True)
        return self._starts[rank]


def bucket_categories(buckets: npt.NDArray[Any]) -> npt.NDArray[np.uint8]:
    """Return the category of each bucket number, which includes its pattern; negative numbers stand for no bucket."""
    pattern = buckets // BUCKET_SLOTS % PATTERNS
    categories = _FIRST_SLOT + buckets % BUCKET_SLOTS + pattern * len(CATEGORIES)
    return np.where(buckets < 0, _NO_BUCKET, categories).astype(np.uint8)


def colors_and_patterns(categories: npt.NDArray[np.uint8]) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint8]]:
    """Return the index in ``CATEGORIES`` of the color of each category, and the number of its pattern."""
    pattern, color = np.divmod(categories, np.uint8(len(CATEGORIES)))
    return color, pattern


def _extent_ns(trace: Trace) -> tuple[int, int]:
    """Return the first and the last moment of ranks with aligned clocks; clocks of other ranks may be days off."""
    moments = {
        "steps": ("start_ns", "end_ns"),
        "phases": ("start_ns", "end_ns"),
        "gradients": ("ready_ns", "ready_ns"),
        "copies": ("start_ns", "end_ns"),
        "collectives": ("launch_ns", "end_ns"),
    }
    starts_ns, ends_ns = [], []
    for name, (first, last) in moments.items():
        table = _select_aligned(trace, getattr(trace, name))
        if len(table):
            starts_ns.append(int(table[first].min()))
            ends_ns += [int(table[column].dropna().max()) for column in {first, last} if table[column].notna().any()]
    return min(starts_ns, default=0), max(ends_ns, default=0)


def _select_aligned(trace: Trace, table: pd.DataFrame) -> pd.DataFrame:
    aligned = trace.aligned_ranks
    return table if len(aligned) == len(trace.ranks) else table[table["rank"].isin(aligned)]


def _rows_by_rank(table: pd.DataFrame, ranks: Int64Array) -> dict[int, Int64Array]:
    """Return the row indices of each rank."""
    rank_of_row = table["rank"].to_numpy(dtype=np.int64)
    order = np.argsort(rank_of_row, kind="stable")
    first, after = (np.searchsorted(rank_of_row, ranks, side=side, sorter=order) for side in ("left", "right"))
    return {rank: order[first[index] : after[index]] for index, rank in enumerate(ranks.tolist())}


@dataclass(frozen=True, eq=False, kw_only=True)
class _OpenCollectives:
    """The collectives of a trace as arrays; those without an end are as long as is known."""

    from_ns: Int64Array
    to_ns: Int64Array
    is_unfinished: npt.NDArray[np.bool_]
    ready_ns: Int64Array
    """When the bucket was ready, on the trace's clock, where ``is_ready``."""
    is_ready: npt.NDArray[np.bool_]
    launch_ns: Int64Array
    bucket: Int64Array


def _add_open_ends(trace: Trace, begin_ns: int, end_ns: int) -> _OpenCollectives:
    """Return the collectives with ``from_ns`` and ``to_ns`` on the timeline, also of those without an end."""
    collectives = trace.collectives
    is_unfinished = collectives["end_ns"].isna().to_numpy(dtype=bool)
    to_ns = collectives["end_ns"].fillna(0).to_numpy(dtype=np.int64)
    if is_unfinished.any():
        ends = trace.steps.drop_duplicates(["rank", "step"])[["rank", "step", "end_ns"]]
        found = collectives.loc[is_unfinished, ["rank", "step"]].merge(ends, how="left", on=["rank", "step"])
        to_ns[is_unfinished] = found["end_ns"].astype("Int64").fillna(end_ns).to_numpy(dtype=np.int64)
    from_ns = collectives["start_ns"].fillna(collectives["launch_ns"]).to_numpy(dtype=np.int64)
    return _OpenCollectives(
        from_ns=from_ns - begin_ns,
        to_ns=to_ns - begin_ns,
        is_unfinished=is_unfinished,
        ready_ns=collectives["ready_ns"].fillna(0).to_numpy(dtype=np.int64),
        is_ready=collectives["ready_ns"].notna().to_numpy(dtype=bool),
        launch_ns=collectives["launch_ns"].to_numpy(dtype=np.int64),
        bucket=collectives["bucket"].to_numpy(dtype=np.int64),
    )


def buckets_of_gradients(gradients: pd.DataFrame, plans: pd.DataFrame) -> Int64Array:
    """Return the bucket of each gradient's parameter, or -1 if no plan has it."""
    keys = ["model", "plan_epoch", "parameter"]
    known = plans[[*keys, "bucket"]].drop_duplicates(keys)
    if known.empty or gradients.empty:
        return np.full(len(gradients), -1, dtype=np.int64)
    found = gradients[keys].merge(known.astype("int64"), how="left", on=keys)["bucket"]
    return found.fillna(-1).to_numpy(dtype=np.int64)


def _phases(phases: pd.DataFrame, rows: Int64Array, begin_ns: int) -> SpanIndex:
    starts_ns, ends_ns = phases["start_ns"].to_numpy()[rows], phases["end_ns"].to_numpy()[rows]
    categories = phases["phase"].cat.codes.to_numpy()[rows]
    return index_spans(starts_ns - begin_ns, ends_ns - begin_ns, categories, rows)


def _gradients(trace: Trace, rows: Int64Array, begin_ns: int) -> SpanIndex:
    gradients = trace.gradients.iloc[rows]
    ready_ns = gradients["ready_ns"].to_numpy() - begin_ns
    return index_spans(ready_ns, ready_ns, bucket_categories(buckets_of_gradients(gradients, trace.plans)), rows)


def _buckets(
    collectives: _OpenCollectives, rows: Int64Array, copies: pd.DataFrame, copied: Int64Array, begin_ns: int
) -> SpanIndex:
    """Return the waits for launch and the copies of a rank.

    Args:
        collectives: Collectives of all ranks; copies are numbered on from these.
        rows: Those of the rank.
        copies: Copies of all ranks.
        copied: Row indices of the rank's copies.
        begin_ns: Time 0 of the timeline.
    """
    waits, moved = rows[collectives.is_ready[rows]], copies.iloc[copied]
    return index_spans(
        np.concatenate([collectives.ready_ns[waits], moved["start_ns"].to_numpy()]) - begin_ns,
        np.concatenate([collectives.launch_ns[waits], moved["end_ns"].to_numpy()]) - begin_ns,
        bucket_categories(np.concatenate([collectives.bucket[waits], moved["bucket"].to_numpy()])),
        np.concatenate([waits, copied + len(collectives.bucket)]),
    )


def _communication(collectives: _OpenCollectives, rows: Int64Array) -> SpanIndex:
    categories = bucket_categories(collectives.bucket[rows])
    return index_spans(collectives.from_ns[rows], collectives.to_ns[rows], categories, rows)
