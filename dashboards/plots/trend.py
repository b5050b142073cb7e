"""Trend plot of one figure over the steps of a run, and the sparkline of step times in a table."""

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
from dashboards.run_facts import StepTimes
from dashboards.theme import paint
from overlapscope.breakdown.summary import Summary
from overlapscope.breakdown.trend import add_breaks, count_steps_per_point, trend_by_step
from overlapscope.machine.conditions import KIND_OF
from overlapscope.machine.of_steps import MachineSummary
from overlapscope.machine.text import CONDITION_LABELS
from overlapscope.text import format_ns, format_share

# Sparkline of step times in a table.

WIDTH_PX: Final = 120
HEIGHT_PX: Final = 22
_MAX_MEDIANS: Final = 2.0
"""The upper edge, in median step times: a first step of a hundred times as long must not flatten the rest."""


def build_sparkline_path(times: StepTimes) -> str:
    """Return the line as an SVG path; zero is at the lower edge. Larger values are clipped to the upper edge."""
    shares = np.asarray(times.times_ns) / max(1.0, _MAX_MEDIANS * float(np.median(times.times_ns)))
    y = HEIGHT_PX - 1 - (HEIGHT_PX - 2) * np.clip(shares, 0, 1)
    x = np.linspace(1, WIDTH_PX - 1, len(y)) if len(y) > 1 else np.array([1.0])
    points = [f"{left:.1f},{top:.1f}" for left, top in zip(x, y, strict=True)]
    return f"M{' L'.join(points)}" + (f" H{WIDTH_PX - 1}" if len(points) == 1 else "")


# Trends.

MAX_POINTS: Final = 60
"""Maximum number of points of a trend: on a card a few hundred pixels wide, more would be a scribble."""
_HEIGHT_PX: Final = 190
_MAX_ABOVE_STEADY: Final = 2.0
"""How high the axis reaches at most, in the highest of the steady steps: first steps are often ten times as long, and
would flatten the rest. What is higher has a mark at the upper edge."""
_PERCENT_LABELS: Final = "return Math.round(tick * 100) + ' %'"
_POINT_COLUMNS: Final = ("step", "low", "usual_low", "middle", "usual_high", "high")


def has_trend(summary: Summary) -> bool:
    """Return whether enough steps have been finished for a line."""
    return summary.finished_together["step"].nunique() > 1


@dataclass(frozen=True, kw_only=True)
class TrendFigure:
    """A figure that a trend shows."""

    column: str
    """Column of ``Summary.figures``."""
    title: str
    color: str
    """Role in ``dashboards.theme`` that gives the color."""
    is_share: bool = False

    @property
    def format(self) -> Callable[[float], str]:
        """Return the function that formats its values."""
        return format_share if self.is_share else format_ns


FIGURES: Final = (
    TrendFigure(column="step_time_ns", title="Step time", color="accent"),
    TrendFigure(column="exposed_ns", title="Exposed communication", color="exposed"),
    TrendFigure(column="overlap_ratio", title="Overlap ratio", color="hidden", is_share=True),
)

_MAX_MACHINE_TRENDS: Final = 3


def list_trends(machine: MachineSummary, summary: Summary) -> list[TrendPlot]:
    """Return all trends of a recording."""
    return [*(TrendPlot(shown, summary) for shown in FIGURES), *plot_machine_trends(machine, summary)]


def plot_machine_trends(machine: MachineSummary, summary: Summary) -> list[TrendPlot]:
    """Return trends of what held ranks back longest, by step: of the machine's conditions that are shares of time."""
    kinds = dict.fromkeys(KIND_OF[one.condition.kind] for one in machine.conditions)
    finished = summary.finished_together["step"]
    plots = []
    for kind in [kind for kind in kinds if kind.is_share][:_MAX_MACHINE_TRENDS]:
        column = f"machine_{kind.name.lower().replace(' ', '_').replace('/', '')}"
        per_step = machine.tabulate_steps(kind).rename(columns={"share": column})
        per_step = per_step[per_step["step"].isin(finished)]
        if per_step[column].notna().any():
            shown = TrendFigure(column=column, title=CONDITION_LABELS[kind.name], color="accent", is_share=True)
            plots.append(TrendPlot(shown, summary, per_step))
    return plots


