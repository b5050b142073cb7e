"""What ended a rank, or kept it from ending its step, written on its lane where its recording ends."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

from dashboards.plots.lane_layout import ShownLanes
from dashboards.plots.wide_figure import Columns, make_empty_columns
from overlapscope.breakdown.lanes import LANE_NAMES
from overlapscope.diagnosis.diagnosis import Diagnosis
from overlapscope.diagnosis.text import format_position

LANE_END_COLUMNS: Final = ("x", "y", "text", "align", "offset")
_FOLDERS: Final = re.compile(r"(?<=\s)(?:/[^\s/]+)*/(?=[^\s/]+:\d)")
"""Of the path of a file, before the number of a line: the lane has no room for it."""
_EARLY: Final = 0.9
"""Share of the recording before which the end of a lane leaves room behind it."""


def describe_ends(diagnosis: Diagnosis | None, step_starts: Mapping[int, frozenset[int]]) -> dict[int, str]:
    """Return what each rank came to in an incident: the step that it never finished, and the exception it raised.

    Of a rank that is blamed or suspected and raised none, where it was last.

    Args:
        diagnosis: the diagnosis of the job; nothing is described without an incident.
        step_starts: steps that each rank has begun and not finished.
    """
    if diagnosis is None or not diagnosis.is_incident:
        return {}
    texts: dict[int, list[str]] = {}
    step = diagnosis.verdict.step
    for rank, begun in step_starts.items():
        if step is not None and step in begun:
            texts.setdefault(rank, []).append(f"step {step}: never finished")
    for rank, evidence in diagnosis.evidence.ranks.items():
        if evidence.failure is not None and rank in step_starts:
            texts.setdefault(rank, []).append(f"rank {rank} raised {evidence.failure.type} here")
        elif rank in diagnosis.verdict.named and rank in step_starts and evidence.position is not None:
            where = _FOLDERS.sub("", format_position(evidence.position))
            if rank in texts:  # the step has been said
                where = where.replace(f" of step {step}", "").removeprefix(f"in step {step}").removeprefix(", ")
            if where:
                texts.setdefault(rank, []).append(f"rank {rank}: {where}")
    return {rank: "; ".join(parts) for rank, parts in texts.items()}


def build_lane_end_columns(shown: ShownLanes, ends: Mapping[int, str]) -> Columns:
    """Return the text of each rank drawn that has one, at the end of its last phase."""
    columns = make_empty_columns(*LANE_END_COLUMNS)
    for position in shown.drawn if ends else ():
        lane = shown.timeline.lanes[position * len(LANE_NAMES)]
        if lane.rank in ends:
            top, bottom = shown.layout.lane_px(position * len(LANE_NAMES))
            end_ns = float(lane.spans.ends_ns.max(initial=0))
            is_early = end_ns < _EARLY * shown.timeline.length_ns
            columns["x"].append(end_ns)
            columns["align"].append("left" if is_early else "right")
            columns["offset"].append(6 if is_early else -6)
            columns["y"].append((top + bottom) / 2)
            columns["text"].append(ends[lane.rank])
    return columns
