"""A value and how sure it is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

SIGMAS_90: Final = 1.6448536269514722
"""Standard deviations to either side of a normal 90 % interval."""


@dataclass(frozen=True, kw_only=True)
class Interval:
    """A value and its 90 % interval."""

    value: float
    low: float
    high: float

    def times(self, factor: float) -> Interval:
        """Both the value and its interval, multiplied by a positive number."""
        return Interval(value=factor * self.value, low=factor * self.low, high=factor * self.high)

    def less(self, amount: float) -> Interval:
        """Both the value and its interval, with an amount taken off."""
        return Interval(value=self.value - amount, low=self.low - amount, high=self.high - amount)
