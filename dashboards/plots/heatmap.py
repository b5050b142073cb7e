"""Heatmap of ranks and steps: one image, in which late, slow and waiting ranks are dark.

The browser requests, the server responds: which figure to show, and what is in the cell under the pointer. Zooming and
panning need no response, as the image holds all cells.
"""

from __future__ import annotations

from typing import Final, get_args

import numpy as np
from bokeh.models import ColumnDataSource, CustomJS, Range1d

from dashboards.plots.dialogue import TOOLTIP_COLUMNS, BrowserRpc, RequestColumns, build_tooltip_columns
from dashboards.plots.heatmap_figure import compute_height_px, draw_heatmap
from dashboards.plots.heatmap_tooltip import build_cell_tooltip
from dashboards.theme import LATENESS_SHADES
from overlapscope.analysis.heatmap import MAX_COLUMNS, NO_VALUE, Grouping, Heatmap, HeatmapFigure
from overlapscope.units import format_ns

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

        steps = heatmap.steps
        first, last = float(steps[0]) - 0.5, float(steps[-1]) + 0.5
        self.step_range = Range1d(start=first, end=last, bounds=(first, last), min_interval=min(8.0, last - first))
        self.row_range = Range1d(start=1.0, end=0.0)
        self.root = draw_heatmap(self.step_range, self.row_range, self.cells, self.names)
        self._rpc.attach(self.root)
        self._grid = heatmap.grid(self.grouping)
        self.update(self.figure, self.grouping)

    @property
    def start_script(self) -> CustomJS:
        """A script that the browser runs when the document is ready: connects mouse, keys, switches and theme."""
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
