"""Names of spans in their lanes."""

from __future__ import annotations

from typing import Any

from bokeh.models import ColumnDataSource, LinearColorMapper

from dashboards.plots.wide_figure import SMALL_TEXT
from dashboards.theme import paint
from overlapscope.analysis.lanes import CATEGORIES


def make_span_mapper(palette: str = "span_colors") -> LinearColorMapper:
    """Return the mapping from categories of spans to colors, or to text colors that are readable on them.

    Args:
        palette: a role of ``dashboards.theme``.
    """
    mapper = LinearColorMapper(low=-0.5, high=len(CATEGORIES) - 0.5)
    paint(mapper, palette=palette)
    return mapper


def draw_span_text(plot: Any, source: ColumnDataSource, **options: Any) -> None:
    """Draw the names in a source (x, y, text, category), on the color of the span without its hatches."""
    plot.text(
        x="x",
        y="y",
        text="text",
        source=source,
        text_color={"field": "category", "transform": make_span_mapper("span_text_colors")},
        background_fill_color={"field": "category", "transform": make_span_mapper()},
        **SMALL_TEXT,
        **options,
    )
