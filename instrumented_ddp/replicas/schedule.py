"""When fingerprints are taken, so that all that they have cost is at most a thousandth of the steps' time.

All tensors are taken in a *pass* of some number of steps, its period. The budget is an account: what fingerprints have
cost beyond a thousandth of the time that has passed is a debt. Each period pays for its own pass, and as much of the
debt again, or an eighth of it if that is more. So whatever was not foreseen (a first pass that loads code, steps that
have become shorter) makes the next passes rarer until it is paid, but never so rare that nothing is seen meanwhile.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Final

MAX_COST_SHARE: Final = 0.001
"""Maximum share of the steps' time."""
MAX_PERIOD: Final = 4096
_DEBT_SHARE: Final = 1 / 8
"""Minimum share of the debt that a period pays."""
_REMEMBERED_COSTS: Final = 5
"""Number of passes of which the median is what the next one is expected to cost."""
_HALVE_BELOW: Final = 0.4
"""Share of the allowed cost below which the period is halved: half the period then suffices, with some margin."""


def number_part(part: int) -> int:
    """Return the number of a part: an odd multiple, so that no two are due at once, and scattered over any period."""
    return part * 0x9E3779B1 % 2**32


class FingerprintSchedule:
    """Assignment of parts to reductions.

    Each rank decides alone, from measurements of how long its fingerprints and its steps take. The period is a power of
    two, so ranks with different periods share the times of the longer one.

    Args:
        numbers: number of each part, from ``number_part``.
    """

    def __init__(self, numbers: Sequence[int]) -> None:
        self._numbers = numbers
        self.period = 1
        self._due: dict[int, tuple[int, ...]] = {}
        """Numbers of the parts by the number of reductions modulo the period."""
        self._costs_ns: deque[float] = deque(maxlen=_REMEMBERED_COSTS)
        self._has_begun = False
        self._debt_ns = 0.0
        self._set_period(1)

    def list_due(self, first: int) -> list[tuple[int, tuple[int, ...]]]:
        """Return the reduction numbers at which something is due in a pass, in order, with the due parts.

        For example, with the period 4, parts with the numbers 5, 6 and 9 are due at reductions that are 1, 2 and 1
        modulo 4: ``list_due(10)`` is ``[(10, (1,)), (13, (0, 2))]``.

        Args:
            first: number of reductions at the start of the pass.
        """
        return sorted((first + (number - first) % self.period, parts) for number, parts in self._due.items())

    def end_pass(self, cost_ns: float, taken_share: float, steps_ns: float, step_ns: float) -> None:
        """Choose the next period.

        Args:
            cost_ns: what the pass has cost.
            taken_share: share of the parts that were taken: a pass may be cut short.
            steps_ns: time of the steps since its beginning, without fingerprints.
            step_ns: time of a step, as far as is known of those that follow.
        """
        allowed_ns = MAX_COST_SHARE * step_ns
        self._debt_ns = max(0.0, self._debt_ns + cost_ns - MAX_COST_SHARE * steps_ns)
        if taken_share > 0 and self._has_begun:  # the first pass loads code: it says nothing of the later ones
            self._costs_ns.append(cost_ns / taken_share)
        self._has_begun |= taken_share > 0
        if not self._costs_ns:
            return
        expected_ns, period = sorted(self._costs_ns)[len(self._costs_ns) // 2], self.period
        needed_ns = expected_ns + max(min(self._debt_ns, expected_ns), _DEBT_SHARE * self._debt_ns)
        while needed_ns > allowed_ns * period and period < MAX_PERIOD:
            period *= 2
        while period > 1 and needed_ns < _HALVE_BELOW * allowed_ns * period:
            period //= 2
        if period != self.period:
            self._set_period(period)

    def _set_period(self, period: int) -> None:
        self.period = period
        due: dict[int, list[int]] = {}
        for part, number in enumerate(self._numbers):
            due.setdefault(number % period, []).append(part)
        self._due = {number: tuple(parts) for number, parts in due.items()}
