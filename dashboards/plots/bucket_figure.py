"""Bokeh figures of the Buckets page: step time against bucket size, two steps, and a plan."""

from __future__ import annotations

from typing import Any, Final

from bokeh.models import (
    BasicTicker,
    ColumnDataSource,
    CustomJSTickFormatter,
    FixedTicker,
    Range1d,
)
from bokeh.plotting import figure

from dashboards.assets import read_asset
from dashboards.plots.bucket_hatches import BucketHatches
from dashboards.plots.bucket_layout import BucketLayout
from dashboards.plots.span_text import draw_span_text, make_span_mapper
from dashboards.plots.wide_figure import SMALL_TEXT, fit_ticks, make_wide_figure, style_axis
from dashboards.theme import paint

CURVE_LEFT_PX: Final = 66
CURVE_RIGHT_PX: Final = 18
"""Margins to the left and right of the curve's frame, which the slider below it also has."""
_SIZES_MB: Final = [mantissa * 10.0**exponent for exponent in range(-4, 6) for mantissa in (1, 2, 5)]
_SIZE_LABELS: Final = "return tick.toLocaleString('en-US', {maximumSignificantDigits: 3}) + ' MB'"
_CURVE_HEIGHT_PX: Final = 220
_AXIS_HEIGHT_PX: Final = 24
_STRIP_HEIGHT_PX: Final = 30
_EDGES: Final = {"left": "left", "right": "right", "top": "top", "bottom": "bottom"}


def draw_curve(
    size_range: Range1d,
    time_range: Range1d,
    *,
    curve: ColumnDataSource,
    free: ColumnDataSource,
    marks: ColumnDataSource,
    measured: ColumnDataSource,
    chosen: ColumnDataSource,
) -> Any:
    """Draw the predicted step time against bucket size; x is MB."""
    plot: Any = figure(
        x_range=size_range,
        y_range=time_range,
        x_axis_type="log",
        height=_CURVE_HEIGHT_PX,
        sizing_mode="stretch_width",
        min_border=0,
        min_border_left=CURVE_LEFT_PX,
        min_border_right=CURVE_RIGHT_PX,
        toolbar_location=None,
        tools=[],
        outline_line_color=None,
        name="curve",
    )
    plot.background_fill_alpha = plot.border_fill_alpha = 0
    plot.xaxis.ticker = FixedTicker(ticks=_SIZES_MB)
    plot.xaxis.formatter = CustomJSTickFormatter(code=_SIZE_LABELS)
    plot.yaxis.ticker = BasicTicker(desired_num_ticks=5)
    plot.yaxis.formatter = CustomJSTickFormatter(code=read_asset("time_ticks.js"))
    for axis in (*plot.xaxis, *plot.yaxis):
        style_axis(axis)
    plot.yaxis.update(axis_line_color=None, major_tick_line_color=None)
    for grid in plot.grid:
        paint(grid, grid_line_color="grid")
    band = plot.varea(x="x", y1="low", y2="high", source=curve, fill_alpha=0.17)
    paint(band.glyph, fill_color="accent")
    best = plot.hspan(y="y", source=free, line_width=1.5, line_dash=[6, 4])
    paint(best.glyph, line_color="hidden")
    name = plot.text(
        x="x", y="y", text="text", source=free, text_align="align", x_offset="x_offset", y_offset=9, **SMALL_TEXT
    )
    paint(name.glyph, text_color="hidden")
    now = plot.vspan(x="x", source=chosen, line_width=1.5)
    paint(now.glyph, line_color="accent")
    line = plot.line(x="x", y="predicted", source=curve, line_width=2, line_join="round")
    paint(line.glyph, line_color="accent")
    spread = plot.segment(x0="x", x1="x", y0="low", y1="high", source=measured, line_width=1.5)
    paint(spread.glyph, line_color="ink")
    points = plot.scatter(x="x", y="y", source=measured, size=8, line_width=1.5)
    paint(points.glyph, line_color="ink", fill_color="surface")
    dots = plot.scatter(x="x", y="y", source=marks, size=11, marker="diamond", line_color=None)
    paint(dots.glyph, fill_color="hidden")
    names = plot.text(
        x="x",
        y="y",
        text="text",
        source=marks,
        text_align="align",
        x_offset="x_offset",
        y_offset="y_offset",
        **SMALL_TEXT,
    )
    names.glyph.update(background_fill_alpha=0.8, padding=1)
    paint(names.glyph, text_color="ink", background_fill_color="surface")
    dot = plot.scatter(x="x", y="y", source=chosen, size=11, line_width=2)
    paint(dot.glyph, fill_color="accent", line_color="surface")
    return plot


def draw_steps(
    layout: BucketLayout,
    time_range: Range1d,
    *,
    spans: tuple[ColumnDataSource, ...],
    hatches: tuple[BucketHatches, ...],
    ready: tuple[ColumnDataSource, ...],
    labels: tuple[ColumnDataSource, ...],
    ends: tuple[ColumnDataSource, ...],
) -> Any:
    """Draw the recorded step and below it the predicted one; y is pixels from the top."""
    plot = make_wide_figure(time_range, Range1d(start=layout.height_px, end=0), layout.height_px, "steps")
    plot.xaxis.visible = False
    colour = {"field": "category", "transform": make_span_mapper()}
    for source in spans:
        plot.quad(**_EDGES, source=source, fill_color=colour, line_color=None)
    for each in hatches:
        each.draw(plot)
    for source in ready:
        plot.segment(x0="x", x1="x", y0="top", y1="bottom", source=source, line_color=colour, line_width=3)
    for source in ends:
        line = plot.segment(x0="x", x1="x", y0="top", y1="bottom", source=source, line_width=1.5, line_dash=[4, 3])
        paint(line.glyph, line_color="ink")
        text = plot.text(x="x", y="y", text="text", source=source, x_offset=-6, text_align="right", **SMALL_TEXT)
        paint(text.glyph, text_color="ink")
    for source in labels:
        draw_span_text(plot, source)
    return plot


def draw_time(time_range: Range1d) -> Any:
    """Draw the time axis above the two steps."""
    plot = make_wide_figure(time_range, Range1d(start=0, end=1), _AXIS_HEIGHT_PX, "time", x_axis_location="above")
    axis = plot.xaxis[0]
    fit_ticks(plot, 10)
    axis.formatter = CustomJSTickFormatter(code=read_asset("time_ticks.js"))
    style_axis(axis)
    # Bokeh warns about a figure without renderers.
    plot.vspan(x=[0.0], line_alpha=0)
    return plot


def draw_strip(total_bytes: int, strip: ColumnDataSource, hatches: BucketHatches, labels: ColumnDataSource) -> Any:
    """Draw the plan, from the first gradient to the last; x is bytes."""
    plot = make_wide_figure(
        Range1d(start=0, end=max(1, total_bytes)), Range1d(start=0, end=1), _STRIP_HEIGHT_PX, "strip"
    )
    plot.xaxis.visible = False
    plot.toolbar.tools = []
    colour = {"field": "category", "transform": make_span_mapper()}
    parts = plot.quad(**_EDGES, source=strip, fill_color=colour, line_width=1)
    paint(parts.glyph, line_color="surface")
    hatches.draw(plot)
    draw_span_text(plot, labels, text_align="center")
    return plot
