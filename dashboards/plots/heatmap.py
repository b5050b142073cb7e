"""Heatmap of ranks and steps: one image, in which late, slow and waiting ranks are dark.

The browser requests, the server responds: which figure to show, and what is in the cell under the pointer. Zooming and
panning need no response, as the image holds all cells.
"""

from __future__ import annotations

from typing import Any, Final, get_args

import numpy as np
from bokeh.models import (
    BasicTicker,
    ColumnDataSource,
    CustomJS,
    CustomJSTickFormatter,
    LinearColorMapper,
    PanTool,
    Range1d,
    WheelZoomTool,
)
from bokeh.plotting import figure

from dashboards.plots.browser_rpc import TOOLTIP_COLUMNS, BrowserRpc, RequestColumns, build_tooltip_columns
from dashboards.plots.tooltip import Rows
from dashboards.rank_map import MAX_COLUMNS, NO_VALUE, Grid, Grouping, Heatmap, HeatmapFigure
from dashboards.theme import LATENESS_SHADES, paint
from overlapscope.stragglers.text import PART_LABELS
from overlapscope.text import capitalize, format_ns, rank_list

# Bokeh figure of the heatmap of ranks and steps: steps to the right, rank 0 at the top.

_ROW_PX: Final = 26
_MAX_HEIGHT_PX: Final = 512
_AXIS_PX: Final = 40
_FONT: Final = "system-ui, sans-serif"

_NAME: Final = """
const name = names.data.name[tick] ?? ""
return name.length > 16 ? name.slice(0, 7) + "…" + name.slice(-8) : name
"""


def compute_height_px(rows: int) -> int:
    """Return the height of the figure: few rows are not stretched, many share the height of a window."""
    return min(max(rows, 2) * _ROW_PX, _MAX_HEIGHT_PX) + _AXIS_PX


def draw_heatmap(step_range: Range1d, row_range: Range1d, cells: ColumnDataSource, names: ColumnDataSource) -> Any:
    """Draw the heatmap; y counts ranks or hosts from the top, labeled by ``names``."""
    # Rows that are high enough don't zoom, because of the bounds of their range; steps do.
    zoom, pan = WheelZoomTool(maintain_focus=False, zoom_on_axis=False), PanTool()
    plot: Any = figure(
        x_range=step_range,
        y_range=row_range,
        height=compute_height_px(1),
        sizing_mode="stretch_width",
        min_border=0,
        min_border_right=16,
        min_border_top=2,  # Bokeh does not clear the topmost half pixel of its canvas
        toolbar_location=None,
        tools=[zoom, pan],
        active_scroll=zoom,
        active_drag=pan,
        outline_line_color=None,
        name="heatmap",
    )
    plot.background_fill_alpha = plot.border_fill_alpha = 0
    plot.grid.visible = False
    plot.xaxis.ticker = BasicTicker(desired_num_ticks=10, min_interval=1)
    plot.yaxis.ticker = BasicTicker(desired_num_ticks=10, min_interval=1)
    plot.xaxis.formatter = CustomJSTickFormatter(code="return Number.isInteger(tick) ? String(tick) : ''")
    plot.yaxis.formatter = CustomJSTickFormatter(args={"names": names}, code=_NAME)
    plot.xaxis.axis_label = "step"
    for axis in (*plot.xaxis, *plot.yaxis):
        axis.update(axis_line_color=None, major_tick_line_color=None, minor_tick_line_color=None)
        axis.update(major_label_text_font=_FONT, major_label_text_font_size="11px")
        axis.update(axis_label_text_font=_FONT, axis_label_text_font_size="11px", axis_label_text_font_style="normal")
        axis.update(axis_label_standoff=0)
        paint(axis, major_label_text_color="muted", axis_label_text_color="muted")
    mapper = LinearColorMapper(low=-0.5, high=LATENESS_SHADES + 0.5)
    paint(mapper, palette="lateness_palette")
    plot.image(image="image", x="x", y="y", dw="dw", dh="dh", source=cells, color_mapper=mapper)
    return plot


# Tooltip of a cell of the heatmap of ranks and steps.

_SUPERLATIVES: Final[dict[HeatmapFigure, str]] = {
    "compute": "computes longest",
    "lateness": "arrives latest",
    "wait": "waits longest",
}

