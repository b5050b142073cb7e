"""Schedule of fingerprints, so that they cost a thousandth of a step and ranks have most of them in common.

Each rank decides alone, from measurements of how long all fingerprints and a step take. The period is a power of two,
so ranks with different periods share the times of the longer one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

MAX_COST_SHARE: Final = 0.001
"""Maximum share of a step's time."""
MAX_PERIOD: Final = 4096
_WARM_UP_PASSES: Final = 1
"""Number of sweeps that are not measured."""
_MEASURED_PASSES: Final = 3
"""Number of measured sweeps after that, before the first period is chosen. All of these last a single step."""
_COLD_CACHE_FACTOR: Final = 4
"""Cost factor of a fingerprint taken alone once per step, instead of one after another with its code in the caches."""
_HALVE_BELOW: Final = 0.4
"""Share of the allowed cost below which the period is halved: half the period then suffices, with some margin."""


class FingerprintSchedule:
    """Assignment of tensors to reductions.

    Args:
        numbers: number of each tensor, from ``taken_at``.
    """

    def __init__(self, numbers: Sequence[int]) -> None:
        self._numbers = numbers
        self.period = 1
        self._due: dict[int, tuple[int, ...]] = {}
        """Tensor indices by the number of reductions modulo the period."""
        self._cost_ns = 0.0
        self._sweeps = 0
        self._measured: list[tuple[int, float]] = []
        self._set_period(1)

    def list_due_tensors(self, first: int) -> list[tuple[int, tuple[int, ...]]]:
        """Return the reduction numbers at which something is due in a sweep, in order, with the due tensors.

        For example, with the period 4, tensors with the numbers 5, 6 and 9 are due at reductions that are 1, 2 and 1
        modulo 4: ``list_due_tensors(10)`` is ``[(10, (1,)), (13, (0, 2))]``.

        Args:
            first: number of reductions at the start of the sweep.
        """
        return sorted((first + (number - first) % self.period, indices) for number, indices in self._due.items())

    def update_period(self, cost_ns: int, step_ns: float) -> None:
        """Choose the next period from the cost of a sweep.

        Args:
            cost_ns: time for all its fingerprints.
            step_ns: mean time from one reduction to the next, without fingerprints.
        """
        self._sweeps += 1
        if self._sweeps <= _WARM_UP_PASSES:
            return
        if self._sweeps <= _WARM_UP_PASSES + _MEASURED_PASSES:
            self._measured.append((cost_ns, step_ns))
            if self._sweeps < _WARM_UP_PASSES + _MEASURED_PASSES:
                return
            self._cost_ns = _COLD_CACHE_FACTOR * min(cost for cost, _ in self._measured)
            step_ns = sum(step for _, step in self._measured) / len(self._measured)
        else:
            self._cost_ns = (self._cost_ns + cost_ns) / 2
        allowed_ns = MAX_COST_SHARE * step_ns
        period = self.period
        while self._cost_ns > allowed_ns * period and period < MAX_PERIOD:
            period *= 2
        while period > 1 and self._cost_ns < _HALVE_BELOW * allowed_ns * period:
            period //= 2
        if period != self.period:
            self._set_period(period)

    def _set_period(self, period: int) -> None:
        self.period = period
        due: dict[int, list[int]] = {}
        for index, number in enumerate(self._numbers):
            due.setdefault(number % period, []).append(index)
        self._due = {number: tuple(indices) for number, indices in due.items()}
