"""Content of a figure, as numbers and words, independent of how it is drawn. Times are in nanoseconds."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from overlapscope.interval import Interval

Unit = Literal["ns", "count", "loss"]


@dataclass(frozen=True, kw_only=True)
class StackedBar:
    """One stacked bar."""

    label: str
    parts_ns: Mapping[str, float]
    """Length of each block of the breakdown; they sum to the value of the step."""
    step_ns: Interval


@dataclass(frozen=True, kw_only=True)
class StackedBarChart:
    """Bar chart of steps, one below the other, each divided into blocks."""

    title: str
    bars: tuple[StackedBar, ...]


@dataclass(frozen=True, kw_only=True)
class Box:
    """Distribution of the steps of one setting: quartiles, and the 5th and 95th percentiles."""

    label: str
    low_ns: float
    quartile_1_ns: float
    median_ns: float
    quartile_3_ns: float
    high_ns: float
    count: int


@dataclass(frozen=True, kw_only=True)
class BoxPlotChart:
    """Box plots next to each other."""

    title: str
    x_label: str
    boxes: tuple[Box, ...]


@dataclass(frozen=True, kw_only=True)
class LineSeries:
    """One line of a line chart."""

    label: str
    x: tuple[float, ...]
    y: tuple[float, ...]
    low: tuple[float, ...] = ()
    """Lower end of the interval of each point, NaN where unknown; empty if there are no intervals."""
    high: tuple[float, ...] = ()
    style: Literal["measured", "predicted", "smooth"] = "measured"
    color: int = 0
    """Index of the color: lines that belong together share it."""
    unsmoothed_y: tuple[float, ...] = ()
    """Values before smoothing."""


@dataclass(frozen=True, kw_only=True)
class LineChart:
    """Lines over one axis."""

    title: str
    x_label: str
    y_label: str
    lines: tuple[LineSeries, ...]
    x_unit: Unit = "count"
    y_unit: Unit = "ns"
    is_log: bool = False
    """True if the x axis is logarithmic."""


Chart = StackedBarChart | BoxPlotChart | LineChart


@dataclass(frozen=True, kw_only=True)
class FigureContent:
    """Charts, and the conclusions from them."""

    charts: tuple[Chart, ...]
    here: tuple[str, ...]
    """Conclusions from this measurement, in sentences made from the numbers."""
    note: str = ""
    """How to read the figure, or what it is based on."""
    left_out: tuple[str, ...] = field(default=())
    """Settings without a result, each with the reason."""


def compute_box(label: str, steps_ns: Sequence[float]) -> Box:
    """Compute the box of some steps.

    Args:
        steps_ns: At least one step time.
    """
    low, quartile_1, median, quartile_3, high = np.percentile(steps_ns, [5, 25, 50, 75, 95]).tolist()
    return Box(
        label=label,
        low_ns=low,
        quartile_1_ns=quartile_1,
        median_ns=median,
        quartile_3_ns=quartile_3,
        high_ns=high,
        count=len(steps_ns),
    )


def make_line_series(label: str, x: Sequence[float], y: Sequence[Interval], color: int = 0) -> LineSeries:
    """Make a measured line with its intervals, sorted by x."""
    order = np.argsort(x, kind="stable").tolist()
    values = [y[index] for index in order]
    return LineSeries(
        label=label,
        x=tuple(float(x[index]) for index in order),
        y=tuple(each.value for each in values),
        low=tuple(each.low for each in values),
        high=tuple(each.high for each in values),
        color=color,
    )


def has_interval(interval: Interval) -> bool:
    """Return True if there were enough repetitions for an interval."""
    return not (math.isnan(interval.low) or math.isnan(interval.high))
