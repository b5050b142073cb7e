"""Spans related to a span of the timeline: the same event on every rank, and all spans of the same bucket or phase."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from overlapscope.account.arrivals import compute_arrivals, match_collectives
from overlapscope.analysis.lanes import Lane, Timeline, buckets_of_gradients
from overlapscope.trace.entering import compute_arrival_ns
from overlapscope.trace.reader import Trace

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


def find_related_spans(trace: Trace, timeline: Timeline, subject: Subject) -> dict[int, npt.NDArray[np.int64]]:
    """Return all spans on the timeline with the same subject.

    Returns:
        Their positions in ``spans`` of each lane that has some, by number of the lane, ordered by start.
    """
    steps = timeline.steps[timeline.steps["step"] == subject.step]
    if steps.empty:
        return {}
    step_ns = int(steps["start_ns"].iloc[0]), int(steps["end_ns"].iloc[0])
    found = {}
    for number, lane in enumerate(timeline.lanes):
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
    name, place = _table_of(trace, lane, row)
    table: pd.DataFrame = getattr(trace, name)
    own = table.iloc[place]
    is_same = np.logical_and.reduce([(table[column] == own[column]).to_numpy() for column in _SAME[name]])
    is_same &= table["rank"].isin([*trace.aligned_ranks, lane.rank]).to_numpy()
    found = table[is_same].assign(place=np.flatnonzero(is_same))
    start_ns, end_ns = _times(name, found)
    found = found.assign(start_ns=start_ns, end_ns=end_ns).sort_values(["rank", "start_ns"], kind="stable")
    found["turn"] = found.groupby("rank").cumcount()
    turn = int(found.loc[found["place"] == place, "turn"].iloc[0])
    found = found[found["turn"] == turn]
    shown = found[["rank", "start_ns", "end_ns"]].reset_index(drop=True)
    shown["late_ns"] = shown["start_ns"] - shown["start_ns"].min()
    waits = pd.DataFrame({"rank": [], "wait_ns": [], "transfer_ns": []}, dtype="int64")
    if name == "collectives":
        together = compute_arrivals(match_collectives(replace(trace, collectives=table.iloc[found["place"]])))
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
