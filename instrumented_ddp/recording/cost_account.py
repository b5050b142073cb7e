"""How often something is done, so that all that it has cost is at most a share of the steps' time.

It is done in one of some number of steps, the period. The budget is an account: what it has cost beyond its share of
the time that has passed is a debt. Each period pays for its own cost, and as much of the debt again, or an eighth of it
if that is more. So whatever was not foreseen (a first time that loads code, steps that have become shorter) makes the
next times rarer until it is paid, but never so rare that nothing is seen meanwhile.
"""

from __future__ import annotations

from collections import deque
from typing import Final

MAX_PERIOD: Final = 4096
_DEBT_SHARE: Final = 1 / 8
"""Minimum share of the debt that a period pays."""
_REMEMBERED_COSTS: Final = 5
"""Number of costs of which the median is what the next one is expected to be."""
_HALVE_BELOW: Final = 0.4
"""Share of the allowed cost below which the period is halved: half the period then suffices, with some margin."""


class CostAccount:
    """Account of one thing, kept by each rank alone, from measurements of what it costs and how long its steps take.

    The period is a power of two, so ranks with different periods share the times of the longer one.

    Args:
        max_share: maximum share of the steps' time.
    """

    def __init__(self, max_share: float) -> None:
        self.max_share = max_share
        self.period = 1
        self._costs_ns: deque[float] = deque(maxlen=_REMEMBERED_COSTS)
        self._has_begun = False
        self._debt_ns = 0.0

    def settle(self, cost_ns: float, taken_share: float, steps_ns: float, step_ns: float) -> None:
        """Choose the next period.

        Args:
            cost_ns: what it has cost since the last time.
            taken_share: share of it that was done.
            steps_ns: time of the steps since the last time, without it.
            step_ns: time of a step, as far as is known of those that follow.
        """
        allowed_ns = self.max_share * step_ns
        self._debt_ns = max(0.0, self._debt_ns + cost_ns - self.max_share * steps_ns)
        if taken_share > 0 and self._has_begun:  # the first time loads code: it says nothing of the later ones
            self._costs_ns.append(cost_ns / taken_share)
        self._has_begun |= taken_share > 0
        if not self._costs_ns:
            return
        expected_ns = sorted(self._costs_ns)[len(self._costs_ns) // 2]
        needed_ns = expected_ns + max(min(self._debt_ns, expected_ns), _DEBT_SHARE * self._debt_ns)
        while needed_ns > allowed_ns * self.period and self.period < MAX_PERIOD:
            self.period *= 2
        while self.period > 1 and needed_ns < _HALVE_BELOW * allowed_ns * self.period:
            self.period //= 2
