"""Heatmaps of ranks and steps, one per figure, as images that the page's script paints."""

from __future__ import annotations

import base64
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from dashboards.pages.stragglers import FIGURE_DESCRIPTIONS
from dashboards.plots.heatmap import FIGURES, HeatmapPlot
from dashboards.rank_map import Heatmap

_MOST_COLUMNS: Final = 400
_MOST_NAMES: Final = 16
_HEIGHT_PX: Final = 208
_MOST_ROW_PX: Final = 26


@dataclass(frozen=True, kw_only=True)
class HeatmapImage:
    """One figure of all ranks and steps."""

    title: str
    hint: str
    rows: int
    columns: int
    shades: str
    """Shade of each cell, a byte each, row by row, in base64."""
    height_px: int
    names: tuple[str, ...]
    """Names of the rows; empty if they are too many."""
    note: str
    """Note on what rows are."""
    first_step: int
    last_step: int
    low: str
    """Label at the lower end of the scale."""
    high: str


def build_heatmap_images(heatmap: Heatmap) -> list[HeatmapImage]:
    """Return the heatmaps of all figures."""
    return [_map(HeatmapPlot(heatmap, figure), heatmap) for figure in FIGURES]


def _map(plot: HeatmapPlot, heatmap: Heatmap) -> HeatmapImage:
    plot.update(plot.figure, plot.grouping, _MOST_COLUMNS)
    image: Any = plot.cells.data["image"][0]
    rows, columns = image.shape
    names = tuple(plot.names.data["name"])
    title, hint = FIGURE_DESCRIPTIONS[plot.figure]
    return HeatmapImage(
        title=title,
        hint=hint,
        rows=rows,
        columns=columns,
        shades=base64.b64encode(np.ascontiguousarray(image).tobytes()).decode(),
        height_px=min(rows * _MOST_ROW_PX, _HEIGHT_PX),
        names=names if len(names) <= _MOST_NAMES and rows == len(names) else (),
        note=f"{names[0]} to {names[-1]}, from top to bottom" if len(names) > 1 else names[0],
        first_step=int(heatmap.steps[0]),
        last_step=int(heatmap.steps[-1]),
        low=plot.scale.data["low"][0],
        high=plot.scale.data["high"][0],
    )
