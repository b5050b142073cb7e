"""``static_graph=True``: the first iteration counts how often each gradient hook fires, as it does in all others.

With re-entrant checkpoints, or a parameter outside the wrapped forward, autograd adds to a gradient several times in
one backward. Only after the last time may it be reduced, and only for a static graph is that known.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from instrumented_ddp.reduction.unused_parameters import Usage, UsageMap


class GraphHasChangedError(Exception):
    """Error raised when a hook fires more often than in the first iteration."""


class StaticUsage(Usage):
    """Number of times that each hook fires: counted in the first iteration, expected from then on.

    Args:
        parameters: number of parameters.
        bitmap: which parameters any rank has used, as of the first iteration.
    """

    def __init__(self, parameters: int, bitmap: UsageMap) -> None:
        super().__init__((), bitmap)
        self._fire_counts = [0] * parameters
        self._remaining: list[int] = []
        self.is_known = False
        """True if the first iteration is over."""

    def begin(self, outputs: Sequence[torch.Tensor]) -> None:  # noqa: ARG002 - they are those of the first iteration
        """Expect every hook as often as it fired in the first iteration."""
        self._remaining = self._fire_counts.copy()
        self._unused_to_mark = self.unused

    def is_complete(self, index: int, *, has_gradient: bool, is_expected: bool) -> bool:
        """Count a call of a hook, or count it down; return whether it was the last one.

        Raises:
            GraphHasChangedError: the hook fired less often in the first iteration.
        """
        if not self.is_known:
            if has_gradient:
                self.bitmap.note(index)
            self._fire_counts[index] += 1
            return False
        if not is_expected:
            return False
        self._remaining[index] -= 1
        if self._remaining[index] < 0:
            raise GraphHasChangedError
        return self._remaining[index] == 0

    def finish_count(self) -> None:
        """End the count of the first backward: parameters whose hook never fired are unused."""
        self.unused = [index for index, times in enumerate(self._fire_counts) if times == 0]

    def launch_bitmap(self) -> None:
        """Do nothing: the bitmap of the first iteration holds."""

    def finish_reduction(self) -> None:
        """Wait for the bitmap in the first iteration, after which everything is known."""
        if not self.is_known:
            self.bitmap.finish_reduction()
            self.is_known = True
