"""The figures of the timeline: lanes, and above them their time axis, which stays in place when lanes scroll."""

from __future__ import annotations

from typing import Any, Final

from bokeh.core.properties import value
from bokeh.models import (
    BasicTicker,
    ColumnDataSource,
    CrosshairTool,
    CustomJSTickFormatter,
    LinearColorMapper,
    PanTool,
    Range1d,
    WheelZoomTool,
)
from bokeh.models.annotations import Span
from bokeh.plotting import figure

from dashboards.plots.lane_layout import LaneLayout
from dashboards.theme import SHADES, paint
from overlapscope.analysis.lanes import CATEGORIES

AXIS_HEIGHT_PX: Final = 44
_FONT: Final = "system-ui, sans-serif"


def draw_lanes(
    layout: LaneLayout,
    time_range: Range1d,
    *,
    spans: ColumnDataSource,
    shades: ColumnDataSource,
    labels: ColumnDataSource,
    unfinished: ColumnDataSource,
    step_lines: ColumnDataSource,
    outlines: ColumnDataSource,
    ideal_ends: ColumnDataSource,
) -> Any:
    """All lanes of the ranks shown; y is pixels from the top."""
    plot = _plot(time_range, Range1d(start=layout.height_px, end=0), layout.height_px, "lanes")
    plot.yaxis.visible = False
    plot.xaxis.visible = False
    plot.grid.visible = False

    shade_mapper = LinearColorMapper(low=-0.5, high=len(CATEGORIES) * SHADES - 0.5)
    paint(shade_mapper, palette="shade_palette")
    plot.image(image="image", x="x", y="y", dw="dw", dh="dh", source=shades, color_mapper=shade_mapper, level="glyph")
    gaps = [layout.lane_px(lane)[edge] for lane in range(layout.ranks * 4) for edge in (0, 1)]
    paint(plot.hspan(y=gaps, line_width=2, level="glyph").glyph, line_color="surface")

    span_mapper = LinearColorMapper(low=-0.5, high=len(CATEGORIES) - 0.5)
    paint(span_mapper, palette="span_colours")
    colour = {"field": "category", "transform": span_mapper}
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
    begins = plot.vspan(x="x", source=step_lines, line_width=1, level="overlay", line_dash=[2, 3])
    paint(begins.glyph, line_color="faint")
    names = plot.text(
        x="x", y="y", text="text", source=labels, text_baseline="middle", text_font=value(_FONT), text_font_size="11px"
    )
    paint(names.glyph, text_color="on_span")
    ideal = plot.quad(
        left="left", right="right", top="top", bottom="bottom", source=outlines, fill_color=None, line_width=1.5
    )
    paint(ideal.glyph, line_color="accent")
    ends = plot.vspan(x="x", source=ideal_ends, line_width=1.5, level="overlay")
    paint(ends.glyph, line_color="accent")
    return plot


def draw_axis(
    time_range: Range1d, step_lines: ColumnDataSource, ideal_ends: ColumnDataSource, tick_label_script: str
) -> Any:
    """The time axis, the numbers of the steps, and how much earlier they would have ended."""
    plot = _plot(time_range, Range1d(start=0, end=1), AXIS_HEIGHT_PX, "axis", x_axis_location="above")
    plot.yaxis.visible = False
    plot.grid.visible = False
    axis = plot.xaxis[0]
    axis.ticker = BasicTicker(desired_num_ticks=10)
    axis.formatter = CustomJSTickFormatter(code=tick_label_script)
    axis.update(major_label_text_font=_FONT, major_label_text_font_size="11px", minor_tick_line_color=None)
    axis.update(major_tick_in=0, major_tick_out=4, major_label_standoff=3)
    paint(axis, major_label_text_color="muted", axis_line_color="line", major_tick_line_color="line")
    numbers = plot.text(
        x="x",
        y=0.5,
        text="label",
        source=step_lines,
        x_offset=4,
        text_baseline="middle",
        text_font=value(_FONT),
        text_font_size="11px",
    )
    paint(numbers.glyph, text_color="muted")
    begins = plot.vspan(x="x", source=step_lines, line_width=1, line_dash=[2, 3])
    paint(begins.glyph, line_color="faint")
    gains = plot.text(
        x="x",
        y=0.5,
        text="label",
        source=ideal_ends,
        x_offset=-5,
        text_align="right",
        text_baseline="middle",
        text_font=value(_FONT),
        text_font_size="11px",
    )
    paint(gains.glyph, text_color="accent")
    return plot


def _plot(time_range: Range1d, y_range: Range1d, height_px: int, name: str, **options: Any) -> Any:
    line = Span(dimension="height", line_width=1)
    paint(line, line_color="accent")
    crosshair = CrosshairTool(overlay=line)
    zoom, pan = WheelZoomTool(dimensions="width", zoom_on_axis=False), PanTool(dimensions="width")
    plot = figure(
        x_range=time_range,
        y_range=y_range,
        height=height_px,
        sizing_mode="stretch_width",
        min_border=0,
        toolbar_location=None,
        tools=[zoom, pan, crosshair],
        active_scroll=zoom,
        active_drag=pan,
        outline_line_color=None,
        name=name,
        lod_threshold=None,
        **options,
    )
    plot.background_fill_alpha = plot.border_fill_alpha = 0
    return plot
