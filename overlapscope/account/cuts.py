"""Cutting of spans at step boundaries."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from overlapscope.account.by_rank import RowsByRank
from overlapscope.account.intervals import Int64Array


class StepParts(NamedTuple):
    """The parts of spans that lie within steps, P of them."""

    which: Int64Array
    """(P,) Index of the span, ascending."""
    row: Int64Array
    """(P,) Row of the step."""
    edges_ns: Int64Array
    """(2, P) Start and end of each part."""


class StepsByRank:
    """The steps of all ranks, G of them; those of one rank are disjoint.

    Args:
        rank: (G,) in any order.
        start_ns: (G,)
        end_ns: (G,)
    """

    def __init__(self, rank: Int64Array, start_ns: Int64Array, end_ns: Int64Array) -> None:
        self._number, self._rows_of = np.arange(len(rank)), RowsByRank(rank)
        self._start_ns, self._end_ns = start_ns, end_ns

    def of_rank(self, rank: int) -> tuple[Int64Array, Int64Array]:
        """Return the rows (n,) of the steps of a rank by time, and their starts and ends (2, n)."""
        own = self._rows_of[rank]
        row = self._number[own][np.argsort(self._start_ns[own], kind="stable")]
        return row, np.stack([self._start_ns[row], self._end_ns[row]])

    def cut(self, rank: int, spans_ns: Int64Array) -> StepParts:
        """Cut spans (2, n) of one rank at step boundaries.

        Example: with steps from 0 to 10 and from 10 to 20, a span from 5 to 25 has two parts, from 5 to 10 and from 10
        to 20.
        """
        row, steps_ns = self.of_rank(rank)
        first = np.searchsorted(steps_ns[1], spans_ns[0], side="right")
        count = np.maximum(0, np.searchsorted(steps_ns[0], spans_ns[1], side="left") - first)
        which = np.repeat(np.arange(len(count)), count)
        position = first[which] + np.arange(len(which)) - np.repeat(np.cumsum(count) - count, count)
        from_ns = np.maximum(spans_ns[0, which], steps_ns[0, position])
        until_ns = np.minimum(spans_ns[1, which], steps_ns[1, position])
        return StepParts(which, row[position], np.stack([from_ns, until_ns]))
