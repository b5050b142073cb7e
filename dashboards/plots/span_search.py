"""Search on a timeline by name: a step, a bucket, a parameter."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from dashboards.plots.related_spans import get_subjects
from overlapscope.breakdown.lanes import LANE_NAMES, Lane, Timeline
from overlapscope.trace.recording import Trace

# Stable names of spans: in a URL they identify the same span after the recording has grown.

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
    if rank not in timeline.ranks:
        return None
    index = timeline.ranks.index(rank) * len(LANE_NAMES) + LANE_NAMES.index(parts[2])
    rows = _rows_of_step(trace, timeline, timeline.lanes[index], step)
    return (index, int(rows[number])) if number < len(rows) else None


def _rows_of_step(trace: Trace, timeline: Timeline, lane: Lane, step: int) -> npt.NDArray[np.int32]:
    """Return the rows of a lane in one step, by start.

    Only the time range of the step is searched, as a lane may have millions of spans.
    """
    bounds = timeline.steps[timeline.steps["step"] == step]
    near = lane.spans.in_view(*bounds[["start_ns", "end_ns"]].iloc[0]) if len(bounds) else np.arange(len(lane.spans))
    rows = lane.spans.rows[near]
    (_, steps, _), _ = get_subjects(trace, lane, rows)
    return rows[steps == step]


_STEP: Final = re.compile(r"(?:step\s*)?(\d+)")
_BUCKET: Final = re.compile(r"bucket\s*(\d+)")


@dataclass(frozen=True, kw_only=True)
class SearchHit:
    """A step, or a span within one."""

    step: int
    lane: int | None = None
    """Number of the lane on the timeline; None for a step."""
    row: int | None = None
    """Row of the span, one of its lane's ``spans.rows``; None for a step."""


def find_span(trace: Trace, timeline: Timeline, text: str, from_ns: int) -> SearchHit | None:
    """Find what a text names, on the first rank that has it.

    Args:
        text: ``step 12`` or ``12``, ``bucket 3``, or a part of a parameter's name.
        from_ns: Where to search first: a match here or later is preferred to an earlier one.

    Returns:
        None if there is nothing of that name.
    """
    wanted = text.strip().lower()
    if match := _STEP.fullmatch(wanted):
        steps = timeline.steps["step"]
        return SearchHit(step=int(match[1])) if (steps == int(match[1])).any() else None
    if match := _BUCKET.fullmatch(wanted):
        is_match = trace.collectives["bucket"].to_numpy() == int(match[1])
        return _find_first(trace.collectives["step"].to_numpy(), timeline, "communication", is_match, from_ns)
    if not wanted:
        return None
    names = trace.plans["name"].str.lower()
    for is_named in (names == wanted, names.str.contains(wanted, regex=False)):
        found = trace.plans[is_named]
        if len(found):
            first = found[found["name"] == found["name"].iloc[0]]
            return _gradient(trace, timeline, first["model"].iloc[0], first["parameter"].iloc[0], from_ns)
    return None


def _gradient(trace: Trace, timeline: Timeline, model: int, parameter: int, from_ns: int) -> SearchHit | None:
    gradients = trace.gradients
    is_match = (gradients["model"] == model) & (gradients["parameter"] == parameter)
    return _find_first(gradients["step"].to_numpy(), timeline, "gradients", is_match.to_numpy(), from_ns)


def _find_first(
    steps: npt.NDArray[Any], timeline: Timeline, name: str, is_match: npt.NDArray[np.bool_], from_ns: int
) -> SearchHit | None:
    """Return the first matching span of a lane from a moment on, else the last one before it."""
    for number in range(LANE_NAMES.index(name), len(timeline.lanes) if is_match.any() else 0, len(LANE_NAMES)):
        lane = timeline.lanes[number]
        positions = np.flatnonzero(is_match[lane.spans.rows])
        if len(positions):
            later = positions[lane.spans.starts_ns[positions] >= from_ns]
            row = int(lane.spans.rows[later[0] if len(later) else positions[-1]])
            return SearchHit(step=int(steps[row]), lane=number, row=row)
    return None
