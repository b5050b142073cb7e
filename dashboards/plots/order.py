"""Plot of the collectives of one process group: a lane per rank, aligned by number, with differences marked.

The browser requests, the server responds: what is in a window of numbers, what is under the pointer, where the next
difference or a step is. Only those entries are read. What ranks have at the selected number is the page's part.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from bokeh.core.properties import value
from bokeh.models import (
    ColumnDataSource,
    CustomJS,
    CustomJSTickFormatter,
    LinearColorMapper,
    Range1d,
)

from dashboards.plots.browser_rpc import TOOLTIP_COLUMNS, BrowserRpc, RequestColumns, build_tooltip_columns
from dashboards.plots.order_columns import (
    BOX_COLUMNS,
    CELL_COLUMNS,
    TEXT_COLUMNS,
    OrderLayout,
    build_cell_columns,
    build_differing_columns,
    build_missing_columns,
    build_step_columns,
    build_text_columns,
)
from dashboards.plots.tooltip import Rows
from dashboards.plots.wide_figure import (
    EDGES,
    FONT,
    SMALL_TEXT,
    fit_ticks,
    make_empty_columns,
    make_wide_figure,
    style_axis,
)
from dashboards.theme import paint
from overlapscope.diagnosis.evidence import UNKNOWN_STEP, Divergence
from overlapscope.diagnosis.order_view import CATEGORIES, OrderLane, OrderLanes
from overlapscope.diagnosis.text import collective_text
from overlapscope.text import capitalize, format_bytes, format_ns, rank_list
from overlapscope.trace.schema import NO_BUCKET

# Bokeh figures of the lanes of collectives: the lanes, and above them their numbers and steps.

AXIS_HEIGHT_PX: Final = 62


def draw_order(
    layout: OrderLayout,
    number_range: Range1d,
    *,
    cells: ColumnDataSource,
    missing: ColumnDataSource,
    differing: ColumnDataSource,
    names: ColumnDataSource,
    subjects: ColumnDataSource,
    steps: ColumnDataSource,
    band: ColumnDataSource,
    selected: ColumnDataSource,
) -> Any:
    """Draw all lanes; x is the number of a collective in its group, y is pixels from the top."""
    plot = make_wide_figure(number_range, Range1d(start=layout.height_px, end=0), layout.height_px, "order")
    plot.xaxis.visible = False
    first_divergence = plot.quad(
        left="left", right="right", top=0, bottom=layout.height_px, source=band, fill_alpha=0.16, line_color=None
    )
    paint(first_divergence.glyph, fill_color="exposed")
    for side in ("left", "right"):
        edge = plot.vspan(x=side, source=band, line_width=1.5, level="overlay")
        paint(edge.glyph, line_color="exposed")
    empty = plot.quad(**EDGES, source=missing, fill_color=None, line_width=1, line_dash="3 3")
    paint(empty.glyph, line_color="faint")

    mapper = LinearColorMapper(low=-0.5, high=len(CATEGORIES) - 0.5)
    paint(mapper, palette="collective_colors")
    color = {"field": "category", "transform": mapper}
    plot.quad(
        **EDGES,
        source=cells,
        fill_color=color,
        fill_alpha="alpha",
        line_color=color,
        hatch_pattern="hatch",
        hatch_color=color,
        hatch_alpha=0.35,
        hatch_scale=8,
        hatch_weight=1.5,
    )
    begins = plot.vspan(x="x", source=steps, line_width=1, level="glyph", line_dash="2 3")
    paint(begins.glyph, line_color="muted")
    # Not everybody can distinguish red from some of the colors, so a line in the page's background color surrounds it.
    for role, width in (("surface", 5.5), ("exposed", 2.5)):
        marks = plot.quad(**EDGES, source=differing, fill_color=None, line_width=width, level="overlay")
        paint(marks.glyph, line_color=role)
    chosen = plot.quad(**EDGES, source=selected, fill_color=None, line_width=2.5, level="overlay")
    paint(chosen.glyph, line_color="ink")
    inks, grounds = (LinearColorMapper(low=-0.5, high=len(CATEGORIES) + 0.5) for _ in range(2))
    paint(inks, palette="collective_text_colors")
    paint(grounds, palette="collective_backgrounds")
    for source, size in ((names, "12px"), (subjects, "10.5px")):
        plot.text(
            x="x",
            y="y",
            text="text",
            source=source,
            text_color={"field": "ink", "transform": inks},
            background_fill_color={"field": "ink", "transform": grounds},
            text_baseline="middle",
            text_font=value(FONT),
            text_font_size=size,
        )
    return plot


def draw_numbers(number_range: Range1d, *, steps: ColumnDataSource, band: ColumnDataSource) -> Any:
    """Draw the axis of numbers, the first divergence, and where steps begin."""
    plot = make_wide_figure(
        number_range, Range1d(start=0, end=AXIS_HEIGHT_PX), AXIS_HEIGHT_PX, "numbers", x_axis_location="above"
    )
    axis = plot.xaxis[0]
    fit_ticks(plot, 14, min_interval=1)
    axis.formatter = CustomJSTickFormatter(
        code="return Number.isInteger(tick) && tick > 0 ? '#' + tick.toLocaleString('en-US') : ''"
    )
    style_axis(axis)
    begins = plot.vspan(x="x", source=steps, line_width=1, line_dash="2 3")
    paint(begins.glyph, line_color="muted")
    first_divergence = plot.quad(
        left="left", right="right", top=AXIS_HEIGHT_PX, bottom=0, source=band, fill_alpha=0.16, line_color=None
    )
    paint(first_divergence.glyph, fill_color="exposed")
    labels = plot.text(x="x", y=10, text="label", source=steps, x_offset=4, **SMALL_TEXT)
    paint(labels.glyph, text_color="muted")
    for side in ("left", "right"):
        edge = plot.vspan(x=side, source=band, line_width=1.5)
        paint(edge.glyph, line_color="exposed")
    flag = plot.text(
        x="flag", y=28, text="label", source=band, text_align="align", text_font_style="bold", **SMALL_TEXT
    )
    paint(flag.glyph, text_color="exposed")
    return plot


# Tooltip of a collective on the Order page.

_DIFFERENCES: Final[dict[Divergence, str]] = {
    "signature": "a different collective",
    "step": "of a different step",
    "batch": "of a different batch of data",
    "names": "of different tensors",
}


def build_collective_tooltip(lanes: OrderLanes, lane: OrderLane, number: int) -> tuple[str, Rows]:
    """Return title and lines for what a lane has at a number."""
    cell = lanes.window([lane], number, number).cells[0]
    title = f"{capitalize(rank_list(lane.ranks))} · #{number:,}"
    entry = cell.entry
    if entry is None:
        what = f"nothing: its log ends at #{lane.latest:,}" if lane.latest else "left no log of this group"
        return title, [("", what)]
    signature = entry.signature
    rows: Rows = [("what", collective_text(entry))]
    if cell.difference is not None:
        rows.append(("differs", f"{_DIFFERENCES[cell.difference]} than on most or some other ranks"))
    if entry.step != UNKNOWN_STEP:
        rows.append(("step", str(entry.loop_step)))
    if entry.phase:
        rows.append(("phase", entry.phase.replace("_", " ")))
    if signature.bytes:
        rows.append(("size", format_bytes(signature.bytes)))
    rows.append(("state", entry.state))
    if entry.launched_ns is not None:
        rows.append(("launched", f"{format_ns(entry.launched_ns - entry.announced_ns)} after it was announced"))
    if entry.launched_ns is not None and entry.completed_ns is not None:
        took = format_ns(entry.completed_ns - entry.launched_ns)
        is_seen_late = signature.bucket == NO_BUCKET
        rows.append(("took", f"at most {took}" if is_seen_late else took))
    if entry.call_site is not None:
        rows.append(("called at", str(entry.call_site)))
    return title, rows


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
    """

    def __init__(
        self,
        lanes: OrderLanes,
        shown: Sequence[OrderLane],
        *,
        highlight: tuple[int, str] | None,
        selected: SelectedCell,
    ) -> None:
        """Create the sources and draw the first window."""
        self._lanes = lanes
        self._shown = shown
        self.layout = OrderLayout(lanes=len(shown))
        self.cells = ColumnDataSource(data=make_empty_columns(*CELL_COLUMNS))
        self.missing = ColumnDataSource(data=make_empty_columns(*BOX_COLUMNS))
        self.differing = ColumnDataSource(data=make_empty_columns(*BOX_COLUMNS))
        self.names = ColumnDataSource(data=make_empty_columns(*TEXT_COLUMNS))
        self.subjects = ColumnDataSource(data=make_empty_columns(*TEXT_COLUMNS))
        self.steps = ColumnDataSource(data=make_empty_columns("x", "label"))
        self.band = ColumnDataSource(data=_build_band_columns(highlight, lanes))
        self.box = ColumnDataSource(data=make_empty_columns(*BOX_COLUMNS))

        self.rpc = BrowserRpc()
        self.view = self.rpc.request("view", ("id", "first", "last", "width_px"), self._on_view)
        self.response = self.rpc.response("answer", ("id",))
        self.jump = self.rpc.request("jump", ("id", "to", "from"), self._on_jump)
        self.jumped = self.rpc.response("jumped", ("id", "number"))
        self.pointed = self.rpc.request("pointed", ("id", "lane", "number"), self._on_pointed)
        self.tooltip = self.rpc.response("tooltip", TOOLTIP_COLUMNS)

        self.facts = self.rpc.response("facts", ("lanes", "lane_px", "cells_px", "oldest", "latest", "first"))
        self.facts.data = {
            "lanes": [[lane.ranks[0] for lane in shown]],
            "lane_px": [self.layout.lane_px],
            "cells_px": [[self.layout.cell_px(lane) for lane in range(len(shown))]],
            "oldest": [lanes.oldest],
            "latest": [lanes.latest],
            "first": [highlight[0] if highlight else lanes.first_difference],
        }
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
        self.rpc.attach(self.root)
        self.axis = draw_numbers(self.number_range, steps=self.steps, band=self.band)
        self.update(first, first + length, _FIRST_WIDTH_PX)

    @property
    def start_script(self) -> CustomJS:
        """Return the script that runs when the document is ready: connects mouse, keys, address and theme."""
        drawn = {name: getattr(self, name) for name in ("root", "axis", "number_range", "cells", "box")}
        return CustomJS(args={"plot": {**drawn, **self.rpc.sources}}, code="window.overlapscope.startOrder(plot)")

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


_LABEL_COLUMNS: Final = 6
"""Number of columns nearer to which to an end of the log a label in the middle of its column would be cut off."""


def _build_band_columns(highlight: tuple[int, str] | None, lanes: OrderLanes) -> dict[str, Any]:
    if highlight is None:
        return make_empty_columns("left", "right", "flag", "align", "label")
    number, label = highlight
    flag, align = float(number), "center"
    if lanes.latest - number < _LABEL_COLUMNS <= number - lanes.oldest:
        flag, align = number + 0.5, "right"
    elif number - lanes.oldest < _LABEL_COLUMNS:
        flag, align = number - 0.5, "left"
    return {"left": [number - 0.5], "right": [number + 0.5], "flag": [flag], "align": [align], "label": [label]}
