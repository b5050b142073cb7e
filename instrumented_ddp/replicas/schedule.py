"""When fingerprints are taken, so that all that they have cost is at most a thousandth of the steps' time.

All tensors are taken in a *pass* of some number of steps, the period of an account (``recording/cost_account.py``).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from instrumented_ddp.recording.cost_account import CostAccount

MAX_COST_SHARE: Final = 0.001
"""Maximum share of the steps' time."""


def number_part(part: int) -> int:
    """Return the number of a part: an odd multiple, so that no two are due at once, and scattered over any period."""
    return part * 0x9E3779B1 % 2**32


class FingerprintSchedule:
    """Assignment of parts to reductions.

    Each rank decides alone, as ``CostAccount`` says.

    Args:
        numbers: number of each part, from ``number_part``.
    """

    def __init__(self, numbers: Sequence[int]) -> None:
        self._numbers = numbers
        self._account = CostAccount(MAX_COST_SHARE)
        self._due: dict[int, tuple[int, ...]] = {}
        """Numbers of the parts by the number of reductions modulo the period."""
        self._spread()

    @property
    def period(self) -> int:
        """Return the number of reductions in which each part is taken once."""
        return self._account.period

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
        before = self.period
        self._account.settle(cost_ns, taken_share, steps_ns, step_ns)
        if self.period != before:
            self._spread()

    def _spread(self) -> None:
        due: dict[int, list[int]] = {}
        for part, number in enumerate(self._numbers):
            due.setdefault(number % self.period, []).append(part)
        self._due = {number: tuple(parts) for number, parts in due.items()}
