"""Stable names of spans: in a URL they identify the same span after the recording has grown."""

from __future__ import annotations

import re
from typing import Final

import numpy as np
import numpy.typing as npt

from overlapscope.analysis.lanes import LANE_NAMES, Lane, Timeline
from overlapscope.analysis.related_spans import get_subjects
from overlapscope.trace.reader import Trace

_NAME: Final = re.compile(rf"(\d{{1,9}})-({'|'.join(LANE_NAMES)})-(\d{{1,15}})-(\d{{1,9}})")


def make_span_name(trace: Trace, timeline: Timeline, lane: int, row: int) -> str:
    """Return the name of a span: ``3-communication-12-0`` is the first all-reduce of rank 3 in step 12.

    Args:
        lane: Number of the lane on the timeline.
        row: One of its lane's ``spans.rows``.
    """
    found = timeline.lanes[lane]
    (_, (step,), _), _ = get_subjects(trace, found, np.array([row]))
    number = int(np.flatnonzero(_rows_of_step(trace, timeline, found, int(step)) == row)[0])
    return f"{found.rank}-{found.name}-{step}-{number}"


def find_span_by_name(trace: Trace, timeline: Timeline, name: str) -> tuple[int, int] | None:
    """Return lane and row of the span with a name; None if the timeline has none."""
    parts = _NAME.fullmatch(name)
    if parts is None:
        return None
    rank, step, number = (int(parts[index]) for index in (1, 3, 4))
    for index, lane in enumerate(timeline.lanes):
        if (lane.rank, lane.name) == (rank, parts[2]):
            rows = _rows_of_step(trace, timeline, lane, step)
            return (index, int(rows[number])) if number < len(rows) else None
    return None


def _rows_of_step(trace: Trace, timeline: Timeline, lane: Lane, step: int) -> npt.NDArray[np.int32]:
    """Return the rows of a lane in one step, by start.

    Only the time range of the step is searched, as a lane may have millions of spans.
    """
    bounds = timeline.steps[timeline.steps["step"] == step]
    near = lane.spans.in_view(*bounds[["start_ns", "end_ns"]].iloc[0]) if len(bounds) else np.arange(len(lane.spans))
    rows = lane.spans.rows[near]
    (_, steps, _), _ = get_subjects(trace, lane, rows)
    return rows[steps == step]
