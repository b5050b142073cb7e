"""The rows and the spans of each rank, found without a look at those of all others."""

from __future__ import annotations

from itertools import pairwise
from typing import Final

import numpy as np
import numpy.typing as npt
import pandas as pd

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


class SpansByRank:
    """Spans of all ranks, by rank.

    Args:
        rank: (N,) whose each is, in any order.
        start_ns: (N,)
        end_ns: (N,)
    """

    def __init__(self, rank: Int64Array, start_ns: Int64Array, end_ns: Int64Array) -> None:
        self.rows = RowsByRank(rank)
        self._start_ns, self._end_ns = start_ns, end_ns

    @classmethod
    def of(cls, table: pd.DataFrame, start: str = "start_ns") -> SpansByRank:
        """Those of a table, which have ended."""
        return cls(*(table[name].to_numpy(np.int64) for name in ("rank", start, "end_ns")))

    def __getitem__(self, rank: int) -> Int64Array:
        """(2, n) from when until when those of a rank are."""
        rows = self.rows[rank]
        return np.stack([self._start_ns[rows], self._end_ns[rows]])
