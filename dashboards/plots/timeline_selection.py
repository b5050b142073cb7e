"""Selection on the timeline: found by a click or by name, outlined, and with the path of its bucket."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pandas as pd
from bokeh.models import ColumnDataSource

from dashboards.plots.browser_rpc import BrowserRpc, RequestColumns
from dashboards.plots.lane_layout import ShownLanes
from dashboards.plots.related_spans import compute_bucket_flow, find_related_spans, get_subject
from dashboards.plots.span_search import find_span, find_span_by_name, make_span_name
from dashboards.plots.timeline_columns import compute_rows_px
from dashboards.plots.wide_figure import EDGES, Columns, make_empty_columns, update_source
from dashboards.theme import paint
from overlapscope.breakdown.lanes import LANE_NAMES
from overlapscope.trace.recording import Trace

# Bokeh columns of a selection on the timeline: outlines of all spans with the same subject.

SELECTED_COLUMNS: Final = ("left", "right", "top", "bottom", "line_width")

_CHOSEN_LINE_PX: Final = 3.0
_RELATED_LINE_PX: Final = 1.5


def build_selected_columns(
    shown: ShownLanes, about: Mapping[int, npt.NDArray[np.int64]], lane: int, row: int
) -> Columns:
    """Return rectangles around all spans with the same subject as the selected one.

    On a collapsed rank, that is where its all-reduce would be.

    Args:
        shown: the lanes.
        about: positions of these spans by lane, from ``find_related_spans``.
        lane: index of the selected span's lane on the timeline.
        row: row of the selected span, one of its lane's ``spans.rows``.
    """
    columns = make_empty_columns(*SELECTED_COLUMNS)
    for number, found in about.items():
        spans = shown.timeline.lanes[number].spans
        if shown.layout.has_lane(number):
            top, bottom = compute_rows_px(shown.layout, number, spans.stack[found], spans.stack_heights[found])
        elif shown.timeline.lanes[number].name == "communication":
            top, bottom = (np.full(len(found), edge, np.float32) for edge in shown.layout.lane_px(number))
        else:
            continue
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


def build_flow_mark_columns(flow: pd.DataFrame, shown: ShownLanes) -> Columns:
    """Return a mark for each moment of ``flow``, the table from ``compute_bucket_flow``."""
    points = _compute_points(flow, shown)
    return {
        "x": [x for x, _ in points],
        "y": [y for _, y in points],
        "marker": [MARKERS[moment] for moment in flow["moment"]],
    }


def build_flow_line_columns(flow: pd.DataFrame, shown: ShownLanes) -> Columns:
    """Return for each rank a line from the gradients to where the bucket is ready, and from there to the copy."""
    x, y = zip(*_compute_points(flow, shown), strict=True) if len(flow) else ((), ())
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
                line += _find_transfer_start(way, shown)
        line.append(_GAP)
    return {"x": [x for x, _ in line], "y": [y for _, y in line]}


def build_last_arrival_columns(flow: pd.DataFrame, shown: ShownLanes) -> Columns:
    """Return a line across the ranks shown for each moment at which the last rank arrived."""
    columns = make_empty_columns(*LAST_ARRIVAL_COLUMNS)
    points = flow.assign(y=[y for _, y in _compute_points(flow, shown)])
    for _, at in points[points["moment"] == "last rank there"].groupby("occurrence"):
        if len(at) > 1:
            columns["x"].append(float(at["time_ns"].iloc[0]))
            columns["top"].append(float(at["y"].min()))
            columns["bottom"].append(float(at["y"].max()))
    return columns


def _compute_points(flow: pd.DataFrame, shown: ShownLanes) -> list[_Point]:
    moments = zip(flow["time_ns"].tolist(), flow["lane"].tolist(), flow["index"].tolist(), strict=True)
    return [(float(time_ns), _compute_y_px(shown, lane, index)) for time_ns, lane, index in moments]


def _compute_y_px(shown: ShownLanes, lane: int, index: int) -> float:
    """Return where on a span the line passes: in its middle, but below the name of an all-reduce."""
    if not shown.layout.has_lane(lane):
        return sum(shown.layout.lane_px(lane)) / 2
    spans = shown.timeline.lanes[lane].spans
    top, bottom = compute_rows_px(shown.layout, lane, spans.stack[[index]], spans.stack_heights[[index]])
    middle = float(top[0] + bottom[0]) / 2
    is_named = shown.timeline.lanes[lane].name == "communication"
    return max(middle, float(bottom[0]) - _ABOVE_EDGE_PX) if is_named else middle


def _find_transfer_start(way: pd.DataFrame, shown: ShownLanes) -> list[_Point]:
    """Return where the all-reduce of a path begins, if it is drawn."""
    drawn = way[way["moment"].isin(["ended", "last rank there"])].head(1)
    return [
        (float(shown.timeline.lanes[lane].spans.starts_ns[index]), _compute_y_px(shown, lane, index))
        for lane, index in zip(drawn["lane"].tolist(), drawn["index"].tolist(), strict=True)
    ]


SELECTION_COLUMNS: Final = ("lane", "row", "from_ns", "to_ns", "note", "name", "top_px", "bottom_px")
"""Columns of the response on a selection, whose name is empty if nothing was found; the heights are those of its lane,
from the top of all lanes."""


class TimelineSelection:
    """The selection and the sources that show it.

    Args:
        rpc: messages of the timeline.
        trace: the recording.
        shown: the lanes.
        show_step: moves the view to a step.
    """

    def __init__(self, rpc: BrowserRpc, trace: Trace, shown: ShownLanes, show_step: Callable[[int], None]) -> None:
        """Create the sources of an empty selection."""
        self._trace, self._shown = trace, shown
        self._show_step = show_step
        self._selected: tuple[int, int] | None = None
        self._name = ""
        self.flow = pd.DataFrame()
        """Path of the selected bucket, from ``compute_bucket_flow``."""
        self.outlines = ColumnDataSource(data=make_empty_columns(*SELECTED_COLUMNS))
        self.bucket_path = ColumnDataSource(data=make_empty_columns(*FLOW_LINE_COLUMNS))
        self.meetings = ColumnDataSource(data=make_empty_columns(*LAST_ARRIVAL_COLUMNS))
        self.marks = ColumnDataSource(name="flow", data=make_empty_columns(*FLOW_MARK_COLUMNS))
        self.chosen = rpc.request("chosen", ("id", "lane", "row", "name"), self._on_chosen)
        self.sought = rpc.request("sought", ("text", "from_ns"), self._on_sought)
        self.response = rpc.response("selection", SELECTION_COLUMNS)

    def draw(self, plot: Any) -> None:
        """Add outlines and paths to the figure of the lanes."""
        across = {"x0": "x", "x1": "x", "y0": "top", "y1": "bottom", "source": self.meetings, "level": "overlay"}
        is_thin = not any(self._shown.layout.is_expanded)
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
        timeline = self._shown.timeline
        self._selected, self._name = (lane, row), make_span_name(self._trace, timeline, lane, row)
        self.redraw()
        spans = timeline.lanes[lane].spans
        index = int(np.flatnonzero(spans.rows == row)[0])
        top_px, bottom_px = self._shown.layout.lane_px(lane)
        self.response.data = {
            "lane": [lane],
            "row": [row],
            "from_ns": [int(spans.starts_ns[index])],
            "to_ns": [int(spans.ends_ns[index])],
            "note": [""],
            "name": [self._name],
            "top_px": [top_px],
            "bottom_px": [bottom_px],
        }

    def redraw(self) -> None:
        """Draw the selection on the ranks that are drawn now."""
        if self._selected is None:
            return
        (lane, row), shown = self._selected, self._shown
        subject = get_subject(self._trace, shown.timeline.lanes[lane], row)
        positions = [*shown.drawn, *({lane // len(LANE_NAMES)} - set(shown.drawn))]
        about = find_related_spans(self._trace, shown.timeline, subject, positions)
        self.flow = flow = compute_bucket_flow(self._trace, shown.timeline, about)
        update_source(self.outlines, build_selected_columns(shown, about, lane, row))
        update_source(self.bucket_path, build_flow_line_columns(flow, shown))
        update_source(self.meetings, build_last_arrival_columns(flow, shown))
        update_source(self.marks, build_flow_mark_columns(flow, shown))

    def renew(self) -> None:
        """Select the same span again, among other ranks, or nothing if it isn't there."""
        if self._selected is not None:
            found = find_span_by_name(self._trace, self._shown.timeline, self._name)
            self.select(*found) if found is not None else self._clear()

    def select_named(self, name: str) -> None:
        """Select a span by its name, or report that it is not among the ranks shown."""
        found = find_span_by_name(self._trace, self._shown.timeline, name)
        if found is None:
            self._clear()
            self._send_note("What the address selects is not among the ranks shown.")
        else:
            self.select(*found)

    def _clear(self) -> None:
        self._selected = None
        update_source(self.outlines, make_empty_columns(*SELECTED_COLUMNS))
        update_source(self.bucket_path, make_empty_columns(*FLOW_LINE_COLUMNS))
        update_source(self.meetings, make_empty_columns(*LAST_ARRIVAL_COLUMNS))
        update_source(self.marks, make_empty_columns(*FLOW_MARK_COLUMNS))

    def _on_chosen(self, args: RequestColumns) -> None:
        if args["name"][0]:
            self.select_named(str(args["name"][0]))
        elif args["lane"][0] >= 0:
            self.select(int(args["lane"][0]), int(args["row"][0]))
        else:
            self._clear()

    def _on_sought(self, args: RequestColumns) -> None:
        text = str(args["text"][0])
        found = find_span(self._trace, self._shown.timeline, text, int(args["from_ns"][0]))
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