_MIN_CAUSE_SHARE: Final = 0.01
"""Minimum share of the step time for the delay of a cause to be listed."""
_MAX_CAUSES: Final = 3
_MAX_PATH_RANKS: Final = 2


def build_cell_tooltip(heatmap: Heatmap, grid: Grid, figure: HeatmapFigure, row: int, column: int) -> tuple[str, Rows]:
    """Return title and lines for a cell: ranks and steps, and the three figures of its largest rank and step.

    Args:
        heatmap: the figures of all ranks and steps.
        grid: cells that are shown.
        figure: figure that is shown, by which the largest is chosen.
        row: row of the cell.
        column: column of the cell.
    """
    ranks, steps = grid.places(row, column)
    first_step = grid.first_step + column * grid.steps_per_column
    last_step = min(first_step + grid.steps_per_column - 1, int(heatmap.steps[-1]))
    when = f"step {first_step}" if first_step == last_step else f"steps {first_step} to {last_step}"
    who = rank_list(heatmap.ranks[ranks].tolist())
    hosts = tuple(dict.fromkeys(heatmap.hosts[rank] for rank in ranks))
    host_text = hosts[0] if len(hosts) == 1 else f"{hosts[0]} to {hosts[-1]}"
    title = f"{capitalize(who)} · {when}"
    peak = grid.peak(heatmap.figures_ns[figure], row, column)
    if peak is None:
        return title, [
            ("host", host_text),
            ("", "left out: ranks share no all-reduces in this step or the one before"),
        ]
    rank, step = peak
    rows: Rows = [("host", host_text)]
    if len(ranks) * len(steps) > 1:
        rows.append((_SUPERLATIVES[figure], f"rank {heatmap.ranks[rank]} in step {heatmap.steps[step]}"))
    compute_ns, lateness_ns, wait_ns = (
        heatmap.figures_ns[name][rank, step] for name in ("compute", "lateness", "wait")
    )
    side = "before" if lateness_ns < 0 else "after"
    return title, [
        *rows,
        ("compute", format_ns(compute_ns)),
        ("arrives", f"{format_ns(abs(lateness_ns))} {side} the median rank"),
        *_list_causes(heatmap, rank, step),
        ("waits", f"{format_ns(wait_ns)} for later ranks" if wait_ns else "for no later rank"),
        ("critical path", _describe_critical_path(heatmap, step)),
    ]


def _list_causes(heatmap: Heatmap, rank: int, step: int) -> Rows:
    """Return the causes that make a rank late, if any."""
    least_ns = _MIN_CAUSE_SHARE * heatmap.step_time_ns
    causes = [(cause, excess_ns) for cause, excess_ns in heatmap.excess_ns(rank, step).items() if excess_ns >= least_ns]
    return [(f"{PART_LABELS[cause]}", f"{format_ns(excess_ns)} longer") for cause, excess_ns in causes[:_MAX_CAUSES]]


def _describe_critical_path(heatmap: Heatmap, step: int) -> str:
    path = heatmap.path_of(step)
    if path is None:
        return "not known"
    by_rank, transfer_ns = path
    through = [f"rank {rank} for {format_ns(own_ns)}" for rank, own_ns in list(by_rank.items())[:_MAX_PATH_RANKS]]
    return ", ".join([*through, f"transfers {format_ns(transfer_ns)}"])


FIGURES: Final[tuple[HeatmapFigure, ...]] = get_args(HeatmapFigure)

MAX_UNGROUPED_RANKS: Final = 64
"""Number of ranks above which hosts are shown first."""

MIN_THIN_ROWS: Final = 32
"""Number of rows from which rows are thin, so that zooming also enlarges them."""


