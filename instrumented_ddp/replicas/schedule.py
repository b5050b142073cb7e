"""When fingerprints are taken, so that they cost a thousandth of a step and ranks have most of them in common.

Each rank decides alone, by what it measures: how long all fingerprints take, and how long a step does. The period
is a power of two, so ranks that differ in it share the moments of the longer one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

COST_SHARE: Final = 0.001
"""Of a step, at most."""
LONGEST_PERIOD: Final = 4096
_WARM_UP: Final = 1
"""Sweeps that are not measured ..."""
_MEASURED: Final = 3
"""... and so many after them that are, before the first period is chosen. All these are of a single step."""
_COSTS_MORE_ALONE: Final = 4
"""What is done to one tensor after another finds its code in the processor's caches; done once a step, it does not."""
_SHRINKS_BELOW: Final = 0.4
"""Of the allowed cost: then half the period would do, with some room to spare."""


class Schedule:
    """Which tensors are due at a number of reductions.

    Args:
        numbers: of each tensor, as of ``taken_at``.
    """

    def __init__(self, numbers: Sequence[int]) -> None:
        self._numbers = numbers
        self.period = 1
        self._due: dict[int, tuple[int, ...]] = {}
        """Tensors, by the number of reductions modulo the period."""
        self._cost_ns = 0.0
        self._sweeps = 0
        self._measured: list[tuple[int, float]] = []
        self._set_period(1)

    def agenda(self, first: int) -> list[tuple[int, tuple[int, ...]]]:
        """The numbers of reductions at which something is due in a sweep, in order, with the tensors that are.

        Args:
            first: number of reductions at its beginning.
        """
        return sorted((first + (number - first) % self.period, indices) for number, indices in self._due.items())

    def sweep_is_over(self, cost_ns: int, step_ns: float) -> None:
        """Choose the next period, by what a sweep has cost.

        Args:
            cost_ns: of all its fingerprints.
            step_ns: from one reduction to the next, in the mean, without them.
        """
        self._sweeps += 1
        if self._sweeps <= _WARM_UP:
            return
        if self._sweeps <= _WARM_UP + _MEASURED:
            self._measured.append((cost_ns, step_ns))
            if self._sweeps < _WARM_UP + _MEASURED:
                return
            self._cost_ns = _COSTS_MORE_ALONE * min(cost for cost, _ in self._measured)
            step_ns = sum(step for _, step in self._measured) / len(self._measured)
        else:
            self._cost_ns = (self._cost_ns + cost_ns) / 2
        allowed_ns = COST_SHARE * step_ns
        period = self.period
        while self._cost_ns > allowed_ns * period and period < LONGEST_PERIOD:
            period *= 2
        while period > 1 and self._cost_ns < _SHRINKS_BELOW * allowed_ns * period:
            period //= 2
        if period != self.period:
            self._set_period(period)

    def _set_period(self, period: int) -> None:
        self.period = period
        due: dict[int, list[int]] = {}
        for index, number in enumerate(self._numbers):
            due.setdefault(number % period, []).append(index)
        self._due = {number: tuple(indices) for number, indices in due.items()}
