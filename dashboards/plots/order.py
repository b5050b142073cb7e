"""Plot of the collectives of one process group: a lane per rank, aligned by number, with differences marked.

The browser requests, the server responds: what is in a window of numbers, what is under the pointer, where the next
difference or a step is, and what the ranks have at the number that is selected. Only those entries are read.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

from bokeh.models import ColumnDataSource, CustomJS, Range1d

from dashboards.plots.dialogue import TOOLTIP_COLUMNS, BrowserRpc, RequestColumns, build_tooltip_columns
from dashboards.plots.order_content import (
    BOX_COLUMNS,
    CELL_COLUMNS,
    TEXT_COLUMNS,
    build_cell_columns,
    build_differing_columns,
    build_missing_columns,
    build_step_columns,
    build_text_columns,
    make_empty_columns,
)
from dashboards.plots.order_figure import draw_numbers, draw_order
from dashboards.plots.order_layout import OrderLayout
from dashboards.plots.order_tooltip import build_collective_tooltip
from overlapscope.diagnosis.evidence import UNKNOWN_STEP
from overlapscope.diagnosis.order_lanes import OrderLane, OrderLanes

MAX_COLUMNS: Final = 120
"""Maximum number of collectives in view; more can't be distinguished."""
MIN_COLUMNS: Final = 5
_FIRST_COLUMNS: Final = 17
_OVERSCAN_COLUMNS: Final = 40
_FIRST_WIDTH_PX: Final = 1200

SelectedCell = tuple[int, int]
"""Index of a lane, and number of a collective."""


