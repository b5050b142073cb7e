"""Rounds of sends and receives that strategies make all-reduces of, and the all-reduce that each belongs to."""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt
import pandas as pd

from overlapscope.account.intervals import Int64Array
from overlapscope.trace.entering import compute_arrival_ns
from overlapscope.trace.reader import Trace

_SAME: Final = ["rank", "model", "step", "bucket"]


class Rounds:
    """The rounds of a recording.

    Args:
        trace: Recording whose ``segments`` are the rounds.
    """

    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        self.table = trace.segments.assign(row=_find_all_reduces(trace))
        """``trace.segments`` with ``row``, the row of the all-reduce in ``trace.collectives``; -1 if unknown."""
        self._order = self.table.sort_values(["rank", "start_ns"], kind="stable").index.to_numpy()
        sorted_ranks = self.table["rank"].to_numpy()[self._order]
        self._of_rank = {
            int(rank): self._order[slice(*np.searchsorted(sorted_ranks, [rank, rank + 1]))]
            for rank in np.unique(sorted_ranks)
        }
        self._longest_ns = int((self.table["end_ns"] - self.table["start_ns"]).max()) if len(self.table) else 0

    def in_view(self, rank: int, from_ns: int, to_ns: int) -> pd.DataFrame:
        """Return the rounds of a rank that overlap a time range of the common clock, by start."""
        places = self._of_rank.get(rank, np.empty(0, dtype=np.int64))
        starts_ns = self.table["start_ns"].to_numpy()[places]
        first, after = np.searchsorted(starts_ns, [from_ns - self._longest_ns, to_ns])
        near = self.table.iloc[places[first:after]]
        return near[(near["end_ns"] > from_ns) & (near["row"] >= 0)]

    def of(self, row: int) -> pd.DataFrame:
        """Return the rounds of an all-reduce on its own rank and on every rank with a known clock, by rank and start.

        Args:
            row: Its row in ``trace.collectives`` on one of the ranks.
        """
        collectives = self._trace.collectives
        own = collectives.iloc[row]
        is_same = (collectives["op"] == own["op"]) & collectives["rank"].isin([*self._trace.aligned_ranks, own["rank"]])
        for column in ("model", "step", "bucket"):
            is_same &= collectives[column] == own[column]
        rows = np.flatnonzero(is_same)
        turns = collectives.iloc[rows].groupby("rank").cumcount().to_numpy()
        rows = rows[turns == turns[rows == row]]
        return self.table[self.table["row"].isin(rows)].sort_values(["rank", "start_ns"], kind="stable")


def _find_all_reduces(trace: Trace) -> Int64Array:
    """Return the row of the all-reduce of each round; -1 if unknown.

    If a bucket is reduced several times in a step, that is the latest all-reduce entered before the round.
    """
    collectives = trace.collectives.assign(
        row=np.arange(len(trace.collectives)), entered_ns=compute_arrival_ns(trace.collectives)
    )
    entered = collectives[collectives["op"] == "all_reduce"][[*_SAME, "entered_ns", "row"]].sort_values("entered_ns")
    begun = trace.segments[[*_SAME, "start_ns"]].assign(place=np.arange(len(trace.segments))).sort_values("start_ns")
    found = pd.merge_asof(begun, entered, left_on="start_ns", right_on="entered_ns", by=_SAME)
    rows: npt.NDArray[np.int64] = np.full(len(begun), -1, dtype=np.int64)
    rows[found["place"]] = found["row"].fillna(-1)
    return rows
