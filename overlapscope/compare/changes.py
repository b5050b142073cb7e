"""Differences between the steps of two sides, and the smallest difference that these steps could have shown.

Means add up, but a few long steps, which a busy machine always has, make them imprecise. So trimmed means are compared
as well: without the shortest tenth of steps and the longest. A change of all steps shows there much earlier, one of
rare long steps only in the mean.

However many steps there are, two runs of the same program differ a little, although each is steady: by memory layout,
by what else runs on the machine. One recording can't show by how much, so between recordings intervals are wider by
what ``benchmarks/compare.py`` measures.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from overlapscope.breakdown.means import mean_with_conservative_ci
from overlapscope.breakdown.spans import Float64Array
from overlapscope.interval import SIGMAS_90, SIGMAS_99, Interval

TRIMMED: Final = 0.1
"""Share of steps that is trimmed at each end."""

BETWEEN_RUN_SHARE: Final = 0.01
"""Share of a time by which it may differ between two runs of the same program, however precise each run is."""

_DETECTION_FACTOR: Final = 1 + SIGMAS_90 / SIGMAS_99
"""Distance of a true difference from 0 that is detected in 19 of 20 cases, in half intervals of noise."""


@dataclass(frozen=True, kw_only=True)
class TimeDifference:
    """A time on both sides, in nanoseconds per step."""

    base: float
    new: float
    noise: Interval
    """New minus base, with the 99 % interval due to the noise of steps."""
    between_run_ns: float
    """Additional error if the two sides are not from one run."""

    @property
    def ns(self) -> Interval:
        """Return new minus base, with an interval that covers both errors; no time falls below 0."""
        wide = self.noise.widen(self.between_run_ns)
        return replace(wide, low=max(wide.low, -self.base))

    @property
    def is_longer(self) -> bool:
        """Return True if the time is longer, beyond noise."""
        return self.ns.low > 0

    @property
    def is_shorter(self) -> bool:
        """Return True if the time is shorter, beyond noise."""
        return self.ns.high < 0

    @property
    def is_significant(self) -> bool:
        """Return True if the time differs, beyond noise."""
        return self.is_longer or self.is_shorter

    @property
    def seen_ns(self) -> float:
        """Return the smallest increase that would have been detected in 19 of 20 cases."""
        return self.between_run_ns + _DETECTION_FACTOR * (self.noise.value - self.noise.low)


@dataclass(frozen=True, kw_only=True)
class Change:
    """Difference in a part of the step."""

    mean: TimeDifference
    """Difference between the means of all steady steps."""
    middle: TimeDifference
    """Difference between the trimmed means."""

    @property
    def most_significant(self) -> TimeDifference:
        """Return the difference with the strongest evidence of an increase, else of a decrease, else of the means."""
        both = self.mean, self.middle
        if any(each.is_longer for each in both):
            return max(both, key=lambda each: each.ns.low)
        return min(both, key=lambda each: each.ns.high) if any(each.is_shorter for each in both) else self.mean

    @property
    def seen_ns(self) -> float:
        """Return the smallest increase of all steps that would have been detected in 19 of 20 cases."""
        return min(self.mean.seen_ns, self.middle.seen_ns)


def compare_series(
    base: Mapping[str, Float64Array], new: Mapping[str, Float64Array], *, between_run_share: float
) -> dict[str, Change]:
    """Compute the differences between series of both sides, whose steps are independent.

    Args:
        base: (S,) Times by name and step; at least one name.
        new: (S,) Times of the other steps, with the same names.
        between_run_share: ``BETWEEN_RUN_SHARE`` if the two sides are from two runs, else 0.
    """
    series = [np.stack([side[name] for name in base], axis=1) for side in (base, new)]
    means = _pair_means(*(mean_with_conservative_ci(one) for one in series), between_run_share=between_run_share)
    middles = _pair_means(*(_trimmed_means(one) for one in series), between_run_share=between_run_share)
    return {name: Change(mean=mean, middle=middle) for name, mean, middle in zip(base, means, middles, strict=True)}


def _trimmed_means(series: Float64Array) -> list[Interval]:
    """Compute the trimmed mean of each column (S, K), with its 99 % interval.

    The error of such a mean follows from the winsorized series, in which values beyond the trimmed range are set to its
    edges (Yuen 1974).
    """
    cut = int(TRIMMED * len(series))
    ordered = np.sort(series, axis=0)[cut : len(series) - cut]
    values = ordered.mean(axis=0)
    share = len(ordered) / len(series)
    clipped = mean_with_conservative_ci(np.clip(series, ordered[0], ordered[-1]))
    return [
        Interval(
            value=float(value),
            low=float(value - (mean.value - mean.low) / share),
            high=float(value + (mean.high - mean.value) / share),
        )
        for value, mean in zip(values, clipped, strict=True)
    ]


def _pair_means(base: list[Interval], new: list[Interval], *, between_run_share: float) -> list[TimeDifference]:
    return [
        TimeDifference(
            base=one.value, new=other.value, noise=other.minus(one), between_run_ns=between_run_share * abs(one.value)
        )
        for one, other in zip(base, new, strict=True)
    ]
