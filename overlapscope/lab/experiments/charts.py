"""What a figure shows: numbers and words. How they are drawn is not decided here. Times are in nanoseconds."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from overlapscope.interval import Interval

Unit = Literal["ns", "count", "loss"]


@dataclass(frozen=True, kw_only=True)
class Bar:
    """One bar, of parts."""

    label: str
    parts_ns: Mapping[str, float]
    """By block of the account; they sum to the value of the step."""
    step_ns: Interval


@dataclass(frozen=True, kw_only=True)
class Bars:
    """Steps below each other, each divided as the account divides it."""

    title: str
    bars: tuple[Bar, ...]


@dataclass(frozen=True, kw_only=True)
class Box:
    """The steps of one setting: quartiles, and what nine of ten lie in."""

    label: str
    low_ns: float
    quartile_1_ns: float
    median_ns: float
    quartile_3_ns: float
    high_ns: float
    count: int


@dataclass(frozen=True, kw_only=True)
class Boxes:
    """Box plots beside each other."""

    title: str
    x_label: str
    boxes: tuple[Box, ...]


@dataclass(frozen=True, kw_only=True)
class Line:
    """One line of a chart."""

    label: str
    x: tuple[float, ...]
    y: tuple[float, ...]
    low: tuple[float, ...] = ()
    """Of the interval of each point; none if not known. NaN where it is not."""
    high: tuple[float, ...] = ()
    style: Literal["measured", "predicted", "smooth"] = "measured"
    colour: int = 0
    """Place among the colours: lines that belong together have the same."""
    faint_y: tuple[float, ...] = ()
    """What the line was smoothed from."""


@dataclass(frozen=True, kw_only=True)
class Lines:
    """Lines over one axis."""

    title: str
    x_label: str
    y_label: str
    lines: tuple[Line, ...]
    x_unit: Unit = "count"
    y_unit: Unit = "ns"
    is_log: bool = False
    """Whether the x axis is logarithmic."""


Chart = Bars | Boxes | Lines


@dataclass(frozen=True, kw_only=True)
class Figure:
    """Charts, and what holds in them."""

    charts: tuple[Chart, ...]
    here: tuple[str, ...]
    """What holds here, in sentences made from the numbers."""
    note: str = ""
    """How to read it, or what it rests on."""
    left_out: tuple[str, ...] = field(default=())
    """Settings without a result, each with the reason."""


def box_of(label: str, steps_ns: Sequence[float]) -> Box:
    """The box of some steps.

    Args:
        steps_ns: at least one.
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


def line_of(label: str, x: Sequence[float], y: Sequence[Interval], colour: int = 0) -> Line:
    """A measured line with its intervals; sorted by x."""
    order = np.argsort(x, kind="stable").tolist()
    values = [y[place] for place in order]
    return Line(
        label=label,
        x=tuple(float(x[place]) for place in order),
        y=tuple(each.value for each in values),
        low=tuple(each.low for each in values),
        high=tuple(each.high for each in values),
        colour=colour,
    )


def is_known(interval: Interval) -> bool:
    """Whether there were enough repetitions for an interval."""
    return not (math.isnan(interval.low) or math.isnan(interval.high))
