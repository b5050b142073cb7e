"""Bokeh columns of exposed communication on the timeline: brackets below the lanes of each rank."""

from __future__ import annotations

from typing import Final

import numpy as np

from dashboards.plots.lane_layout import LaneLayout
from dashboards.plots.timeline_content import Columns, View, make_empty_columns
from overlapscope.account.blocks import Breakdown
from overlapscope.analysis.lanes import LANE_NAMES, Timeline

EXPOSED_COLUMNS: Final = ("x", "y")

_MAX_BRACKET_PX: Final = 6


def build_exposed_columns(account: Breakdown, timeline: Timeline, layout: LaneLayout, view: View, most: int) -> Columns:
    """Return the points of a line with gaps, which is a bracket below each span of exposed communication in view.

    Args:
        account: step-time breakdown of the recording.
        timeline: lanes of the ranks shown.
        layout: layout of the lanes.
        view: range of time to draw.
        most: maximum number of spans; of more none is drawn, because they could not be distinguished.
    """
    found = []
    for index, rank in enumerate(timeline.ranks):
        spans_ns = account.exposed_spans_ns(rank) - timeline.begin_ns
        first, after = np.searchsorted(spans_ns[1], view[0]), np.searchsorted(spans_ns[0], view[1])
        found.append((index, spans_ns[:, first:after].astype(np.float64)))
    if sum(spans_ns.shape[1] for _, spans_ns in found) > most:
        return make_empty_columns(*EXPOSED_COLUMNS)
    x, y = [], []
    for index, (starts_ns, ends_ns) in found:
        _, top = layout.lane_px(index * len(LANE_NAMES) + LANE_NAMES.index("communication"))
        bottom = top + min(layout.unit_px - 1, _MAX_BRACKET_PX)
        x.append(np.column_stack([starts_ns, starts_ns, ends_ns, ends_ns, np.full(len(starts_ns), np.nan)]).ravel())
        y.append(np.tile([top + 1.0, bottom, bottom, top + 1.0, np.nan], len(starts_ns)))
    return {"x": np.concatenate(x), "y": np.concatenate(y)}
