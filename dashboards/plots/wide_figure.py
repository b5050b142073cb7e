"""Page-wide Bokeh figures, in which the wheel zooms and a drag pans along x only, and the spans drawn in them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
from bokeh.core.properties import value
from bokeh.models import (
    BasicTicker,
    ColumnDataSource,
    CustomJS,
    CustomJSTickFormatter,
    LinearColorMapper,
    PanTool,
    Range1d,
    Tool,
    WheelZoomTool,
)
from bokeh.plotting import figure

from dashboards.assets import read_asset
from dashboards.theme import HATCHES, paint
from overlapscope.breakdown.lanes import CATEGORIES

FONT: Final = "system-ui, sans-serif"
_TICK_PX: Final = 84
"""Width of the longest label with some space."""
TIME_AXIS_PX: Final = 24
"""Height of a figure of nothing but a time axis."""
Columns = dict[str, Any]
"""Columns of a source."""
LETTER_PX: Final = 6.4
"""Width of a letter of a name on a span, as estimated where the text is not drawn."""
MIN_LABELED_PX: Final = 11
"""Height of a span below which it has no name."""
EDGES: Final = {name: name for name in ("left", "right", "top", "bottom")}
"""Columns of rectangles, as arguments of ``quad``."""
SMALL_TEXT: Final = {"text_baseline": "middle", "text_font": value(FONT), "text_font_size": "11px"}


def make_wide_figure(
    x_range: Range1d, y_range: Range1d, height_px: int, name: str, *, tools: Sequence[Tool] = (), **options: Any
) -> Any:
    """Create the figure, without a frame, a grid or a y axis.

    Args:
        x_range: range in view.
        y_range: range in view, always all of it.
        height_px: height of the figure.
        name: name by which the page finds it.
        tools: further tools in addition to zoom and pan.
        **options: further options of ``bokeh.plotting.figure``.
    """
    zoom, pan = WheelZoomTool(dimensions="width", zoom_on_axis=False), PanTool(dimensions="width")
    plot = figure(
        x_range=x_range,
        y_range=y_range,
        height=height_px,
        sizing_mode="stretch_width",
        min_border=0,
        toolbar_location=None,
        tools=[zoom, pan, *tools],
        active_scroll=zoom,
        active_drag=pan,
        outline_line_color=None,
        name=name,
        lod_threshold=None,
        **options,
    )
    plot.background_fill_alpha = plot.border_fill_alpha = 0
    plot.yaxis.visible = False
    plot.grid.visible = False
    return plot


def style_axis(axis: Any) -> None:
    """Style an axis above lanes: small labels without a frame."""
    axis.update(major_label_text_font=FONT, major_label_text_font_size="11px", minor_tick_line_color=None)
    axis.update(major_tick_in=0, major_tick_out=4, major_label_standoff=3)
    paint(axis, major_label_text_color="muted", axis_line_color="line", major_tick_line_color="line")


def fit_ticks(plot: Any, most: int, **options: Any) -> None:
    """Set as many ticks on the x axis as there is room for, such as few on a phone.

    Args:
        plot: the figure.
        most: number of ticks on a wide page.
        **options: further options of ``BasicTicker``.
    """
    ticker = BasicTicker(desired_num_ticks=most, **options)
    plot.xaxis.ticker = ticker
    ticks = f"Math.max(2, Math.min({most}, Math.floor(cb_obj.inner_width / {_TICK_PX})))"
    code = f"ticker.setv({{desired_num_ticks: {ticks}}}, {{sync: false}})"
    plot.js_on_change("inner_width", CustomJS(args={"ticker": ticker}, code=code))


def draw_time_axis(time_range: Range1d, name: str, height_px: int = TIME_AXIS_PX, **options: Any) -> Any:
    """Create the figure with the time axis above lanes, which are another figure so that they can be scrolled.

    Args:
        time_range: range in view.
        name: name by which the page finds it.
        height_px: height of the figure.
        **options: further options of ``make_wide_figure``.
    """
    plot = make_wide_figure(time_range, Range1d(start=0, end=1), height_px, name, x_axis_location="above", **options)
    fit_ticks(plot, 10)
    plot.xaxis.formatter = CustomJSTickFormatter(code=read_asset("time_ticks.js"))
    style_axis(plot.xaxis[0])
    plot.vspan(x=[0.0], line_alpha=0)  # Bokeh warns about a figure without renderers
    return plot


def make_span_mapper(palette: str = "span_colors") -> LinearColorMapper:
    """Return the mapping from categories of spans to colors, or to text colors that are readable on them.

    Args:
        palette: a role of ``dashboards.theme``.
    """
    mapper = LinearColorMapper(low=-0.5, high=len(CATEGORIES) - 0.5)
    paint(mapper, palette=palette)
    return mapper


def draw_spans(plot: Any, source: ColumnDataSource, **options: Any) -> Any:
    """Draw the rectangles in a source (left, right, top, bottom, category) in the color of their category."""
    color = {"field": "category", "transform": make_span_mapper()}
    return plot.quad(**EDGES, source=source, fill_color=color, **{"line_color": None, **options})


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


def make_empty_columns(*names: str) -> Columns:
    """Return columns without rows."""
    return {name: [] for name in names}


def update_source(source: ColumnDataSource, columns: Mapping[str, Any]) -> None:
    """Replace the columns of a source. Messages cost the browser time, so an empty source is not sent again."""
    if _is_filled(columns) or _is_filled(source.data):
        source.data = dict(columns)


def _is_filled(columns: Any) -> bool:
    return any(len(values) > 0 for values in columns.values())


# Hatches that distinguish buckets of the same color, over the rectangles of any figure.


class BucketHatches:
    """One source per hatch: Bokeh makes one image for each source, but many if the hatch were a column."""

    def __init__(self) -> None:
        """Create an empty source per hatch."""
        self.sources = tuple(ColumnDataSource(data={name: [] for name in EDGES}) for _ in HATCHES)

    def draw(self, plot: Any) -> None:
        """Add the hatches to a figure, above what was drawn before."""
        for source, hatch in zip(self.sources, HATCHES, strict=True):
            plot.quad(
                **EDGES,
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
            update_source(source, {name: np.asarray(columns[name])[rows] for name in EDGES})
