"""Bokeh columns of the critical path: one line through the lanes, from rank to rank."""

from __future__ import annotations

from typing import Final

import numpy as np

from dashboards.plots.lane_layout import LaneLayout
from dashboards.plots.timeline_content import Columns, View, make_empty_columns
from overlapscope.account.critical_path import CriticalPath
from overlapscope.analysis.lanes import LANE_NAMES, Timeline

PATH_COLUMNS: Final = ("x", "y")

_PHASES, _COMMUNICATION = LANE_NAMES.index("phases"), LANE_NAMES.index("communication")
_INSIDE_PX: Final = 3


def build_path_columns(path: CriticalPath, timeline: Timeline, layout: LaneLayout, view: View) -> Columns:
    """Return the points of a line along the phases of the rank that all wait for, and along exposed transfers.

    A transfer is drawn on the rank where the path continues after it. Where the path is on a rank that is not shown,
    there is a gap.
    """
    from_ns, until_ns = path.from_ns - timeline.begin_ns, path.until_ns - timeline.begin_ns
    first, after = np.searchsorted(until_ns, view[0]), np.searchsorted(from_ns, view[1])
    if first >= after:
        return make_empty_columns(*PATH_COLUMNS)
    shown = {rank: index * len(LANE_NAMES) for index, rank in enumerate(timeline.ranks)}
    heights = np.full(after - first, np.nan)
    next_rank = next((who for who in path.who[after:].tolist() if who >= 0), None)
    for index, who in reversed(list(enumerate(path.who[first:after].tolist()))):
        next_rank = who if who >= 0 else next_rank
        if next_rank in shown:
            top, bottom = layout.lane_px(shown[next_rank] + (_COMMUNICATION if who < 0 else _PHASES))
            heights[index] = top + _INSIDE_PX if who < 0 else bottom - _INSIDE_PX
    return {
        "x": np.column_stack([from_ns[first:after], until_ns[first:after]]).ravel().astype(np.float64),
        "y": np.repeat(heights, 2),
    }
