"""Means of steady steps with confidence intervals that allow for autocorrelation.

Neighboring steps are correlated: a noisy neighbor on the machine stays for a while. Then n steps carry no more
information about their mean than fewer independent ones would: for a first-order autoregressive series ``n (1 - r) / (1
+ r)``, where r is the correlation of neighbors, corrected here for its bias in short series (Kendall 1954). With r =
0.5, 90 steps count as 30. The interval is Student's for that number of steps. In simulations
(``benchmarks/intervals.py``) it held more often than a block bootstrap, which is too narrow where a recording has few
blocks.

The correlation of neighbors hardly shows a slow change that is small beside the noise of single steps, such as a
processor warming up. A comparison of two recordings must not take that for a difference between them, so there the
interval is no narrower than the means of long segments of steps imply.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
from scipy.special import ndtr, stdtrit

from overlapscope.breakdown.breakdown import BLOCKS
from overlapscope.breakdown.spans import Float64Array
from overlapscope.interval import SIGMAS_90, SIGMAS_99, Interval, find_lower_bound

SEGMENTS: Final = 8
"""Number of segments that a series is divided into to measure slow changes."""
_MAX_CORRELATION: Final = 0.995
_MIN_FREEDOM: Final = 2.0
_MIN_STEPS_FOR_RANGE: Final = 6
"""Number of steps from which their range is hardly ever narrower than the interval of independent ones."""


def mean_with_ci(series: Float64Array) -> list[Interval]:
    """Compute the mean of each column over its rows, with its 90 % interval.

    With enough steps an interval ends where the recorded values end, and with few positive ones not far from there:
    where neighbors are so much alike that it would not, as where steps drift, nothing supports more.

    Args:
        series: (S, K) By step, in order. With fewer than three steps the interval is unknown: NaN. The mean of values
            that are never negative has no lower bound below 0 either, and that of positive ones none of 0.
    """
    means = _means(series, _half_widths(np.asarray(series, dtype=np.float64), SIGMAS_90))
    if not len(series):
        return means
    least, most = series.min(axis=0), series.max(axis=0)
    if len(series) < _MIN_STEPS_FOR_RANGE:
        # Half of their range further, as ratios, and a factor of 2 at most: 50 and 200 are no reason to say 10 or 1000.
        is_positive = least > 0
        beyond = np.divide(np.sqrt(abs(most)), np.sqrt(abs(least)), out=np.ones(len(least)), where=is_positive)
        beyond = np.minimum(beyond, 2)
        least, most = np.where(is_positive, least / beyond, -np.inf), np.where(is_positive, most * beyond, np.inf)
    bounds = zip(means, least.tolist(), most.tolist(), strict=True)
    # The mean of equal values may differ from them by a rounding error.
    return [
        replace(mean, low=max(mean.low, min(low, mean.value)), high=min(mean.high, max(high, mean.value)))
        for mean, low, high in bounds
    ]


def mean_with_conservative_ci(series: Float64Array) -> list[Interval]:
    """Compute the same means with 99 % intervals that also cover slow changes, for comparisons.

    Args:
        series: (S, K) By step, in order; with fewer than ``SEGMENTS`` steps the interval is unknown.
    """
    if len(series) < SEGMENTS:
        return _means(series, np.full(series.shape[1], np.nan))
    edges = np.linspace(0, len(series), SEGMENTS + 1).astype(np.int64)
    segments = np.add.reduceat(series, edges[:-1], axis=0) / np.diff(edges)[:, None]
    freedom = np.full(series.shape[1], SEGMENTS - 1.0)
    slow = student_quantile(freedom, SIGMAS_99) * segments.std(axis=0, ddof=1) / np.sqrt(SEGMENTS)
    return _means(series, np.maximum(slow, _half_widths(np.asarray(series, dtype=np.float64), SIGMAS_99)))


def _means(series: Float64Array, half_widths: Float64Array) -> list[Interval]:
    values = series.mean(axis=0) if len(series) else np.full(series.shape[1], np.nan)
    least = series.min(axis=0) if len(series) else values
    low = np.where(least > 0, find_lower_bound(values, half_widths), values - half_widths)
    low = np.where(least >= 0, np.maximum(low, 0), low)
    return [
        Interval(value=float(value), low=float(low), high=float(value + half))
        for value, half, low in zip(values, half_widths, low, strict=True)
    ]


def effective_sample_size(series: Float64Array, *, levels: int = 1, sigmas: float = 0.0) -> Float64Array:
    """Return the number of independent steps with as much information about the mean of each column (S, K) as these.

    Args:
        levels: Number of means that have been subtracted from the series before, this one included: each reduces the
            estimated correlation of neighbors by about (1 + 4 r) / n.
        sigmas: Number of standard errors added to the correlation, for callers that must not overestimate the result.
    """
    steps = len(series)
    deviation = series - series.mean(axis=0)
    power = (deviation**2).sum(axis=0)
    covariance = (deviation[1:] * deviation[:-1]).sum(axis=0)
    correlation = np.divide(covariance, power, out=np.zeros_like(power), where=power > 0)
    if steps > 8 * levels:
        correlation = (steps * correlation + levels) / (steps - 4 * levels)
    correlation = correlation + sigmas * np.sqrt(np.maximum(0.0, 1 - correlation**2) / steps)
    correlation = np.where(
        power > 0, np.clip(correlation, 0.0, _MAX_CORRELATION), 0.0
    )  # a constant series has no noise
    independent: Float64Array = steps * (1 - correlation) / (1 + correlation)
    return independent


def _half_widths(series: Float64Array, sigmas: float) -> Float64Array:
    steps = len(series)
    if steps < 3:
        return np.full(series.shape[1], np.nan)
    independent = effective_sample_size(series)
    power = ((series - series.mean(axis=0)) ** 2).sum(axis=0)
    half_widths: Float64Array = student_quantile(np.maximum(independent - 1, _MIN_FREEDOM), sigmas) * np.sqrt(
        power / (steps - 1) / independent
    )
    return half_widths


def student_quantile(freedom: Float64Array, sigmas: float) -> Float64Array:
    """Return the quantile of Student's t that a normal distribution has at so many standard deviations.

    Args:
        freedom: Degrees of freedom.
        sigmas: The normal quantile.
    """
    quantile: Float64Array = stdtrit(freedom, ndtr(sigmas))
    return quantile


# Mean step as blocks that sum to it; the difference of two mean steps is a mean step as well.


@dataclass(frozen=True, kw_only=True)
class MeanStep:
    """The mean of some steps, or the difference of two such means. Times are nanoseconds."""

    step: Interval
    """Step time."""
    blocks: Mapping[str, Interval]
    """Time in each block by name, in the order of ``BLOCKS``; their values sum to that of ``step``."""

    @property
    def present(self) -> dict[str, Interval]:
        """Return the blocks that have any time."""
        return {name: mean for name, mean in self.blocks.items() if mean.value}

    def times(self, factor: float) -> MeanStep:
        """Multiply the step and all blocks by a positive number."""
        return MeanStep(
            step=self.step.times(factor), blocks={name: mean.times(factor) for name, mean in self.blocks.items()}
        )

    def capped_at(self, mean: MeanStep) -> MeanStep:
        """Limit this saving so that no block falls below zero; the step saving shrinks by that, but not below 0.

        Blocks that get longer pay for what others save. If these save less than that, less is paid.

        Args:
            mean: The mean step that the saving is taken from.
        """
        surplus = {name: max(0.0, each.value - mean.blocks[name].value) for name, each in self.blocks.items()}
        cut = min(sum(surplus.values()), max(0.0, self.step.value))
        paid = sum(max(0.0, -each.value) for each in self.blocks.values())
        unpaid_share = (sum(surplus.values()) - cut) / paid if paid else 0.0
        less = {name: surplus[name] - unpaid_share * max(0.0, -each.value) for name, each in self.blocks.items()}
        return MeanStep(
            step=self.step.shift_down(cut),
            blocks={name: each.shift_down(less[name]) for name, each in self.blocks.items()},
        ).bounded_by(mean.step.value)

    def bounded_by(self, step_ns: float) -> MeanStep:
        """Limit the intervals of this saving to the mean step that it is taken from; values stay the same.

        Example: where few long steps widen the interval of what is saved of a 20 ms step to 2 to 31 ms, it is 2 to 20.
        """

        def bound(each: Interval) -> Interval:
            return replace(each, high=max(each.value, step_ns)) if each.high > step_ns else each

        return MeanStep(step=bound(self.step), blocks={name: bound(each) for name, each in self.blocks.items()})

    def minus(self, other: MeanStep) -> MeanStep:
        """Subtract the mean of other steps, whose noise is independent of this one's."""
        return MeanStep(
            step=self.step.minus(other.step),
            blocks={name: mean.minus(other.blocks[name]) for name, mean in self.blocks.items()},
        )


def compute_mean_step(blocks_ns: Float64Array) -> MeanStep:
    """Compute the mean of a series of steps, or of differences of steps.

    Args:
        blocks_ns: (S, len(BLOCKS)) By step, in order. Times are never negative, differences may be.
    """
    step, *blocks = mean_with_ci(np.concatenate([blocks_ns.sum(axis=1, keepdims=True), blocks_ns], axis=1))
    return MeanStep(step=step, blocks=dict(zip(BLOCKS, blocks, strict=True)))
