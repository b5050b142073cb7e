"""Spans related to a span of the timeline: the same event on every rank, and all spans of the same bucket or phase."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pandas as pd

from overlapscope.breakdown.arrivals import compute_arrivals, match_collectives
from overlapscope.breakdown.lanes import LANE_NAMES, Lane, Timeline, buckets_of_gradients
from overlapscope.trace.collective_arrival import compute_arrival_ns
from overlapscope.trace.recording import Trace

_LANE_TABLES = {"phases": "phases", "gradients": "gradients", "communication": "collectives"}
_SAME = {
    "phases": ("model", "step", "phase"),
    "gradients": ("model", "step", "parameter"),
    "collectives": ("model", "step", "bucket", "op"),
    "copies": ("model", "step", "bucket", "direction"),
}


@dataclass(frozen=True, kw_only=True)
class Subject:
    """Subject of a span: the bucket or phase that it concerns, in one step."""

    model: int
    step: int
    bucket: int = -1
    """Number of the bucket; -1 if the span concerns none."""
    phase: str = ""
    """Name of the phase; empty if the span concerns a bucket, or a collective without one."""


def get_subject(trace: Trace, lane: Lane, row: int) -> Subject:
    """Return what a span concerns.

    Args:
        row: One of ``lane.spans.rows``.
    """
    (model, step, bucket), (phase,) = get_subjects(trace, lane, np.array([row]))
    return Subject(model=int(model[0]), step=int(step[0]), bucket=int(bucket[0]), phase=str(phase))


def find_related_spans(
    trace: Trace, timeline: Timeline, subject: Subject, positions: Iterable[int] | None = None
) -> dict[int, npt.NDArray[np.int64]]:
    """Return all spans on the timeline with the same subject, of the ranks at some positions from the top.

    Returns:
        Their positions in ``spans`` of each lane that has some, by number of the lane, ordered by start.
    """
    steps = timeline.steps[timeline.steps["step"] == subject.step]
    if steps.empty:
        return {}
    step_ns = int(steps["start_ns"].iloc[0]), int(steps["end_ns"].iloc[0])
    found = {}
    every = range(len(timeline.ranks)) if positions is None else positions
    for number in (position * len(LANE_NAMES) + index for position in every for index in range(len(LANE_NAMES))):
        lane = timeline.lanes[number]
        near = lane.spans.in_view(*step_ns)
        (model, step, bucket), phase = get_subjects(trace, lane, lane.spans.rows[near])
        is_match = (model == subject.model) & (step == subject.step) & (bucket == subject.bucket)
        is_match &= phase == subject.phase
        if is_match.any():
            found[number] = near[is_match]
    return found


def get_subjects(
    trace: Trace, lane: Lane, rows: npt.NDArray[Any]
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.object_]]:
    """Return what several spans concern.

    Args:
        rows: (n,) Some of ``lane.spans.rows``.

    Returns:
        (3, n) model, step and bucket, and (n,) the phase, as in ``Subject``.
    """
    about, phase = np.full((3, len(rows)), -1, dtype=np.int64), np.full(len(rows), "", dtype=object)
    is_copy = rows >= len(trace.collectives) if lane.name == "buckets" else np.zeros(len(rows), dtype=bool)
    for which in (is_copy, ~is_copy):
        if not which.any():
            continue
        name, _ = _table_of(trace, lane, int(rows[which][0]))
        found = getattr(trace, name).iloc[rows[which] - len(trace.collectives) * is_copy[which]]
        about[0, which], about[1, which] = found["model"], found["step"]
        if name == "phases":
            phase[which] = found["phase"].astype(str)
        elif name == "gradients":
            about[2, which] = buckets_of_gradients(found, trace.plans)
        else:
            about[2, which] = found["bucket"]
    return about, phase


def find_counterparts(trace: Trace, lane: Lane, row: int) -> pd.DataFrame:
    """Return the same phase, gradient, copy or collective on all ranks with a known clock, and on the span's own rank.

    Returns:
        rank (ascending), start_ns and end_ns (of the common clock; of a collective the start is the rank's arrival, the
        end is missing if it never completed), late_ns (after the first rank's start), wait_ns (for the last rank to
        arrive) and transfer_ns (from there to the end), missing if not all ranks are known to have taken part.
    """
    name, index = _table_of(trace, lane, row)
    table: pd.DataFrame = getattr(trace, name)
    own = table.iloc[index]
    is_same = np.logical_and.reduce([(table[column] == own[column]).to_numpy() for column in _SAME[name]])
    is_same &= table["rank"].isin([*trace.aligned_ranks, lane.rank]).to_numpy()
    found = table[is_same].assign(index=np.flatnonzero(is_same))
    start_ns, end_ns = _times(name, found)
    found = found.assign(start_ns=start_ns, end_ns=end_ns).sort_values(["rank", "start_ns"], kind="stable")
    occurrence = found.groupby("rank").cumcount()
    found = found[occurrence == occurrence[found["index"] == index].iloc[0]]
    shown = found[["rank", "start_ns", "end_ns"]].reset_index(drop=True)
    shown["late_ns"] = shown["start_ns"] - shown["start_ns"].min()
    waits = pd.DataFrame({"rank": [], "wait_ns": [], "transfer_ns": []}, dtype="int64")
    if name == "collectives":
        together = compute_arrivals(match_collectives(replace(trace, collectives=table.iloc[found["index"]])))
        waits = together[["rank", "wait_ns", "transfer_ns"]]
    return shown.merge(waits.astype("Int64"), on="rank", how="left")


def _table_of(trace: Trace, lane: Lane, row: int) -> tuple[str, int]:
    """Return the table that a span is from, and its row index there."""
    if lane.name == "buckets":
        is_wait = row < len(trace.collectives)
        return ("collectives", row) if is_wait else ("copies", row - len(trace.collectives))
    return _LANE_TABLES[lane.name], row


def _times(name: str, found: pd.DataFrame) -> tuple[Any, Any]:
    if name == "gradients":
        return found["ready_ns"], found["ready_ns"]
    if name == "collectives":
        return compute_arrival_ns(found), found["end_ns"]
    return found["start_ns"], found["end_ns"]


# Path of a bucket through a step on each rank: gradients ready, bucket ready, launch, all-reduce, copy.

MOMENTS: Final = ("gradient ready", "bucket ready", "launched", "last rank there", "ended", "copied out")
"""Moments of the path, in order. "gradient ready" occurs once for each recorded parameter of the bucket."""

_COLUMNS: Final = ("rank", "occurrence", "moment", "time_ns", "lane", "index")
_GRADIENTS, _BUCKETS, _COMMUNICATION = (LANE_NAMES.index(name) for name in ("gradients", "buckets", "communication"))
_NOTHING: Final = np.zeros(0, dtype=np.int64)


def compute_bucket_flow(trace: Trace, timeline: Timeline, about: Mapping[int, npt.NDArray[np.int64]]) -> pd.DataFrame:
    """Return the moments of a bucket on the ranks of the timeline.

    Args:
        about: All spans that concern the bucket in one step, from ``find_related_spans``.

    Returns:
        rank (from top to bottom), occurrence (which reduction of the bucket in its step, from 0), moment (one of
        ``MOMENTS``, in this order; an unknown one has no row), time_ns (on the timeline), lane (its number on the
        timeline) and index (in ``lanes[lane].spans``) of the span that it belongs to. Without rows if the bucket was
        not reduced.
    """
    rows: list[tuple[Any, ...]] = []
    last_ns: dict[int, int | None] = {}
    for position in sorted({lane // len(LANE_NAMES) for lane in about}):
        rank = timeline.ranks[position]
        lanes = range(position * len(LANE_NAMES), (position + 1) * len(LANE_NAMES))
        for occurrence, index in enumerate(about.get(lanes[_COMMUNICATION], _NOTHING).tolist()):
            if occurrence not in last_ns:
                last_ns[occurrence] = _last_arrival_ns(trace, timeline, lanes[_COMMUNICATION], index)
            found = _reduction_moments(trace, timeline, lanes, about, occurrence)
            rows += [(rank, occurrence, *row) for row in found]
            if (arrived_ns := last_ns[occurrence]) is not None:
                rows.append((rank, occurrence, "last rank there", arrived_ns, lanes[_COMMUNICATION], index))
    table = pd.DataFrame(rows, columns=_COLUMNS).astype({name: "int64" for name in _COLUMNS if name != "moment"})
    order = table["moment"].map(MOMENTS.index)
    return table.assign(order=order, top=table["rank"].map(timeline.ranks.index)).sort_values(
        ["top", "occurrence", "order", "time_ns"], kind="stable", ignore_index=True
    )[list(_COLUMNS)]


def _reduction_moments(
    trace: Trace, timeline: Timeline, lanes: range, about: Mapping[int, npt.NDArray[np.int64]], occurrence: int
) -> Iterator[tuple[str, int, int, int]]:
    """Yield moment, time, lane and index for each event of one rank in one reduction.

    Args:
        trace: the recording.
        timeline: lanes of the ranks shown.
        lanes: numbers of the rank's lanes.
        about: all spans that concern the bucket in one step.
        occurrence: index of its all-reduce among those of the bucket.
    """
    sums = about[lanes[_COMMUNICATION]]
    rows = timeline.lanes[lanes[_COMMUNICATION]].spans.rows[sums]
    index, row = int(sums[occurrence]), int(rows[occurrence])
    since_ns = _arrival_ns(trace, timeline, int(rows[occurrence - 1])) if occurrence else None
    until_ns = _arrival_ns(trace, timeline, row)
    ready_ns, launch_ns, end_ns = _times_ns(trace, timeline, row)
    gradients = timeline.lanes[lanes[_GRADIENTS]].spans
    for gradient in about.get(lanes[_GRADIENTS], _NOTHING).tolist():
        time_ns = int(gradients.starts_ns[gradient])
        if time_ns <= until_ns and (since_ns is None or time_ns > since_ns):
            yield "gradient ready", time_ns, lanes[_GRADIENTS], gradient
    own_buckets = about.get(lanes[_BUCKETS], _NOTHING)
    waits = own_buckets[timeline.lanes[lanes[_BUCKETS]].spans.rows[own_buckets] == row].tolist()
    if ready_ns is not None:
        yield from (("bucket ready", ready_ns, lanes[_BUCKETS], wait) for wait in waits)
    if launch_ns is not None:
        yield "launched", launch_ns, *((lanes[_BUCKETS], waits[0]) if waits else (lanes[_COMMUNICATION], index))
    if end_ns is not None:
        yield "ended", end_ns, lanes[_COMMUNICATION], index
        yield from _first_copy_out(trace, timeline, lanes[_BUCKETS], own_buckets, end_ns)


def _first_copy_out(
    trace: Trace, timeline: Timeline, lane: int, indices: npt.NDArray[np.int64], from_ns: int
) -> Iterator[tuple[str, int, int, int]]:
    """Yield the end of the first copy of averages to gradients that begins at ``from_ns`` or later, if there is one."""
    spans = timeline.lanes[lane].spans
    for index in indices[spans.starts_ns[indices] >= from_ns].tolist():
        if _is_copy_out(trace, int(spans.rows[index])):
            yield "copied out", int(spans.ends_ns[index]), lane, index
            return


def _times_ns(trace: Trace, timeline: Timeline, row: int) -> tuple[int | None, ...]:
    """Return when a collective was ready, launched and ended, on the timeline."""
    found = trace.collectives.iloc[row]
    moments = (found[name] for name in ("ready_ns", "launch_ns", "end_ns"))
    return tuple(None if pd.isna(moment) else int(moment) - timeline.begin_ns for moment in moments)


def _arrival_ns(trace: Trace, timeline: Timeline, row: int) -> int:
    """Return when a rank entered a collective, on the timeline."""
    return int(compute_arrival_ns(trace.collectives.iloc[[row]])[0]) - timeline.begin_ns


def _is_copy_out(trace: Trace, row: int) -> bool:
    """Return True if a row of the lane of buckets is a copy of averages to gradients."""
    copy = row - len(trace.collectives)
    return copy >= 0 and bool(trace.copies["direction"].iloc[copy] == "out")


def _last_arrival_ns(trace: Trace, timeline: Timeline, lane: int, index: int) -> int | None:
    """Return when the last rank entered a collective; None unless all ranks are known to have."""
    found = timeline.lanes[lane]
    same = find_counterparts(trace, found, int(found.spans.rows[index]))
    known = same[same["wait_ns"].notna()].head(1)
    return None if known.empty else int((known["start_ns"] + known["wait_ns"]).iloc[0]) - timeline.begin_ns
