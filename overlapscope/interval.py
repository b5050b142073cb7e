"""Confidence intervals: a value with its lower and upper bound."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

SIGMAS_90: Final = 1.6448536269514722
"""Half width of a 90 % interval of a normal distribution, in standard deviations."""
SIGMAS_99: Final = 2.5758293035489004
"""Half width of a 99 % interval of a normal distribution, in standard deviations."""


def find_lower_bound(value: npt.ArrayLike, half_width: npt.ArrayLike) -> npt.NDArray[np.float64]:
    """Return the lower bounds of positive values, which are positive as well.

    Up to half of the value a half width is subtracted; from there on bounds fall exponentially.

    Example: 10 with half widths of 3, 5, 10 and 20 has 7, 5, 1.8 and 0.25.
    """
    import numpy as np  # only here: texts and --help load this module

    values, half_widths = np.asarray(value, dtype=np.float64), np.asarray(half_width, dtype=np.float64)
    with np.errstate(divide="ignore", invalid="ignore"):
        beyond = np.maximum(2 * half_widths / values - 1, 0)
    bounds: npt.NDArray[np.float64] = np.where(beyond > 0, values / 2 * np.exp(-beyond), values - half_widths)
    return bounds


@dataclass(frozen=True, kw_only=True)
class Interval:
    """A value and its confidence interval, 90 % unless stated otherwise."""

    value: float
    low: float
    high: float

    def times(self, factor: float) -> Interval:
        """Multiply value and bounds by a positive number."""
        return Interval(value=factor * self.value, low=factor * self.low, high=factor * self.high)

    def shift_down(self, amount: float) -> Interval:
        """Subtract an exactly known amount from value and bounds."""
        return Interval(value=self.value - amount, low=self.low - amount, high=self.high - amount)

    def widen(self, amount: float) -> Interval:
        """Widen the interval by an amount on either side; the value stays the same."""
        return Interval(value=self.value, low=self.low - amount, high=self.high + amount)

    def minus(self, other: Interval) -> Interval:
        """Subtract another value whose error is independent: half widths add up as root of the sum of squares.

        Example: 10 (7 to 13) minus 4 (0 to 8) is 6 (1 to 11), as hypot(3, 4) is 5.
        """
        value = self.value - other.value
        low = math.hypot(self.value - self.low, other.high - other.value)
        high = math.hypot(self.high - self.value, other.value - other.low)
        return Interval(value=value, low=value - low, high=value + high)
