"""Rows and spans of a table by rank, looked up without scanning those of other ranks."""

from __future__ import annotations

from itertools import pairwise
from typing import Final

import numpy as np
import numpy.typing as npt
import pandas as pd

from overlapscope.account.intervals import Int64Array

Rows = Int64Array | slice
"""Ascending row numbers, to index columns with."""

_NONE: Final = slice(0, 0)


class RowsByRank:
    """The rows of a table by rank.

    Example: ranks [0, 0, 1, 0] give rows [0, 1, 3] for rank 0 and [2] for rank 1.

    Args:
        rank: (N,) Rank of each row, in any order. If ranks ascend, as in a recording, rows are slices, which copy
            nothing.
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
        """Return the ranks that have a row, ascending."""
        return list(self._rows)

    def __getitem__(self, rank: int) -> Rows:
        """Return the rows of a rank; empty if it has none."""
        return self._rows.get(rank, _NONE)


class SpansByRank:
    """Spans of all ranks, by rank.

    Args:
        rank: (N,) Rank of each span, in any order.
        start_ns: (N,)
        end_ns: (N,)
    """

    def __init__(self, rank: Int64Array, start_ns: Int64Array, end_ns: Int64Array) -> None:
        self.rows = RowsByRank(rank)
        self._start_ns, self._end_ns = start_ns, end_ns

    @classmethod
    def of(cls, table: pd.DataFrame, start: str = "start_ns") -> SpansByRank:
        """Create from the spans of a table, all of which have ended."""
        return cls(*(table[name].to_numpy(np.int64) for name in ("rank", start, "end_ns")))

    def __getitem__(self, rank: int) -> Int64Array:
        """Return the starts and ends of the spans of a rank (2, n)."""
        rows = self.rows[rank]
        return np.stack([self._start_ns[rows], self._end_ns[rows]])
