"""Bokeh figures of the lanes of collectives: the lanes, and above them their numbers and steps."""

from __future__ import annotations

from typing import Any, Final

from bokeh.core.properties import value
from bokeh.models import (
    ColumnDataSource,
    CustomJSTickFormatter,
    LinearColorMapper,
    Range1d,
)

from dashboards.plots.order_layout import OrderLayout
from dashboards.plots.wide_figure import FONT, SMALL_TEXT, fit_ticks, make_wide_figure, style_axis
from dashboards.theme import paint
from overlapscope.diagnosis.categories import CATEGORIES

AXIS_HEIGHT_PX: Final = 62
_EDGES: Final = {"left": "left", "right": "right", "top": "top", "bottom": "bottom"}


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
    empty = plot.quad(**_EDGES, source=missing, fill_color=None, line_width=1, line_dash=[3, 3])
    paint(empty.glyph, line_color="faint")

    mapper = LinearColorMapper(low=-0.5, high=len(CATEGORIES) - 0.5)
    paint(mapper, palette="collective_colors")
    colour = {"field": "category", "transform": mapper}
    plot.quad(
        **_EDGES,
        source=cells,
        fill_color=colour,
        fill_alpha="alpha",
        line_color=colour,
        hatch_pattern="hatch",
        hatch_color=colour,
        hatch_alpha=0.35,
        hatch_scale=8,
        hatch_weight=1.5,
    )
    begins = plot.vspan(x="x", source=steps, line_width=1, level="glyph", line_dash=[2, 3])
    paint(begins.glyph, line_color="muted")
    # Not everybody can distinguish red from some of the colors, so a line in the page's background color surrounds it.
    for role, width in (("surface", 5.5), ("exposed", 2.5)):
        marks = plot.quad(**_EDGES, source=differing, fill_color=None, line_width=width, level="overlay")
        paint(marks.glyph, line_color=role)
    chosen = plot.quad(**_EDGES, source=selected, fill_color=None, line_width=2.5, level="overlay")
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
    begins = plot.vspan(x="x", source=steps, line_width=1, line_dash=[2, 3])
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
        x="middle", y=28, text="label", source=band, text_align="center", text_font_style="bold", **SMALL_TEXT
    )
    paint(flag.glyph, text_color="exposed")
    return plot
