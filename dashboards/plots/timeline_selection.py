"""Selection on the timeline: found by a click or by name, outlined, described, and with the path of its bucket."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import numpy as np
import pandas as pd
from bokeh.models import ColumnDataSource

from dashboards.plots.dialogue import BrowserRpc, RequestColumns
from dashboards.plots.flow_content import (
    FLOW_LINE_COLUMNS,
    FLOW_MARK_COLUMNS,
    LAST_ARRIVAL_COLUMNS,
    build_flow_line_columns,
    build_flow_mark_columns,
    build_last_arrival_columns,
)
from dashboards.plots.lane_layout import LaneLayout
from dashboards.plots.selected_content import SELECTED_COLUMNS, build_selected_columns
from dashboards.plots.timeline_content import make_empty_columns
from dashboards.plots.wide_figure import update_source
from dashboards.theme import paint
from overlapscope.analysis.find_span import find_span
from overlapscope.analysis.flow import compute_bucket_flow
from overlapscope.analysis.lanes import Timeline
from overlapscope.analysis.related_spans import find_related_spans, get_subject
from overlapscope.analysis.span_names import find_span_by_name, make_span_name
from overlapscope.trace.reader import Trace

RenderSelection = Callable[[int, int, pd.DataFrame], str]
"""Returns the details of a span as markup, by the index of its lane, its row, and the path of its bucket."""

SELECTION_COLUMNS: Final = ("from_ns", "to_ns", "markup", "note", "name", "top_px", "bottom_px")
"""Columns of the response on a selection; the heights are those of its lane, from the top of all lanes."""
_THIN_UNIT_PX: Final = 8
"""Height of a unit of the lanes below which thick lines would hide the spans."""


class TimelineSelection:
    """The selection and the sources that show it.

    Args:
        dialogue: messages of the timeline.
        trace: the recording.
        timeline: lanes of the ranks shown.
        layout: layout of the lanes.
        show_step: moves the view to a step.
        describe: returns the markup of the panel; None on a page without one.
    """

    def __init__(
        self,
        rpc: BrowserRpc,
        trace: Trace,
        timeline: Timeline,
        layout: LaneLayout,
        show_step: Callable[[int], None],
        describe: RenderSelection | None,
    ) -> None:
        """Create the sources of an empty selection."""
        self._trace, self._timeline, self._layout = trace, timeline, layout
        self._show_step = show_step
        self._describe = describe
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
        around = plot.quad(
            left="left",
            right="right",
            top="top",
            bottom="bottom",
            source=self.outlines,
            fill_color=None,
            line_width="line_width",
            level="overlay",
        )
        paint(around.glyph, line_color="ink")
        marks = plot.scatter(
            x="x", y="y", marker="marker", source=self.marks, size=mark_px, line_width=line_px, level="overlay"
        )
        paint(marks.glyph, line_color="accent", fill_color="surface")

    def select(self, lane: int, row: int) -> None:
        """Select the span in a row of a lane; ``row`` is one of the lane's ``spans.rows``."""
        timeline, layout, spans = self._timeline, self._layout, self._timeline.lanes[lane].spans
        about = find_related_spans(self._trace, timeline, get_subject(self._trace, timeline.lanes[lane], row))
        flow = compute_bucket_flow(self._trace, timeline, about)
        update_source(self.outlines, build_selected_columns(timeline, layout, about, lane, row))
        update_source(self.bucket_path, build_flow_line_columns(flow, timeline, layout))
        update_source(self.meetings, build_last_arrival_columns(flow, timeline, layout))
        update_source(self.marks, build_flow_mark_columns(flow, timeline, layout))
        index = int(np.flatnonzero(spans.rows == row)[0])
        top, below = layout.lane_units(lane)
        self.response.data = {
            "from_ns": [int(spans.starts_ns[index])],
            "to_ns": [int(spans.ends_ns[index])],
            "markup": ["" if self._describe is None else self._describe(lane, row, flow)],
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
        note_columns = {"markup": "", "note": note, "name": ""}
        self.response.data = {name: [note_columns.get(name, 0)] for name in SELECTION_COLUMNS}
