"""Selection on the timeline: found by a click or by name, outlined, and with the path of its bucket."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pandas as pd
from bokeh.models import ColumnDataSource

from dashboards.plots.browser_rpc import BrowserRpc, RequestColumns
from dashboards.plots.related_spans import compute_bucket_flow, find_related_spans, get_subject
from dashboards.plots.span_search import find_span, find_span_by_name, make_span_name
from dashboards.plots.timeline_columns import LaneLayout, compute_rows_px
from dashboards.plots.wide_figure import EDGES, Columns, make_empty_columns, update_source
from dashboards.theme import paint
from overlapscope.breakdown.lanes import Timeline
from overlapscope.trace.recording import Trace

# Bokeh columns of a selection on the timeline: outlines of all spans with the same subject.

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
        about: positions of these spans by lane, from ``find_related_spans``.
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


# Bokeh columns of the path of a bucket: lines between marks on each rank, and a line across the ranks.

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
"""Bokeh marker of each of ``dashboards.plots.related_spans.MOMENTS``."""

_ABOVE_EDGE_PX: Final = 7

_Point = tuple[float, float]
_GAP: Final[_Point] = (np.nan, np.nan)


def build_flow_mark_columns(flow: pd.DataFrame, timeline: Timeline, layout: LaneLayout) -> Columns:
    """Return a mark for each moment of ``flow``, the table from ``compute_bucket_flow``."""
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
    for _, way in flow.assign(x=x, y=y).groupby(["rank", "occurrence"], sort=False):
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
    for _, at in points[points["moment"] == "last rank there"].groupby("occurrence"):
        if len(at) > 1:
            columns["x"].append(float(at["time_ns"].iloc[0]))
            columns["top"].append(float(at["y"].min()))
            columns["bottom"].append(float(at["y"].max()))
    return columns


def _compute_points(flow: pd.DataFrame, timeline: Timeline, layout: LaneLayout) -> list[_Point]:
    moments = zip(flow["time_ns"].tolist(), flow["lane"].tolist(), flow["index"].tolist(), strict=True)
    return [(float(time_ns), _compute_y_px(timeline, layout, lane, index)) for time_ns, lane, index in moments]


def _compute_y_px(timeline: Timeline, layout: LaneLayout, lane: int, index: int) -> float:
    """Return where on a span the line passes: in its middle, but below the name of an all-reduce."""
    spans = timeline.lanes[lane].spans
    top, bottom = compute_rows_px(layout, lane, spans.stack[[index]], spans.stack_heights[[index]])
    middle = float(top[0] + bottom[0]) / 2
    return max(middle, float(bottom[0]) - _ABOVE_EDGE_PX) if timeline.lanes[lane].name == "communication" else middle


def _find_transfer_start(way: pd.DataFrame, timeline: Timeline, layout: LaneLayout) -> list[_Point]:
    """Return where the all-reduce of a path begins, if it is drawn."""
    drawn = way[way["moment"].isin(["ended", "last rank there"])].head(1)
    return [
        (float(timeline.lanes[lane].spans.starts_ns[index]), _compute_y_px(timeline, layout, lane, index))
        for lane, index in zip(drawn["lane"].tolist(), drawn["index"].tolist(), strict=True)
    ]


SELECTION_COLUMNS: Final = ("lane", "row", "from_ns", "to_ns", "note", "name", "top_px", "bottom_px")
"""Columns of the response on a selection, whose name is empty if nothing was found; the heights are those of its lane,
from the top of all lanes."""
_THIN_UNIT_PX: Final = 8
"""Height of a unit of the lanes below which thick lines would hide the spans."""


class TimelineSelection:
    """The selection and the sources that show it.

    Args:
        rpc: messages of the timeline.
        trace: the recording.
        timeline: lanes of the ranks shown.
        layout: layout of the lanes.
        show_step: moves the view to a step.
    """

    def __init__(
        self,
        rpc: BrowserRpc,
        trace: Trace,
        timeline: Timeline,
        layout: LaneLayout,
        show_step: Callable[[int], None],
    ) -> None:
        """Create the sources of an empty selection."""
        self._trace, self._timeline, self._layout = trace, timeline, layout
        self._show_step = show_step
        self.flow = pd.DataFrame()
        """Path of the selected bucket, from ``compute_bucket_flow``."""
        self.outlines = ColumnDataSource(data=make_empty_columns(*SELECTED_COLUMNS))
        self.bucket_path = ColumnDataSource(data=make_empty_columns(*FLOW_LINE_COLUMNS))
        self.meetings = ColumnDataSource(data=make_empty_columns(*LAST_ARRIVAL_COLUMNS))
        self.marks = ColumnDataSource(name="flow", data=make_empty_columns(*FLOW_MARK_COLUMNS))
        self.chosen = rpc.request("chosen", ("lane", "row", "name"), self._on_chosen)
        self.sought = rpc.request("sought", ("text", "from_ns"), self._on_sought)
        self.response = rpc.response("selection", SELECTION_COLUMNS)

    def draw(self, plot: Any) -> None:
        """Add outlines and paths to the figure of the lanes."""
        across = {"x0": "x", "x1": "x", "y0": "top", "y1": "bottom", "source": self.meetings, "level": "overlay"}
        is_thin = self._layout.unit_px < _THIN_UNIT_PX
        halo_px, line_px, mark_px = (2.5, 1.0, 5) if is_thin else (4.5, 1.5, 8)
        for role, width_px, dash in (("surface", halo_px, "solid"), ("accent", line_px, "dashed")):  # on any color
            paint(plot.segment(**across, line_width=width_px, line_dash=dash).glyph, line_color=role)
        for role, width_px in (("surface", halo_px), ("accent", line_px)):
            line = plot.line(x="x", y="y", source=self.bucket_path, line_width=width_px, level="overlay")
            paint(line.glyph, line_color=role)
        around = plot.quad(**EDGES, source=self.outlines, fill_color=None, line_width="line_width", level="overlay")
        paint(around.glyph, line_color="ink")
        marks = plot.scatter(
            x="x", y="y", marker="marker", source=self.marks, size=mark_px, line_width=line_px, level="overlay"
        )
        paint(marks.glyph, line_color="accent", fill_color="surface")

    def select(self, lane: int, row: int) -> None:
        """Select the span in a row of a lane; ``row`` is one of the lane's ``spans.rows``."""
        timeline, layout, spans = self._timeline, self._layout, self._timeline.lanes[lane].spans
        about = find_related_spans(self._trace, timeline, get_subject(self._trace, timeline.lanes[lane], row))
        self.flow = flow = compute_bucket_flow(self._trace, timeline, about)
        update_source(self.outlines, build_selected_columns(timeline, layout, about, lane, row))
        update_source(self.bucket_path, build_flow_line_columns(flow, timeline, layout))
        update_source(self.meetings, build_last_arrival_columns(flow, timeline, layout))
        update_source(self.marks, build_flow_mark_columns(flow, timeline, layout))
        index = int(np.flatnonzero(spans.rows == row)[0])
        top, below = layout.lane_units(lane)
        self.response.data = {
            "lane": [lane],
            "row": [row],
            "from_ns": [int(spans.starts_ns[index])],
            "to_ns": [int(spans.ends_ns[index])],
            "note": [""],
            "name": [make_span_name(self._trace, timeline, lane, row)],
            "top_px": [top * layout.unit_px],
            "bottom_px": [below * layout.unit_px],
        }

    def select_named(self, name: str) -> None:
        """Select a span by its name, or report that it is not among the ranks shown."""
        found = find_span_by_name(self._trace, self._timeline, name)
        if found is None:
            self._clear()
            self._send_note("What the address selects is not among the ranks shown.")
        else:
            self.select(*found)

    def _clear(self) -> None:
        update_source(self.outlines, make_empty_columns(*SELECTED_COLUMNS))
        update_source(self.bucket_path, make_empty_columns(*FLOW_LINE_COLUMNS))
        update_source(self.meetings, make_empty_columns(*LAST_ARRIVAL_COLUMNS))
        update_source(self.marks, make_empty_columns(*FLOW_MARK_COLUMNS))

    def _on_chosen(self, args: RequestColumns) -> None:
        if len(args["lane"]) and args["name"][0]:
            self.select_named(str(args["name"][0]))
        elif len(args["lane"]):
            self.select(int(args["lane"][0]), int(args["row"][0]))
        else:
            self._clear()

    def _on_sought(self, args: RequestColumns) -> None:
        text = str(args["text"][0])
        found = find_span(self._trace, self._timeline, text, int(args["from_ns"][0]))
        if found is None:
            self._send_note(f"Nothing here is called {text!r}.")
            return
        self._show_step(found.step)
        if found.lane is not None and found.row is not None:
            self.select(found.lane, found.row)
        else:
            self._send_note("")

    def _send_note(self, note: str) -> None:
        """Send a note instead of a selection."""
        note_columns = {"note": note, "name": ""}
        self.response.data = {name: [note_columns.get(name, 0)] for name in SELECTION_COLUMNS}
