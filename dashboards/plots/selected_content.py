"""Bokeh columns of a selection on the timeline: outlines of all spans with the same subject."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import numpy as np
import numpy.typing as npt

from dashboards.plots.lane_layout import LaneLayout
from dashboards.plots.timeline_content import Columns, compute_rows_px, make_empty_columns
from overlapscope.analysis.lanes import Timeline

SELECTED_COLUMNS: Final = ("left", "right", "top", "bottom", "line_width")

_CHOSEN_LINE_PX: Final = 3.0
_RELATED_LINE_PX: Final = 1.5


def build_selected_columns(
    timeline: Timeline, layout: LaneLayout, about: Mapping[int, npt.NDArray[np.int64]], lane: int, row: int
) -> Columns:
    """Return rectangles around all spans with the same subject as the selected one.

    Args:
        timeline: lanes of the ranks shown.
        layout: layout of the lanes.
        about: positions of these spans by lane, from ``spans_about``.
        lane: index of the selected span's lane on the timeline.
        row: row of the selected span, one of its lane's ``spans.rows``.
    """
    columns = make_empty_columns(*SELECTED_COLUMNS)
    for number, found in about.items():
        spans = timeline.lanes[number].spans
        top, bottom = compute_rows_px(layout, number, spans.stack[found], spans.stack_heights[found])
        is_chosen = (spans.rows[found] == row) & (number == lane)
        columns["left"] += spans.starts_ns[found].astype(float).tolist()
        columns["right"] += spans.ends_ns[found].astype(float).tolist()
        columns["top"] += top.tolist()
        columns["bottom"] += bottom.tolist()
        columns["line_width"] += [_CHOSEN_LINE_PX if chosen else _RELATED_LINE_PX for chosen in is_chosen.tolist()]
    return columns
