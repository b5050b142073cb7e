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
from dashboards.run_facts import StepTimes
from dashboards.theme import paint
from overlapscope.breakdown.lanes import Timeline
from overlapscope.breakdown.summary import Summary
from overlapscope.machine.conditions import KIND_OF
from overlapscope.machine.of_steps import MachineSummary
from overlapscope.machine.text import CONDITION_LABELS
from overlapscope.text import format_ns, format_share

# Trends of a recording's figures over its steps, for all ranks and for each rank.

MAX_POINTS: Final = 600
"""Maximum number of points: more steps are merged, equally many per point, but none across a break."""
_BREAK_POINTS: Final = 3
"""Number of points from which missing steps are a break in the trend, as where recording was off."""
_MAX_BREAKS: Final = 50


def trend_by_step(per_step: pd.DataFrame, column: str) -> pd.DataFrame:
    """Return the trend of one figure over the steps of a recording.

    Args:
        per_step: From ``tabulate_breakdown``.
        column: The figure.

    Returns:
        step (the first of those merged), last_step, low, mean, high: over all ranks and steps of a point. Points
        without a value, such as the ratio of steps without communication, are left out.
    """
    known = per_step.loc[per_step[column].notna(), ["step", column]]
    points = known.assign(point=_point_of(per_step, known["step"])).groupby("point")
    return points.agg(
        step=("step", "min"),
        last_step=("step", "max"),
        low=(column, "min"),
        mean=(column, "mean"),
        high=(column, "max"),
    ).reset_index(drop=True)


def trend_by_rank(per_step: pd.DataFrame, column: str) -> pd.DataFrame:
    """Return the trend of each rank separately, at the same points.

    Returns:
        rank, step, mean.
    """
    known = per_step.loc[per_step[column].notna(), ["rank", "step", column]]
    points = known.assign(point=_point_of(per_step, known["step"])).groupby(["rank", "point"])
    return points.agg(step=("step", "min"), mean=(column, "mean")).reset_index()[["rank", "step", "mean"]]