class HeatmapPlot:
    """The heatmap (``root``) and the sources of its messages to the browser.

    Args:
        heatmap: the figures of all ranks and steps.
        figure: figure to show first.
        grouping: one of the heatmap's groupings; by default hosts, if there are several and many ranks.
    """

    def __init__(self, heatmap: Heatmap, figure: HeatmapFigure = "lateness", grouping: Grouping | None = None) -> None:
        """Create the sources and draw the first figure."""
        self._heatmap = heatmap
        is_large = "hosts" in heatmap.groupings and len(heatmap.ranks) > MAX_UNGROUPED_RANKS
        self.figure: HeatmapFigure = figure
        self.grouping: Grouping = grouping or ("hosts" if is_large else "ranks")
        self.cells = ColumnDataSource(data={name: [] for name in ("image", "x", "y", "dw", "dh")})
        self.names = ColumnDataSource(data={"name": []})
        self._rpc = BrowserRpc()
        self.choice = self._rpc.request("choice", ("figure", "grouping", "columns"), self._on_choice)
        self.scale = self._rpc.response("scale", ("low", "half", "high", "largest"))
        self.pointed = self._rpc.request("pointed", ("id", "row", "column"), self._on_pointed)
        self.response = self._rpc.response("answer", (*TOOLTIP_COLUMNS, "rank", "step"))

        first, last = float(heatmap.steps[0]) - 0.5, float(heatmap.steps[-1]) + 0.5
        self.step_range = Range1d(start=first, end=last, bounds=(first, last), min_interval=min(8.0, last - first))
        self.row_range = Range1d(start=1.0, end=0.0)
        self.root = draw_heatmap(self.step_range, self.row_range, self.cells, self.names)
        self._rpc.attach(self.root)
        self._grid = heatmap.grid(self.grouping)
        self.update(self.figure, self.grouping)

    @property
    def start_script(self) -> CustomJS:
        """Return the script that runs when the document is ready: connects mouse, keys, switches and theme."""
        drawn = {name: getattr(self, name) for name in ("root", "step_range", "row_range", "cells")}
        return CustomJS(
            args={"plot": {**drawn, **self._rpc.sources}},
            code="window.overlapscope.startHeatmap(plot)",
        )

    def update(self, figure: HeatmapFigure, grouping: Grouping, max_columns: int = MAX_COLUMNS) -> None:
        """Show another figure, hosts instead of ranks, or as many columns as there is room for."""
        self.figure, self.grouping = figure, grouping
        grid = self._grid = self._heatmap.grid(grouping, max_columns)
        maxima_ns = grid.maxima(self._heatmap.figures_ns[figure])
        low_ns, high_ns = self._heatmap.scale_ns(figure, maxima_ns)
        share = np.clip((maxima_ns - float(low_ns)) / (high_ns - low_ns), 0, 1)
        largest_ns = float(maxima_ns.max())
        rows, columns = maxima_ns.shape
        count = len(grid.names)
        names = [f"rank {name}" for name in grid.names] if grouping == "ranks" else list(grid.names)
        if list(self.names.data["name"]) != names:
            self.names.data = {"name": names}
            closest = count if count < MIN_THIN_ROWS else 8
            self.row_range.update(start=count - 0.5, end=-0.5, bounds=(-0.5, count - 0.5), min_interval=closest)
            self.root.height = compute_height_px(count)
        self.cells.data = {
            "image": [np.where(maxima_ns == NO_VALUE, 0, np.rint(share * LATENESS_SHADES)).astype(np.uint8)],
            "x": [grid.first_step - 0.5],
            "y": [-0.5],
            "dw": [columns * grid.steps_per_column],
            "dh": [rows * grid.each],
        }
        self.scale.data = {
            "low": [format_ns(low_ns) if low_ns else "0"],
            "half": [format_ns((low_ns + high_ns) / 2)],
            "high": [f"{'≥ ' * (largest_ns > high_ns)}{format_ns(high_ns)}"],
            "largest": [f"largest {format_ns(largest_ns)}"],
        }

    def _on_choice(self, args: RequestColumns) -> None:
        self.update(args["figure"][0], args["grouping"][0], int(args["columns"][0]))

    def _on_pointed(self, args: RequestColumns) -> None:
        cell = int(args["row"][0]), int(args["column"][0])
        title, rows = build_cell_tooltip(self._heatmap, self._grid, self.figure, *cell)
        peak = self._grid.peak(self._heatmap.figures_ns[self.figure], *cell)
        rank, step = (-1, -1) if peak is None else (self._heatmap.ranks[peak[0]], self._heatmap.steps[peak[1]])
        self.response.data = build_tooltip_columns(args, title, rows, rank=int(rank), step=int(step))
