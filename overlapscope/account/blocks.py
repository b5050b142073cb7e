"""The blocks of every rank's every step, which sum to the step to the nanosecond.

Where several things happen at once, a moment belongs to what interrupts the others: a garbage collection stops the
optimizer, copies are a part of the backward and of the wait at its end, the broadcast of buffers is a part of what
precedes a forward. What is left of ``finalise`` is the wait for gradients, *exposed communication*.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import pandas as pd

from overlapscope.account.division import divide
from overlapscope.account.intervals import Int64Array, Intervals
from overlapscope.trace.reader import Trace

_CLAIMS: Final = (
    "gc",
    "copies",
    "buffers",
    "exposed",
    "optimizer",
    "evaluation",
    "data_wait",
    "forward",
    "backward",
    "between",
)
"""The first has precedence."""

_PHASE_OF: Final = {"exposed": "finalise"}
"""Under which name a block is recorded, where that is another."""

BLOCKS: Final = (
    "data_wait",
    "buffers",
    "forward",
    "between",
    "backward",
    "exposed",
    "copies",
    "optimizer",
    "evaluation",
    "gc",
    "unknown",
)
"""In the order in which people meet them in a step. ``between``: in no phase, such as the loss, between the first and
the last of a step. ``unknown``: nothing is recorded of it."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Blocks:
    """What the finished steps of all ranks consist of; G rows, in the order of ``trace.steps``."""

    rank: Int64Array
    """(G,)"""
    step: Int64Array
    """(G,)"""
    start_ns: Int64Array
    """(G,) on the common clock."""
    end_ns: Int64Array
    """(G,)"""
    ns: Int64Array
    """(G, len(BLOCKS)); a row sums to ``end_ns - start_ns``."""


def blocks_of(trace: Trace) -> Blocks:
    """Divide the steps of a recording."""
    steps = trace.steps
    start_ns, end_ns = (steps[name].to_numpy(dtype=np.int64) for name in ("start_ns", "end_ns"))
    stretches = _Stretches(steps["rank"].to_numpy(dtype=np.int64), start_ns, end_ns)
    buffers = trace.collectives[(trace.collectives["op"] == "broadcast") & trace.collectives["end_ns"].notna()]
    tables = {"gc": trace.pauses, "copies": trace.copies, "buffers": buffers}
    claims = [
        stretches.hull(trace.phases)
        if name == "between"
        else stretches.meet(
            tables[name] if name in tables else trace.phases[trace.phases["phase"] == _PHASE_OF.get(name, name)]
        )
        for name in _CLAIMS
    ]
    shares_ns = divide(start_ns, end_ns, claims)
    place = [(*_CLAIMS, "unknown").index(name) for name in BLOCKS]
    return Blocks(
        rank=stretches.rank,
        step=steps["step"].to_numpy(dtype=np.int64),
        start_ns=start_ns,
        end_ns=end_ns,
        ns=shares_ns[:, place],
    )


class _Stretches:
    """The steps of all ranks, by number of row."""

    def __init__(self, rank: Int64Array, start_ns: Int64Array, end_ns: Int64Array) -> None:
        self.rank = rank
        self._order = np.lexsort((start_ns, rank))
        self._rank, self._start_ns, self._end_ns = rank[self._order], start_ns[self._order], end_ns[self._order]

    def meet(self, spans: pd.DataFrame) -> Intervals:
        """Spans with rank, start_ns and end_ns, once for each step of their rank that they touch."""
        rank, start_ns, end_ns = (spans[name].to_numpy(dtype=np.int64) for name in ("rank", "start_ns", "end_ns"))
        first, last = self._touched(rank, start_ns, end_ns)
        times = np.maximum(last - first, 0)
        span = np.repeat(np.arange(len(rank)), times)
        place = np.arange(len(span)) - np.repeat(np.cumsum(times) - times, times) + first[span]
        return Intervals(self._order[place], start_ns[span], end_ns[span])

    def hull(self, spans: pd.DataFrame) -> Intervals:
        """Of each step the stretch from the first of its spans to the end of the last."""
        touching = self.meet(spans)
        if not len(touching.groups):
            return touching
        order = np.argsort(touching.groups, kind="stable")
        groups, first = np.unique(touching.groups[order], return_index=True)
        return Intervals(
            groups,
            np.minimum.reduceat(touching.starts_ns[order], first),
            np.maximum.reduceat(touching.ends_ns[order], first),
        )

    def _touched(self, rank: Int64Array, start_ns: Int64Array, end_ns: Int64Array) -> tuple[Int64Array, Int64Array]:
        """For each span the first step that it may touch, and the one after the last."""
        first, last = np.zeros((2, len(rank)), dtype=np.int64)
        for one in np.unique(rank):
            own = slice(*np.searchsorted(self._rank, [one, one + 1]))
            chosen = rank == one
            first[chosen] = own.start + np.searchsorted(self._end_ns[own], start_ns[chosen], side="right")
            last[chosen] = own.start + np.searchsorted(self._start_ns[own], end_ns[chosen], side="left")
        return first, last