class OrderPlot:
    """The lanes (``root``), their numbers (``axis``), and the sources of the messages to the browser.

    Args:
        lanes: the collectives of the group.
        shown: lanes to draw, from top to bottom.
        highlight: number where the fault began, and its label.
        selected: cell to begin with, in the middle of the view.
        describe: returns the markup of what ranks have at a number.
    """

    def __init__(
        self,
        lanes: OrderLanes,
        shown: Sequence[OrderLane],
        *,
        highlight: tuple[int, str] | None,
        selected: SelectedCell,
        describe: Callable[[int], str],
    ) -> None:
        """Create the sources and draw the first window."""
        self._lanes = lanes
        self._shown = shown
        self._describe = describe
        self._first = highlight[0] if highlight else lanes.first_difference
        self.layout = OrderLayout(lanes=len(shown))
        self.cells = ColumnDataSource(data=make_empty_columns(*CELL_COLUMNS))
        self.missing = ColumnDataSource(data=make_empty_columns(*BOX_COLUMNS))
        self.differing = ColumnDataSource(data=make_empty_columns(*BOX_COLUMNS))
        self.names = ColumnDataSource(data=make_empty_columns(*TEXT_COLUMNS))
        self.subjects = ColumnDataSource(data=make_empty_columns(*TEXT_COLUMNS))
        self.steps = ColumnDataSource(data=make_empty_columns("x", "label"))
        self.band = ColumnDataSource(data=_build_band_columns(highlight))
        self.box = ColumnDataSource(data=make_empty_columns(*BOX_COLUMNS))

        self._rpc = BrowserRpc()
        self.view = self._rpc.request("view", ("id", "first", "last", "width_px"), self._on_view)
        self.response = self._rpc.response("answer", ("id",))
        self.details = self._rpc.response("details", ("lane", "number", "step", "markup"))
        self.selected = self._rpc.request("selected", ("lane", "number"), self._on_selected)
        # Here the server sends the first request.
        self.selected.data = {"lane": [selected[0]], "number": [selected[1]]}
        self.jump = self._rpc.request("jump", ("id", "to", "from"), self._on_jump)
        self.jumped = self._rpc.response("jumped", ("id", "number"))
        self.pointed = self._rpc.request("pointed", ("id", "lane", "number"), self._on_pointed)
        self.tooltip = self._rpc.response("tooltip", TOOLTIP_COLUMNS)

        self.bounds = (lanes.oldest - 0.55, max(lanes.latest, lanes.oldest + MIN_COLUMNS) + 0.55)
        length = min(_FIRST_COLUMNS, self.bounds[1] - self.bounds[0])
        # The cause matters more than what followed.
        first = min(max(selected[1] - round(0.6 * length) - 0.5, self.bounds[0]), self.bounds[1] - length)
        self.number_range = Range1d(
            start=first,
            end=first + length,
            bounds=self.bounds,
            min_interval=MIN_COLUMNS,
            max_interval=MAX_COLUMNS,
        )
        self.root = draw_order(
            self.layout,
            self.number_range,
            cells=self.cells,
            missing=self.missing,
            differing=self.differing,
            names=self.names,
            subjects=self.subjects,
            steps=self.steps,
            band=self.band,
            selected=self.box,
        )
        self._rpc.attach(self.root)
        self.axis = draw_numbers(self.number_range, steps=self.steps, band=self.band)
        self.update(first, first + length, _FIRST_WIDTH_PX)

    @property
    def start_script(self) -> CustomJS:
        """A script that the browser runs when the document is ready: connects mouse, keys, address and theme."""
        drawn = {name: getattr(self, name) for name in ("root", "axis", "number_range", "cells", "box")}
        facts = {
            "lanes": [lane.ranks[0] for lane in self._shown],
            "lane_px": self.layout.lane_px,
            "cells_px": [self.layout.cell_px(lane) for lane in range(len(self._shown))],
            "oldest": self._lanes.oldest,
            "latest": self._lanes.latest,
            "first": self._first,
        }
        return CustomJS(
            args={"plot": {**drawn, **self._rpc.sources}, "facts": facts},
            code="window.overlapscope.startOrder(plot, facts)",
        )

    def update(self, first: float, last: float, width_px: int) -> None:
        """Draw the window between two numbers, and some more on either side."""
        column_px = width_px / max(1.0, last - first)
        around = min(_OVERSCAN_COLUMNS, round(last - first))
        window = self._lanes.window(self._shown, int(first) - around, int(last) + 1 + around)
        names, subjects = build_text_columns(window, self.layout, column_px)
        # The browser stops drawing with the first of these, until it has the response that follows them.
        self.cells.data = build_cell_columns(window, self.layout, column_px)
        self.missing.data = build_missing_columns(window, self.layout, column_px)
        self.differing.data = build_differing_columns(window, self.layout, column_px)
        self.names.data, self.subjects.data = names, subjects
        self.steps.data = build_step_columns(window, column_px)

    def _on_view(self, args: RequestColumns) -> None:
        self.update(float(args["first"][0]), float(args["last"][0]), max(1, int(args["width_px"][0])))
        # Last, because the browser waits for it, and then has everything else.
        self.response.data = {"id": args["id"]}

    def _on_selected(self, args: RequestColumns) -> None:
        self.details.data = self._details(int(args["lane"][0]), int(args["number"][0]))

    def _details(self, lane: int, number: int) -> dict[str, Any]:
        cells = self._lanes.window([self._shown[lane]], number, number).cells
        entry = cells[0].entry if cells else None
        step = None if entry is None or entry.step == UNKNOWN_STEP else entry.step
        return {"lane": [lane], "number": [number], "step": [step], "markup": [self._describe(number)]}

    def _on_jump(self, args: RequestColumns) -> None:
        to, number = args["to"][0], int(args["from"][0])
        found: int | None
        if to == "step":
            found = self._lanes.start_of_step(number)
        else:
            found = self._lanes.next_difference(number, 1 if to == "next" else -1)
        self.jumped.data = {"id": args["id"], "number": [found]}

    def _on_pointed(self, args: RequestColumns) -> None:
        lane, number = int(args["lane"][0]), int(args["number"][0])
        title, rows = build_collective_tooltip(self._lanes, self._shown[lane], number)
        self.tooltip.data = build_tooltip_columns(args, title, rows)


def _build_band_columns(highlight: tuple[int, str] | None) -> dict[str, Any]:
    if highlight is None:
        return make_empty_columns("left", "right", "middle", "label")
    number, label = highlight
    return {"left": [number - 0.5], "right": [number + 0.5], "middle": [number], "label": [label]}
