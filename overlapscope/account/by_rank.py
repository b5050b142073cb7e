"""The rows of each rank, found without a look at those of all others."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from overlapscope.account.intervals import Int64Array


class RowsByRank:
    """The rows of a table by rank.

    Args:
        rank: (N,) of each row, in any order.
    """

    def __init__(self, rank: npt.ArrayLike) -> None:
        rank = np.asarray(rank, dtype=np.int64)
        self._order = np.argsort(rank, kind="stable")
        self._rank = rank[self._order]

    def __getitem__(self, rank: int) -> Int64Array:
        """Ascending numbers of the rows of a rank; empty if it has none."""
        begin, end = np.searchsorted(self._rank, [rank, rank + 1])
        return self._order[begin:end]
