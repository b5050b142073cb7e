"""Medians of what was measured several times, with 90 % intervals, and how tables show them.

The interval of a median is that between two of the values, counted from either end: it holds the true median of the
distribution, whatever that is like, with a probability that follows from the binomial distribution alone. Fewer than
five values have none.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from overlapscope.interval import Interval

CONFIDENCE = 0.9


def median_with_ci(values: Sequence[float]) -> Interval:
    """Return the median, and the closest values that hold the true one in 90 % of cases; NaN if there are none."""
    ordered, count = sorted(values), len(values)
    low = high = math.nan
    for outside in range(count // 2):
        # The lower bound is above the true median if at most so many values are below that; likewise the upper one.
        missed = 2 * sum(math.comb(count, below) for below in range(outside + 1)) / 2**count
        if missed > 1 - CONFIDENCE:
            break
        low, high = ordered[outside], ordered[-1 - outside]
    return Interval(value=statistics.median(ordered), low=low, high=high)


def format_interval(interval: Interval, decimals: int) -> str:
    """Format the value and its bounds, if these are known: ``1.004 (0.998 to 1.011)``."""
    value, low, high = (f"{number:.{decimals}f}" for number in (interval.value, interval.low, interval.high))
    return value if math.isnan(interval.low) else f"{value} ({low} to {high})"
