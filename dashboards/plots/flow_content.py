"""Bokeh columns of the path of a bucket: lines between marks on each rank, and a line across the ranks."""

from __future__ import annotations

from typing import Final

import numpy as np
import pandas as pd

from dashboards.plots.lane_layout import LaneLayout
from dashboards.plots.timeline_content import Columns, compute_rows_px, make_empty_columns
from overlapscope.analysis.lanes import Timeline

FLOW_LINE_COLUMNS: Final = ("x", "y")
FLOW_MARK_COLUMNS: Final = ("x", "y", "marker")
LAST_ARRIVAL_COLUMNS: Final = ("x", "top", "bottom")

MARKERS: Final = {
    "gradient ready": "circle",
    "bucket ready": "square",
    "launched": "triangle",
    "last rank there": "diamond",
    "ended": "inverted_triangle",
    "copied out": "hex",
}
"""Bokeh marker of each of ``overlapscope.analysis.flow.MOMENTS``."""

_ABOVE_EDGE_PX: Final = 7

_Point = tuple[float, float]
_GAP: Final[_Point] = (np.nan, np.nan)


def build_flow_mark_columns(flow: pd.DataFrame, timeline: Timeline, layout: LaneLayout) -> Columns:
    """Return a mark for each moment of ``flow``, the table from ``flow_of``."""
    points = _compute_points(flow, timeline, layout)
    return {
        "x": [x for x, _ in points],
        "y": [y for _, y in points],
        "marker": [MARKERS[moment] for moment in flow["moment"]],
    }


def build_flow_line_columns(flow: pd.DataFrame, timeline: Timeline, layout: LaneLayout) -> Columns:
    """Return for each rank a line from the gradients to where the bucket is ready, and from there to the copy."""
    x, y = zip(*_compute_points(flow, timeline, layout), strict=True) if len(flow) else ((), ())
    line: list[_Point] = []
    for _, way in flow.assign(x=x, y=y).groupby(["rank", "turn"], sort=False):
        is_gradient = (way["moment"] == "gradient ready").to_numpy()
        points = list(zip(way["x"].tolist(), way["y"].tolist(), strict=True))
        steps = [point for point, first in zip(points, is_gradient, strict=True) if not first]
        moments = way["moment"][~is_gradient].tolist()
        for point in (point for point, first in zip(points, is_gradient, strict=True) if first):
            line += [point, *steps[:1], _GAP]
        for moment, point in zip(moments, steps, strict=True):
            if moment == "copied out":  # along the lane of buckets, so as not to cross the names of other all-reduces
                line.append((line[-1][0], point[1]))
            if moment != "last rank there":  # caused by another rank: the line along the all-reduce passes it
                line.append(point)
            if moment == "launched":
                line += _find_transfer_start(way, timeline, layout)
        line.append(_GAP)
    return {"x": [x for x, _ in line], "y": [y for _, y in line]}


def build_last_arrival_columns(flow: pd.DataFrame, timeline: Timeline, layout: LaneLayout) -> Columns:
    """Return a line across the ranks shown for each moment at which the last rank arrived."""
    columns = make_empty_columns(*LAST_ARRIVAL_COLUMNS)
    points = flow.assign(y=[y for _, y in _compute_points(flow, timeline, layout)])
    for _, at in points[points["moment"] == "last rank there"].groupby("turn"):
        if len(at) > 1:
            columns["x"].append(float(at["time_ns"].iloc[0]))
            columns["top"].append(float(at["y"].min()))
            columns["bottom"].append(float(at["y"].max()))
    return columns


def _compute_points(flow: pd.DataFrame, timeline: Timeline, layout: LaneLayout) -> list[_Point]:
    moments = zip(flow["time_ns"].tolist(), flow["lane"].tolist(), flow["place"].tolist(), strict=True)
    return [(float(time_ns), _compute_y_px(timeline, layout, lane, place)) for time_ns, lane, place in moments]


def _compute_y_px(timeline: Timeline, layout: LaneLayout, lane: int, place: int) -> float:
    """Return where on a span the line passes: in its middle, but below the name of an all-reduce."""
    spans = timeline.lanes[lane].spans
    top, bottom = compute_rows_px(layout, lane, spans.stack[[place]], spans.stack_heights[[place]])
    middle = float(top[0] + bottom[0]) / 2
    return max(middle, float(bottom[0]) - _ABOVE_EDGE_PX) if timeline.lanes[lane].name == "communication" else middle


def _find_transfer_start(way: pd.DataFrame, timeline: Timeline, layout: LaneLayout) -> list[_Point]:
    """Return where the all-reduce of a path begins, if it is drawn."""
    drawn = way[way["moment"].isin(["ended", "last rank there"])].head(1)
    return [
        (float(timeline.lanes[lane].spans.starts_ns[place]), _compute_y_px(timeline, layout, lane, place))
        for lane, place in zip(drawn["lane"].tolist(), drawn["place"].tolist(), strict=True)
    ]
