"""A value and how sure it is."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

SIGMAS_90: Final = 1.6448536269514722
"""Standard deviations to either side of a normal 90 % interval."""
SIGMAS_99: Final = 2.5758293035489004
"""The same of a 99 % interval."""


@dataclass(frozen=True, kw_only=True)
class Interval:
    """A value and its interval: of 90 % if nothing else is said."""

    value: float
    low: float
    high: float

    def times(self, factor: float) -> Interval:
        """Both the value and its interval, multiplied by a positive number."""
        return Interval(value=factor * self.value, low=factor * self.low, high=factor * self.high)

    def less(self, amount: float) -> Interval:
        """Both the value and its interval, with an amount taken off."""
        return Interval(value=self.value - amount, low=self.low - amount, high=self.high - amount)

    def wider(self, amount: float) -> Interval:
        """The same value, less sure by an amount to either side."""
        return Interval(value=self.value, low=self.low - amount, high=self.high + amount)

    def minus(self, other: Interval) -> Interval:
        """What is left without another value, if chance has made the two independently of each other."""
        value = self.value - other.value
        low = math.hypot(self.value - self.low, other.high - other.value)
        high = math.hypot(self.high - self.value, other.value - other.low)
        return Interval(value=value, low=value - low, high=value + high)
