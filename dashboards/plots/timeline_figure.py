"""Bokeh figures of the timeline: lanes, and above them their time axis, which stays in place when lanes scroll."""

from __future__ import annotations

from typing import Any, Final

from bokeh.models import (
    ColumnDataSource,
    CrosshairTool,
    CustomJSTickFormatter,
    LinearColorMapper,
    Range1d,
)
from bokeh.models.annotations import Span

from dashboards.plots.bucket_hatches import BucketHatches
from dashboards.plots.lane_layout import LaneLayout
from dashboards.plots.span_text import draw_span_text, make_span_mapper
from dashboards.plots.wide_figure import SMALL_TEXT, fit_ticks, make_wide_figure, style_axis
from dashboards.theme import SHADES, paint
from overlapscope.analysis.lanes import CATEGORIES

AXIS_HEIGHT_PX: Final = 44


def draw_lanes(
    layout: LaneLayout,
    time_range: Range1d,
    *,
    spans: ColumnDataSource,
    hatches: BucketHatches,
    segments: ColumnDataSource,
    shades: ColumnDataSource,
    labels: ColumnDataSource,
    unfinished: ColumnDataSource,
    step_lines: ColumnDataSource,
    outlines: ColumnDataSource,
    ideal_ends: ColumnDataSource,
    exposed: ColumnDataSource,
    path: ColumnDataSource,
) -> Any:
    """Draw all lanes of the ranks shown; y is pixels from the top."""
    plot = _make_figure(time_range, Range1d(start=layout.height_px, end=0), layout.height_px, "lanes")
    plot.xaxis.visible = False

    shade_mapper = LinearColorMapper(low=-0.5, high=len(CATEGORIES) * SHADES - 0.5)
    paint(shade_mapper, palette="shade_palette")
    plot.image(image="image", x="x", y="y", dw="dw", dh="dh", source=shades, color_mapper=shade_mapper, level="glyph")
    gaps = [layout.lane_px(lane)[edge] for lane in range(layout.ranks * 4) for edge in (0, 1)]
    paint(plot.hspan(y=gaps, line_width=2, level="glyph").glyph, line_color="surface")

    colour = {"field": "category", "transform": make_span_mapper()}
    plot.quad(
        left="left",
        right="right",
        top="top",
        bottom="bottom",
        source=spans,
        fill_color=colour,
        fill_alpha="alpha",
        line_color=None,
    )
    hatches.draw(plot)
    strips = plot.quad(
        left="left", right="right", top="top", bottom="bottom", source=segments, fill_alpha="alpha", line_width=1
    )
    paint(strips.glyph, fill_color="surface", line_color="surface")
    hatched = plot.quad(
        left="left",
        right="right",
        top="top",
        bottom="bottom",
        source=unfinished,
        fill_color=None,
        hatch_pattern="right_diagonal_line",
        hatch_scale=8,
        hatch_weight=1.5,
        line_width=1.5,
        line_dash="dashed",
    )
    paint(hatched.glyph, hatch_color="exposed", line_color="exposed")
    brackets = plot.line(x="x", y="y", source=exposed, line_width=2, line_join="miter")
    paint(brackets.glyph, line_color="exposed")
    begins = plot.vspan(x="x", source=step_lines, line_width=1, level="overlay", line_dash=[2, 3])
    paint(begins.glyph, line_color="faint")
    draw_span_text(plot, labels)
    ideal = plot.quad(
        left="left", right="right", top="top", bottom="bottom", source=outlines, fill_color=None, line_width=1.5
    )
    paint(ideal.glyph, line_color="accent")
    for role, line_width in (("surface", 6), ("ink", 2.5)):  # a line on a halo is visible on any color
        paint(plot.line(x="x", y="y", source=path, line_width=line_width, level="overlay").glyph, line_color=role)
    ends = plot.vspan(x="x", source=ideal_ends, line_width=1.5, level="overlay")
    paint(ends.glyph, line_color="accent")
    return plot


def draw_axis(
    time_range: Range1d, step_lines: ColumnDataSource, ideal_ends: ColumnDataSource, tick_label_script: str
) -> Any:
    """Draw the time axis, the numbers of the steps, and how much earlier the ideal ends."""
    plot = _make_figure(time_range, Range1d(start=0, end=1), AXIS_HEIGHT_PX, "axis", x_axis_location="above")
    axis = plot.xaxis[0]
    fit_ticks(plot, 10)
    axis.formatter = CustomJSTickFormatter(code=tick_label_script)
    style_axis(axis)
    numbers = plot.text(x="x", y=0.5, text="label", source=step_lines, x_offset=4, **SMALL_TEXT)
    paint(numbers.glyph, text_color="muted")
    begins = plot.vspan(x="x", source=step_lines, line_width=1, line_dash=[2, 3])
    paint(begins.glyph, line_color="faint")
    gains = plot.text(x="x", y=0.5, text="label", source=ideal_ends, x_offset=-5, text_align="right", **SMALL_TEXT)
    paint(gains.glyph, text_color="accent")
    return plot


def _make_figure(time_range: Range1d, y_range: Range1d, height_px: int, name: str, **options: Any) -> Any:
    line = Span(dimension="height", line_width=1)
    paint(line, line_color="accent")
    return make_wide_figure(time_range, y_range, height_px, name, tools=[CrosshairTool(overlay=line)], **options)
