"""Hatches that distinguish buckets of the same color, over the rectangles of any figure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import numpy as np
from bokeh.models import ColumnDataSource

from dashboards.plots.wide_figure import update_source
from dashboards.theme import HATCHES

_EDGES: Final = ("left", "right", "top", "bottom")


class BucketHatches:
    """One source per hatch: Bokeh makes one image for each source, but many if the hatch were a column."""

    def __init__(self) -> None:
        """Create an empty source per hatch."""
        self.sources = tuple(ColumnDataSource(data={name: [] for name in _EDGES}) for _ in HATCHES)

    def draw(self, plot: Any) -> None:
        """Add the hatches to a figure, above what was drawn before."""
        for source, hatch in zip(self.sources, HATCHES, strict=True):
            plot.quad(
                **{name: name for name in _EDGES},
                source=source,
                fill_color=None,
                line_color=None,
                hatch_pattern=hatch,
                hatch_alpha=0.32,
                hatch_scale=9,
                hatch_weight=1.0,
                hatch_color="black",  # readable on all colors of buckets
            )

    def update(self, columns: Mapping[str, Any]) -> None:
        """Hatch rectangles.

        Args:
            columns: left, right, top, bottom, and the number of the pattern.
        """
        patterns = np.asarray(columns["pattern"])
        for number, source in enumerate(self.sources, start=1):
            rows = np.flatnonzero(patterns == number)
            update_source(source, {name: np.asarray(columns[name])[rows] for name in _EDGES})
