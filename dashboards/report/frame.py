"""From values to pixels, and round numbers along an axis."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

_NS_PER: Final = (("s", 1e9), ("ms", 1e6), ("µs", 1e3), ("ns", 1.0))

Scale = Callable[[Any], npt.NDArray[Any]]
"""From values to pixels."""


@dataclass(frozen=True, kw_only=True)
class Frame:
    """The area of a chart in which data are drawn, in pixels of its picture."""

    width: int
    height: int
    left: int = 58
    right: int
    top: int = 8
    bottom: int

    @classmethod
    def of(cls, width: int, height: int) -> Frame:
        """The frame of a picture, with room for labels."""
        return cls(width=width, height=height, right=width - 22, bottom=height - 22)

    def x(self, low: float, high: float, *, is_log: bool = False) -> Scale:
        """Where values between two others are, from left to right."""
        to = np.log if is_log else np.asarray
        return lambda values: self.left + (to(values) - to(low)) / (to(high) - to(low)) * (self.right - self.left)

    def y(self, low: float, high: float) -> Scale:
        """Where values between two others are, from bottom to top; larger ones leave the picture at its top."""
        px = (self.bottom - self.top) / (high - low)
        return lambda values: np.maximum(self.bottom - (np.asarray(values) - low) * px, -self.height)


Tick = tuple[float, str]
"""Place and label."""


def nice_ticks(low: float, high: float, most: int) -> list[float]:
    """Round numbers between two others, at most as many as wanted and one more."""
    rough = (high - low) / most
    if not rough > 0:
        return [low]
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * (1 - 1e-9))
    return [number * step for number in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]


def time_labels(ticks: Sequence[float]) -> list[str]:
    """Times in nanoseconds, all in the unit that suits the longest."""
    unit, ns = next((each for each in _NS_PER if max(map(abs, ticks)) >= each[1]), _NS_PER[-1])
    return [f"{tick / ns:,.6g} {unit}" for tick in ticks]