def _point_of(per_step: pd.DataFrame, steps: pd.Series[int]) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    numbers = np.unique(per_step["step"])
    each = _count_steps_per_point(numbers)
    begins = np.flatnonzero(_follows_break(numbers, each))  # a point begins anew there
    at = np.arange(len(numbers))
    piece = np.searchsorted(begins, at, side="right")
    within = at - np.concatenate([[0], begins])[piece]
    point = (piece * len(numbers) + within // each)[np.searchsorted(numbers, steps.to_numpy())]
    found: np.ndarray[tuple[int], np.dtype[np.int64]] = point.astype(np.int64)
    return found


def _count_steps_per_point(numbers: np.ndarray[Any, Any]) -> int:
    return max(1, -(-len(numbers) // MAX_POINTS))


def _follows_break(numbers: np.ndarray[Any, Any], each: int) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """Return which steps follow so many missing ones that no line should lead across."""
    is_first = np.append(False, np.diff(numbers) > _BREAK_POINTS * each)[: len(numbers)]
    return is_first if is_first.sum() <= _MAX_BREAKS else np.zeros(len(numbers), dtype=bool)


def _add_breaks(points: pd.DataFrame, each: int) -> pd.DataFrame:
    """Add a point without a value in the middle of each break, so that lines end before it and begin anew after it.

    Args:
        points: From ``trend_by_step`` or ``trend_by_rank``, of one rank.
        each: Number of steps per point.
    """
    step, last = points["step"].to_numpy(np.int64), points["last_step"].to_numpy(np.int64)
    missing = step[1:] - last[:-1] - 1
    is_break = missing >= _BREAK_POINTS * each
    if not is_break.any() or is_break.sum() > _MAX_BREAKS:
        return points
    breaks = pd.DataFrame(
        {"step": last[:-1][is_break] + 1 + missing[is_break] // 2, "last_step": step[1:][is_break] - 1}
    )
    return pd.concat([points, breaks]).sort_values("step", kind="stable", ignore_index=True)


def _outline_band(trend: pd.DataFrame) -> dict[str, Any]:
    """Return the outline of the range from low to high, one for each piece between breaks."""
    pieces = [piece.dropna(subset="mean") for _, piece in trend.groupby(trend["mean"].isna().cumsum())]
    return {
        "xs": [np.concatenate([piece["step"], piece["step"][::-1]]) for piece in pieces],
        "ys": [np.concatenate([piece["low"], piece["high"][::-1]]) for piece in pieces],
    }


# Overview strip of all steps of a recording: their times on the timeline, and the share of exposed communication.


def build_step_strip(figures: pd.DataFrame, timeline: Timeline) -> pd.DataFrame:
    """Return all steps, merged into as many points as a trend has.

    Args:
        figures: From ``tabulate_breakdown``.

    Returns:
        step, last_step, start_ns, end_ns (on the timeline), exposed_ns and step_time_ns (means), exposed_share.
    """
    exposed = trend_by_step(figures, "exposed_ns")
    step_time = trend_by_step(figures, "step_time_ns")
    bounds = timeline.steps.drop_duplicates("step").set_index("step")
    found = pd.DataFrame(
        {
            "step": exposed["step"],
            "last_step": exposed["last_step"],
            "start_ns": exposed["step"].map(bounds["start_ns"]),
            "end_ns": exposed["last_step"].map(bounds["end_ns"]),
            "exposed_ns": exposed["mean"],
            "step_time_ns": step_time["mean"],
        }
    )
    found["exposed_share"] = found["exposed_ns"] / found["step_time_ns"].where(found["step_time_ns"] > 0)
    return found.dropna(ignore_index=True)


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


def has_trend(summary: Summary) -> bool:
    """Return whether enough steps have been finished for a line."""
    return summary.finished_together["step"].nunique() > 1


_MAX_RANK_LINES: Final = 8
_HEIGHT_PX: Final = 190
_PERCENT_LABELS: Final = "return Math.round(tick * 100) + ' %'"


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
    """A trend (``root``), the points of its mean (``source``), its range (``band``) and its ranks (``rank_lines``).

    ``y_range`` is the visible range of the figure, ``warm_up`` marks the steps that are excluded as warm-up.

    Args:
        per_step: the figure by rank and step; by default it is one of the summary's.
    """

    def __init__(self, shown: TrendFigure, summary: Summary, per_step: pd.DataFrame | None = None) -> None:
        """Create the sources and draw the trend."""
        self.shown = shown
        self.source = ColumnDataSource(data={name: [] for name in ("step", "low", "mean", "high", "text")})
        self.band = ColumnDataSource(data={"xs": [], "ys": []})
        self.rank_lines = ColumnDataSource(data={"xs": [], "ys": []})
        self.y_range = Range1d(start=0, end=1)
        self.warm_up = BoxAnnotation(fill_alpha=0.6, line_color=None, level="underlay")
        self.root = self._draw()
        self._show(summary, summary.finished_together if per_step is None else per_step)

    @property
    def start_script(self) -> CustomJS:
        """Return the script that runs when the document is ready: shows values, and a click opens the timeline."""
        return CustomJS(
            args={"plot": self.root, "source": self.source},
            code="window.overlapscope.startTrend(plot, source)",
        )

    def _show(self, summary: Summary, per_step: pd.DataFrame) -> None:
        each = _count_steps_per_point(np.unique(per_step["step"]))
        trend = _add_breaks(trend_by_step(per_step, self.shown.column), each)
        self.source.data = {
            **{name: trend[name].to_numpy() for name in ("step", "low", "mean", "high")},
            "text": [self._text(*point) for point in trend.itertuples(index=False, name=None)],
        }
        self.band.data = _outline_band(trend)
        self.rank_lines.data = self._tabulate_rank_lines(per_step, each)
        self._mark_warm_up(summary)
        self.y_range.end = 1.04 if self.shown.is_share else self._find_high(summary) or 1e6

    def _find_high(self, summary: Summary) -> float:
        """Return the upper end of times: first steps are often ten times as long, and would flatten the rest."""
        usual = summary.figures.loc[summary.is_steady, self.shown.column].dropna()
        return 1.2 * float(np.quantile(usual, 0.99)) if len(usual) else 0.0

    def _tabulate_rank_lines(self, per_step: pd.DataFrame, each: int) -> dict[str, Any]:
        lines: list[pd.DataFrame] = []
        if per_step["rank"].nunique() <= _MAX_RANK_LINES:
            by_rank = trend_by_rank(per_step, self.shown.column).assign(last_step=lambda points: points["step"])
            lines = [_add_breaks(line, 2 * each) for _, line in by_rank.groupby("rank")]
        return {
            "xs": [line["step"].to_numpy() for line in lines],
            "ys": [line["mean"].to_numpy() for line in lines],
        }

    def _mark_warm_up(self, summary: Summary) -> None:
        warm_up = max(
            (step for excluded in summary.steady.excluded if excluded.why == "warm-up" for step in excluded.steps),
            default=None,
        )
        self.warm_up.visible = warm_up is not None
        if warm_up is not None:
            self.warm_up.update(right=warm_up + 0.5)

    def _text(self, step: int, last_step: int, low: float, mean: float, high: float) -> str:
        if mean != mean:
            return f"around step {step}: not recorded"
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
        color = self.shown.color
        band = plot.patches(xs="xs", ys="ys", source=self.band, fill_alpha=0.16, line_color=None)
        paint(band.glyph, fill_color=color)
        ranks = plot.multi_line(xs="xs", ys="ys", source=self.rank_lines, line_width=1, line_alpha=0.35)
        paint(ranks.glyph, line_color=color)
        mean = plot.line(x="step", y="mean", source=self.source, line_width=2, line_join="round")
        paint(mean.glyph, line_color=color)
        return plot
