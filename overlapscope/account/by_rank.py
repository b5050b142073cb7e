"""The rows of each rank, found without a look at those of all others."""

from __future__ import annotations

from itertools import pairwise
from typing import Final

import numpy as np
import numpy.typing as npt

from overlapscope.account.intervals import Int64Array

Rows = Int64Array | slice
"""Ascending numbers of rows, to index columns with."""

_NONE: Final = slice(0, 0)


class RowsByRank:
    """The rows of a table by rank.

    Args:
        rank: (N,) of each row, in any order. Where they ascend, as in a recording, rows are slices, which copy nothing.
    """

    def __init__(self, rank: npt.ArrayLike) -> None:
        rank = np.asarray(rank, dtype=np.int64)
        order = None if (rank[1:] >= rank[:-1]).all() else np.argsort(rank, kind="stable")
        rank = rank if order is None else rank[order]
        edges = [0, *(np.flatnonzero(rank[1:] != rank[:-1]) + 1).tolist(), len(rank)] if len(rank) else []
        self._rows: dict[int, Rows] = {
            int(rank[begin]): slice(begin, end) if order is None else order[begin:end] for begin, end in pairwise(edges)
        }

    @property
    def ranks(self) -> list[int]:
        """Those that have a row, ascending."""
        return list(self._rows)

    def __getitem__(self, rank: int) -> Rows:
        """The rows of a rank; none if it has none."""
        return self._rows.get(rank, _NONE)
