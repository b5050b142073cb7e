"""Selection on the timeline: found by a click or by name, outlined, described, and with the path of its bucket."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import numpy as np
import pandas as pd
from bokeh.models import ColumnDataSource

from dashboards.plots.dialogue import Asked, Dialogue
from dashboards.plots.flow_content import (
    FLOW_LINE_COLUMNS,
    FLOW_MARK_COLUMNS,
    MEETING_COLUMNS,
    flow_line_columns,
    flow_mark_columns,
    meeting_columns,
)
from dashboards.plots.lane_layout import LaneLayout
from dashboards.plots.selected_content import SELECTED_COLUMNS, selected_columns
from dashboards.plots.timeline_content import no_columns
from dashboards.plots.wide_figure import fill
from dashboards.theme import paint
from overlapscope.analysis.find_span import find
from overlapscope.analysis.flow import flow_of
from overlapscope.analysis.lanes import Timeline
from overlapscope.analysis.related_spans import spans_about, subject_of
from overlapscope.analysis.span_names import name_of, span_named
from overlapscope.trace.reader import Trace

Describe = Callable[[int, int, pd.DataFrame], str]
"""Returns the details of a span as markup, by the index of its lane, its row, and the path of its bucket."""

ANSWER_COLUMNS: Final = ("from_ns", "to_ns", "markup", "note", "name", "top_px", "bottom_px")
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
        dialogue: Dialogue,
        trace: Trace,
        timeline: Timeline,
        layout: LaneLayout,
        show_step: Callable[[int], None],
        describe: Describe | None,
    ) -> None:
        """Create the sources of an empty selection."""
        self._trace, self._timeline, self._layout = trace, timeline, layout
        self._show_step = show_step
        self._describe = describe
        self.outlines = ColumnDataSource(data=no_columns(*SELECTED_COLUMNS))
        self.way = ColumnDataSource(data=no_columns(*FLOW_LINE_COLUMNS))
        self.meetings = ColumnDataSource(data=no_columns(*MEETING_COLUMNS))
        self.marks = ColumnDataSource(name="flow", data=no_columns(*FLOW_MARK_COLUMNS))
        self.chosen = dialogue.question("chosen", ("lane", "row", "name"), self._on_chosen)
        self.sought = dialogue.question("sought", ("text", "from_ns"), self._on_sought)
        self.answer = dialogue.answer("selection", ANSWER_COLUMNS)

    def draw(self, plot: Any) -> None:
        """Add outlines and paths to the figure of the lanes."""
        across = {"x0": "x", "x1": "x", "y0": "top", "y1": "bottom", "source": self.meetings, "level": "overlay"}
        is_thin = self._layout.unit_px < _THIN_UNIT_PX
        halo_px, line_px, mark_px = (2.5, 1.0, 5) if is_thin else (4.5, 1.5, 8)
        for role, width_px, dash in (("surface", halo_px, "solid"), ("accent", line_px, "dashed")):  # on any color
            paint(plot.segment(**across, line_width=width_px, line_dash=dash).glyph, line_color=role)
        for role, width_px in (("surface", halo_px), ("accent", line_px)):
            line = plot.line(x="x", y="y", source=self.way, line_width=width_px, level="overlay")
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
        about = spans_about(self._trace, timeline, subject_of(self._trace, timeline.lanes[lane], row))
        flow = flow_of(self._trace, timeline, about)
        fill(self.outlines, selected_columns(timeline, layout, about, lane, row))
        fill(self.way, flow_line_columns(flow, timeline, layout))
        fill(self.meetings, meeting_columns(flow, timeline, layout))
        fill(self.marks, flow_mark_columns(flow, timeline, layout))
        place = int(np.flatnonzero(spans.rows == row)[0])
        top, below = layout.lane_units(lane)
        self.answer.data = {
            "from_ns": [int(spans.starts_ns[place])],
            "to_ns": [int(spans.ends_ns[place])],
            "markup": ["" if self._describe is None else self._describe(lane, row, flow)],
            "note": [""],
            "name": [name_of(self._trace, timeline, lane, row)],
            "top_px": [top * layout.unit_px],
            "bottom_px": [below * layout.unit_px],
        }

    def select_named(self, name: str) -> None:
        """Select a span by its name, or report that it is not among the ranks shown."""
        found = span_named(self._trace, self._timeline, name)
        if found is None:
            self._clear()
            self._say("What the address selects is not among the ranks shown.")
        else:
            self.select(*found)

    def _clear(self) -> None:
        fill(self.outlines, no_columns(*SELECTED_COLUMNS))
        fill(self.way, no_columns(*FLOW_LINE_COLUMNS))
        fill(self.meetings, no_columns(*MEETING_COLUMNS))
        fill(self.marks, no_columns(*FLOW_MARK_COLUMNS))

    def _on_chosen(self, asked: Asked) -> None:
        if len(asked["lane"]) and asked["name"][0]:
            self.select_named(str(asked["name"][0]))
        elif len(asked["lane"]):
            self.select(int(asked["lane"][0]), int(asked["row"][0]))
        else:
            self._clear()

    def _on_sought(self, asked: Asked) -> None:
        text = str(asked["text"][0])
        found = find(self._trace, self._timeline, text, int(asked["from_ns"][0]))
        if found is None:
            self._say(f"Nothing here is called {text!r}.")
            return
        self._show_step(found.step)
        if found.lane is not None and found.row is not None:
            self.select(found.lane, found.row)
        else:
            self._say("")

    def _say(self, note: str) -> None:
        """Send a note instead of a selection."""
        said = {"markup": "", "note": note, "name": ""}
        self.answer.data = {name: [said.get(name, 0)] for name in ANSWER_COLUMNS}
