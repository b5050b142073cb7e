"""Bokeh figure of the heatmap of ranks and steps: steps to the right, rank 0 at the top."""

from __future__ import annotations

from typing import Any, Final

from bokeh.models import (
    BasicTicker,
    ColumnDataSource,
    CustomJSTickFormatter,
    LinearColorMapper,
    PanTool,
    Range1d,
    WheelZoomTool,
)
from bokeh.plotting import figure

from dashboards.theme import LATENESS_SHADES, paint

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