class TrendPlot:
    """A trend (``root``), its points (``source``), its bands (``bands``), and what is above the axis (``beyond``).

    ``y_range`` is the visible range of the figure, ``warm_up`` marks the steps that are excluded as warm-up.

    Args:
        per_step: the figure by rank and step; by default it is one of the summary's.
    """

    def __init__(self, shown: TrendFigure, summary: Summary, per_step: pd.DataFrame | None = None) -> None:
        """Create the sources and draw the trend."""
        self.shown = shown
        self.is_of_summary = per_step is None
        """True if the table of steps has the figure."""
        self.source = ColumnDataSource(data={name: [] for name in (*_POINT_COLUMNS, "text")})
        self.bands = tuple(ColumnDataSource(data={"xs": [], "ys": []}) for _ in range(2))
        """All values, and the usual range."""
        self.beyond = ColumnDataSource(data={"x": [], "y": []})
        self.y_range = Range1d(start=0, end=1)
        self.warm_up = BoxAnnotation(fill_alpha=0.6, line_color=None, level="underlay")
        self.root = self._draw()
        per_step = summary.finished_together if per_step is None else per_step
        self.steps_per_point = count_steps_per_point(np.unique(per_step["step"]), MAX_POINTS)
        self._show(summary, per_step)

    @property
    def caption(self) -> str:
        """Return what the line, the bands and the marks are."""
        texts = ["mean and range of the ranks"]
        if self.steps_per_point > 1:
            texts = [f"mean and range of the ranks, medians of {self.steps_per_point} steps", "faint: the extremes"]
        if len(self.beyond.data["x"]):
            texts.append(f"▲ up to {self.shown.format(self._highest)}")
        return "; ".join(texts)

    @property
    def start_script(self) -> CustomJS:
        """Return the script that runs when the document is ready: shows values, and a click opens the timeline."""
        return CustomJS(
            args={"plot": self.root, "source": self.source},
            code="window.overlapscope.startTrend(plot, source)",
        )

    def _show(self, summary: Summary, per_step: pd.DataFrame) -> None:
        warm_up = max(
            (step for excluded in summary.steady.excluded if excluded.why == "warm-up" for step in excluded.steps),
            default=None,
        )
        first_steady = 0 if warm_up is None else warm_up + 1
        points = trend_by_step(per_step, self.shown.column, MAX_POINTS, first_steady)
        trend = add_breaks(points, self.steps_per_point)
        self.y_range.end = 1.04 if self.shown.is_share else self._find_end(summary, points["high"])
        self._highest = float(points["high"].max())
        is_beyond = points["high"] > self.y_range.end
        self.source.data = {
            **{name: trend[name].to_numpy() for name in _POINT_COLUMNS},
            "text": [self._describe_point(point) for point in trend.itertuples(index=False)],
        }
        self.bands[0].data = _outline_band(trend, "low", "high")
        self.bands[1].data = _outline_band(trend, "usual_low", "usual_high")
        self.beyond.data = {
            "x": points["step"][is_beyond].to_numpy(),
            "y": np.full(is_beyond.sum(), 0.97 * self.y_range.end),
        }
        self.warm_up.visible = warm_up is not None
        if warm_up is not None:
            self.warm_up.update(right=warm_up + 0.5)

    def _find_end(self, summary: Summary, highs: pd.Series[float]) -> float:
        steady = float(summary.figures.loc[summary.is_steady, self.shown.column].max())
        highest = float(highs.max())
        if steady > 0:  # not NaN either
            highest = min(highest, _MAX_ABOVE_STEADY * steady)
        return 1.05 * highest if highest > 0 else 1e6

    def _describe_point(self, point: Any) -> str:
        if point.middle != point.middle:
            return f"around step {point.step}: not recorded"
        where = f"step {point.step}" if point.step == point.last_step else f"steps {point.step} to {point.last_step}"
        middle, low, high = (self.shown.format(each) for each in (point.middle, point.low, point.high))
        return f"{where}: {middle}" + ("" if low == high else f", {low} to {high}")

    def _draw(self) -> Any:
        plot = figure(
            height=_HEIGHT_PX,
            sizing_mode="stretch_width",
            x_range=DataRange1d(range_padding=0.01),
            y_range=self.y_range,
            min_border=0,
            min_border_right=14,
            min_border_top=8,
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
        color = self.shown.color
        for source, alpha in zip(self.bands, (0.12, 0.2), strict=True):
            band = plot.patches(xs="xs", ys="ys", source=source, fill_alpha=alpha, line_color=None)
            paint(band.glyph, fill_color=color)
        middle = plot.line(x="step", y="middle", source=self.source, line_width=2, line_join="round")
        paint(middle.glyph, line_color=color)
        beyond = plot.scatter(x="x", y="y", source=self.beyond, marker="triangle", size=9, line_color=None)
        beyond.level = "overlay"
        paint(beyond.glyph, fill_color=color)
        return plot


def _outline_band(trend: pd.DataFrame, low: str, high: str) -> dict[str, Any]:
    """Return the outline of the range from low to high, one for each piece between breaks."""
    pieces = [piece.dropna(subset="middle") for _, piece in trend.groupby(trend["middle"].isna().cumsum())]
    return {
        "xs": [np.concatenate([piece["step"], piece["step"][::-1]]) for piece in pieces],
        "ys": [np.concatenate([piece[low], piece[high][::-1]]) for piece in pieces],
    }
