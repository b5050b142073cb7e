"""What differs between the steps of two sides, and what these steps could have shown.

Means add up, but a few long steps, of which a busy machine always has some, make them unsure. So the steps in the
middle are looked at as well: without the shortest tenth and the longest. A change of all steps shows there much
earlier, one of rare long steps only in the mean.

However many steps there are, two runs of the same program differ a little, each being steady: by where memory lies, by
who else is on the machine. One recording can't show by how much, so between recordings intervals are wider by what
``benchmarks/compare.py`` finds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np

from overlapscope.account.intervals import Float64Array
from overlapscope.account.means import wary_mean_of
from overlapscope.interval import SIGMAS_90, SIGMAS_99, Interval

TRIMMED: Final = 0.1
"""Share of steps that are not in the middle, at each end."""

RUNS_DIFFER: Final = 0.01
"""Share of a time by which it may differ between two runs of the same program, whatever their steps say."""

_SEEN: Final = 1 + SIGMAS_90 / SIGMAS_99
"""By how many half intervals of noise a true difference has to be off 0 to be found in 19 of 20 cases."""


@dataclass(frozen=True, kw_only=True)
class Difference:
    """A time on both sides, in nanoseconds a step."""

    base: float
    new: float
    noise: Interval
    """New less base, with the 99 % interval that the steps give it."""
    runs_differ_ns: float
    """By how much that may be off because the two are not of one run."""

    @property
    def ns(self) -> Interval:
        """New less base, with an interval that allows for both."""
        return self.noise.wider(self.runs_differ_ns)

    @property
    def is_longer(self) -> bool:
        """Whether it takes longer, beyond noise."""
        return self.ns.low > 0

    @property
    def is_shorter(self) -> bool:
        """Whether it takes less time, beyond noise."""
        return self.ns.high < 0

    @property
    def is_sure(self) -> bool:
        """Whether it differs, beyond noise."""
        return self.is_longer or self.is_shorter

    @property
    def seen_ns(self) -> float:
        """So much longer, it would have been found to be in 19 of 20 cases."""
        return self.runs_differ_ns + _SEEN * (self.noise.value - self.noise.low)


@dataclass(frozen=True, kw_only=True)
class Change:
    """What differs in a part of the step."""

    mean: Difference
    """Between the means of all steps that are alike."""
    middle: Difference
    """Between the means of the steps in the middle."""

    @property
    def surest(self) -> Difference:
        """The one that shows most surely that it takes longer, else that it takes less time, else the mean."""
        both = self.mean, self.middle
        if any(each.is_longer for each in both):
            return max(both, key=lambda each: each.ns.low)
        return min(both, key=lambda each: each.ns.high) if any(each.is_shorter for each in both) else self.mean

    @property
    def seen_ns(self) -> float:
        """So much longer in all steps, it would have been found to be in 19 of 20 cases."""
        return min(self.mean.seen_ns, self.middle.seen_ns)


def changes_between(
    base: Mapping[str, Float64Array], new: Mapping[str, Float64Array], *, runs_differ: float
) -> dict[str, Change]:
    """How series differ that both sides have, of independent steps.

    Args:
        base: (S,) by name and step; one name or more.
        new: the same for other steps, of the same names.
        runs_differ: ``RUNS_DIFFER`` if the two are of two runs, else 0.
    """
    series = [np.stack([side[name] for name in base], axis=1) for side in (base, new)]
    means = _differences(*(wary_mean_of(one) for one in series), runs_differ=runs_differ)
    middles = _differences(*(_middle_of(one) for one in series), runs_differ=runs_differ)
    return {name: Change(mean=mean, middle=middle) for name, mean, middle in zip(base, means, middles, strict=True)}


def _middle_of(series: Float64Array) -> list[Interval]:
    """The means of the middle of each column (S, K), with their 99 % intervals.

    How sure such a mean is follows from the series in which what is beyond the middle lies at its edges (Yuen 1974).
    """
    cut = int(TRIMMED * len(series))
    ordered = np.sort(series, axis=0)[cut : len(series) - cut]
    values = ordered.mean(axis=0)
    share = len(ordered) / len(series)
    clipped = wary_mean_of(np.clip(series, ordered[0], ordered[-1]))
    return [
        Interval(
            value=float(value),
            low=float(value - (mean.value - mean.low) / share),
            high=float(value + (mean.high - mean.value) / share),
        )
        for value, mean in zip(values, clipped, strict=True)
    ]


def _differences(base: list[Interval], new: list[Interval], *, runs_differ: float) -> list[Difference]:
    return [
        Difference(base=one.value, new=other.value, noise=other.minus(one), runs_differ_ns=runs_differ * abs(one.value))
        for one, other in zip(base, new, strict=True)
    ]
