"""Trend plot of one figure over the steps of a run: mean and range of all ranks, and each rank if they are few."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import pandas as pd
from bokeh.models import BasicTicker, ColumnDataSource, CustomJS, CustomJSTickFormatter, DataRange1d, Range1d
from bokeh.models.annotations import BoxAnnotation
from bokeh.plotting import figure

from dashboards.assets import read_asset
from dashboards.theme import paint
from overlapscope.analysis.summary import Summary
from overlapscope.analysis.trend import trend_by_rank, trend_by_step
from overlapscope.units import format_ns, format_share

_MAX_RANK_LINES: Final = 8
_HEIGHT_PX: Final = 190
_PERCENT_LABELS: Final = "return Math.round(tick * 100) + ' %'"


@dataclass(frozen=True, kw_only=True)
class TrendFigure:
    """A figure that a trend shows."""

    column: str
    """Column of ``figures_of``."""
    title: str
    colour: str
    """Role in ``dashboards.theme`` that gives the color."""
    is_share: bool = False

    @property
    def format(self) -> Callable[[float], str]:
        """The function that formats its values."""
        return format_share if self.is_share else format_ns


FIGURES: Final = (
    TrendFigure(column="step_time_ns", title="Step time", colour="accent"),
    TrendFigure(column="exposed_ns", title="Exposed communication", colour="exposed"),
    TrendFigure(column="overlap_ratio", title="Overlap ratio", colour="hidden", is_share=True),
)


class TrendPlot:
    """A trend (``root``), the points of its mean (``source``) and of its ranks (``rank_lines``).

    ``y_range`` is the visible range of the figure, ``warm_up`` marks the steps that are excluded as warm-up.
    """

    def __init__(self, shown: TrendFigure, summary: Summary) -> None:
        """Create the sources and draw the trend."""
        self.shown = shown
        self.source = ColumnDataSource(data={name: [] for name in ("step", "low", "mean", "high", "text")})
        self.rank_lines = ColumnDataSource(data={"xs": [], "ys": []})
        self.y_range = Range1d(start=0, end=1)
        self.warm_up = BoxAnnotation(fill_alpha=0.6, line_color=None, level="underlay")
        self.root = self._draw()
        self.update(summary)

    @property
    def start_script(self) -> CustomJS:
        """A script that the browser runs when the document is ready: shows values, and a click opens the timeline."""
        return CustomJS(
            args={"plot": self.root, "source": self.source},
            code="window.overlapscope.startTrend(plot, source)",
        )

    def update(self, summary: Summary) -> None:
        """Show another recording."""
        per_step = summary.finished_together
        trend = trend_by_step(per_step, self.shown.column)
        self.source.data = {
            **{name: trend[name].to_numpy() for name in ("step", "low", "mean", "high")},
            "text": [self._text(*point) for point in trend.itertuples(index=False, name=None)],
        }
        lines: list[pd.DataFrame] = []
        if per_step["rank"].nunique() <= _MAX_RANK_LINES:
            lines = [line for _, line in trend_by_rank(per_step, self.shown.column).groupby("rank")]
        self.rank_lines.data = {
            "xs": [line["step"].to_numpy() for line in lines],
            "ys": [line["mean"].to_numpy() for line in lines],
        }
        warm_up = max(
            (step for excluded in summary.alike.excluded if excluded.why == "warm-up" for step in excluded.steps),
            default=None,
        )
        self.warm_up.visible = warm_up is not None
        if warm_up is not None:
            self.warm_up.update(right=warm_up + 0.5)
        # The first steps are often ten times as long; a chart scaled to them would show nothing else.
        usual = summary.figures.loc[summary.is_steady, self.shown.column].dropna()
        high = 1.0 if self.shown.is_share else 1.2 * float(np.quantile(usual, 0.99)) if len(usual) else 0.0
        self.y_range.end = 1.04 if self.shown.is_share else high or 1e6

    def _text(self, step: int, last_step: int, low: float, mean: float, high: float) -> str:
        where = f"step {step}" if step == last_step else f"steps {step} to {last_step}"
        text = self.shown.format(mean)
        return f"{where}: {text}" + ("" if low == high else f", {self.shown.format(low)} to {self.shown.format(high)}")

    def _draw(self) -> Any:
        plot = figure(
            height=_HEIGHT_PX,
            sizing_mode="stretch_width",
            x_range=DataRange1d(range_padding=0.01),
            y_range=self.y_range,
            min_border=0,
            min_border_right=14,
            toolbar_location=None,
            tools=[],
            outline_line_color=None,
            name=self.shown.column,
        )
        plot.background_fill_alpha = plot.border_fill_alpha = 0
        plot.xgrid.visible = False
        plot.xaxis.ticker = BasicTicker(desired_num_ticks=6, min_interval=1)
        plot.yaxis.ticker = BasicTicker(desired_num_ticks=4)
        plot.yaxis.formatter = CustomJSTickFormatter(
            code=_PERCENT_LABELS if self.shown.is_share else read_asset("time_ticks.js")
        )
        paint(plot.ygrid[0], grid_line_color="grid")
        for axis in (*plot.xaxis, *plot.yaxis):
            axis.update(axis_line_color=None, major_tick_line_color=None, minor_tick_line_color=None)
            axis.update(major_label_text_font="system-ui, sans-serif", major_label_text_font_size="11px")
            paint(axis, major_label_text_color="muted")
        paint(self.warm_up, fill_color="grid")
        plot.add_layout(self.warm_up)
        colour = self.shown.colour
        band = plot.varea(x="step", y1="low", y2="high", source=self.source, fill_alpha=0.16)
        paint(band.glyph, fill_color=colour)
        ranks = plot.multi_line(xs="xs", ys="ys", source=self.rank_lines, line_width=1, line_alpha=0.35)
        paint(ranks.glyph, line_color=colour)
        mean = plot.line(x="step", y="mean", source=self.source, line_width=2, line_join="round")
        paint(mean.glyph, line_color=colour)
        return plot
