"""``static_graph=True``: the first iteration tells how often each gradient hook fires in every one.

With re-entrant checkpoints, or a parameter outside the wrapped forward, autograd adds to a gradient several times in
one backward. Only after the last time may it be reduced, and only a graph that never changes lets that be known.
"""

from __future__ import annotations


class StaticGraph:
    """How often each hook fires: counted in the first iteration, expected from then on.

    Args:
        parameters: how many there are.
    """

    def __init__(self, parameters: int) -> None:
        self._fires = [0] * parameters
        self._left: list[int] = []
        self.is_known = False
        """Whether the first iteration is over."""

    def count(self, index: int) -> None:
        """A hook fires in the first iteration."""
        self._fires[index] += 1

    @property
    def unused(self) -> list[int]:
        """The parameters whose hook never fired."""
        return [index for index, times in enumerate(self._fires) if times == 0]

    def begin_iteration(self) -> None:
        """Expect every hook as often as it fired in the first."""
        self._left = self._fires.copy()

    def fires_left(self, index: int) -> int:
        """A hook fires again: how often it is still to fire. Negative if it fired less often in the first iteration."""
        self._left[index] -= 1
        return self._left[index]
