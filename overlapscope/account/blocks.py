"""The one division of a step's time: blocks of every rank's every step, which sum to it to the nanosecond.

Where several things happen at once, a moment belongs to what interrupts the others: a garbage collection stops the
optimizer, copies are a part of the backward, the broadcast of buffers is a part of what precedes a forward. While a
rank waits for gradients, the time until the last bucket has ended is *exposed communication*; what remains of finalise
hands the averages over, and counts as copies.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import numpy.typing as npt
import pandas as pd

from overlapscope.account.arrivals import Matched, match_collectives
from overlapscope.account.by_rank import RowsByRank
from overlapscope.account.intervals import Int64Array, union
from overlapscope.account.timeline import Timeline, paint
from overlapscope.account.waits import Starts, Waits, starts_of, waits_of
from overlapscope.trace.reader import Trace
from overlapscope.trace.tables import PHASE_NAMES

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
"""In the order in which people meet them in a step. ``buffers``: their broadcast. ``exposed``: communication that
nothing hides. ``between``: in no phase, such as the loss, between the first and the last of a step. ``unknown``:
nothing is recorded of it."""

_CLAIMS: Final = (
    "gc",
    "copies",
    "buffers",
    "exposed",
    "finalise",
    "optimizer",
    "evaluation",
    "data_wait",
    "forward",
    "backward",
    "between",
)
"""The first has precedence."""
_ON_DEVICE: Final = ("copies", "buffers", "exposed", *_CLAIMS[4:-1], "gc", "between")
"""The same where times are a device's: what stops the host shows only where the device has nothing to do."""
_BLOCK_OF: Final = {"finalise": "copies"}


@dataclass(frozen=True, eq=False, kw_only=True)
class Account:
    """What the finished steps of all ranks consist of; G rows, in the order of ``trace.steps``, and W waits."""

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
    hidden_ns: Int64Array
    """(G, len(BLOCKS)) for how long gradients are communicated while something else goes on, by that block."""
    waits: Waits
    """What the exposed communication consists of, each within one step."""
    wait_row: Int64Array
    """(W,) row of the step of each wait."""
    wait_ns: Int64Array
    """(W,) those of a step sum to its exposed communication: shorter than the wait where something interrupts it."""
    later_ns: Int64Array
    """(W, len(BLOCKS)) what the later rank does meanwhile; sums to the length of the wait, and 0 without one."""
    starts: Starts
    matched: Matched
    timelines: dict[int, Timeline]
    """Of each rank, with the places of ``BLOCKS`` as owners."""


def account_of(trace: Trace) -> Account:
    """Divide the steps of a recording."""
    matched = match_collectives(trace)
    starts = starts_of(trace, matched)
    steps = trace.steps
    rank, step, start_ns, end_ns = (steps[name].to_numpy(np.int64) for name in ("rank", "step", "start_ns", "end_ns"))
    whole = waits_of(trace, starts)
    timelines = dict(_timelines(trace, whole))
    cut = _Cut(rank, start_ns, end_ns)
    waits, wait_row = cut.waits(whole)
    sent, sent_row, sent_edges_ns = cut.at_steps(*_under_way(trace))
    ns, hidden_ns = np.zeros((2, len(steps), len(BLOCKS)), dtype=np.int64)
    wait_ns = np.zeros(len(waits.rank), dtype=np.int64)
    later_ns = np.zeros((len(waits.rank), len(BLOCKS)), dtype=np.int64)
    exposed = BLOCKS.index("exposed")
    steps_of, sent_of, waits_of_rank, awaited_of = map(RowsByRank, (rank, sent, waits.rank, waits.later_rank))
    for one, timeline in timelines.items():
        own = steps_of[one]
        ns[own] = timeline.within(start_ns[own], end_ns[own])
        own = sent_of[one]
        np.add.at(hidden_ns, sent_row[own], timeline.within(*sent_edges_ns[:, own]))
        own = waits_of_rank[one]
        wait_ns[own] = timeline.within(waits.start_ns[own], waits.end_ns[own])[:, exposed]
        own = awaited_of[one]
        later_ns[own] = timeline.within(waits.start_ns[own], waits.end_ns[own])
    hidden_ns[:, exposed] = 0
    return Account(
        rank=rank,
        step=step,
        start_ns=start_ns,
        end_ns=end_ns,
        ns=ns,
        hidden_ns=hidden_ns,
        waits=waits,
        wait_row=wait_row,
        wait_ns=wait_ns,
        later_ns=later_ns,
        starts=starts,
        matched=matched,
        timelines=timelines,
    )


def _timelines(trace: Trace, waits: Waits) -> Iterator[tuple[int, Timeline]]:
    buffers = trace.collectives[(trace.collectives["op"] == "broadcast") & trace.collectives["end_ns"].notna()]
    phases = _Spans.of(trace.phases)
    phase = trace.phases["phase"].to_numpy()
    sources = {name: phases.where(phase == name) for name in PHASE_NAMES}
    sources |= {"gc": _Spans.of(trace.pauses), "copies": _Spans.of(trace.copies)}
    sources |= {"buffers": _Spans.of(buffers, start="launch_ns")}
    sources |= {"exposed": _Spans(waits.rank, np.stack([waits.start_ns, waits.end_ns]))}
    steps = _Spans.of(trace.steps)
    for rank, device in zip(trace.ranks["rank"].tolist(), trace.ranks["device"].astype(str), strict=True):
        claims = _ON_DEVICE if device.startswith("cuda") else _CLAIMS
        hulls_ns = _hulls(phases.of_rank(rank), steps.of_rank(rank))
        timeline = paint([hulls_ns if name == "between" else sources[name].of_rank(rank) for name in claims])
        block_of = _BLOCK_OF
        if not sources["optimizer"].of_rank(rank).size:  # where an update of the user's own ends nobody knows
            block_of = _BLOCK_OF | {"data_wait": "between"}
        block = np.array([BLOCKS.index(block_of.get(name, name)) for name in claims] + [len(BLOCKS) - 1], np.int8)
        yield rank, replace(timeline, owner=block[timeline.owner], claimants=len(BLOCKS) - 1)


class _Spans:
    """Spans of all ranks: of whom (n,), from when until when (2, n)."""

    def __init__(self, rank: Int64Array, edges_ns: Int64Array) -> None:
        self._rank, self._edges_ns = rank, edges_ns
        self._rows = RowsByRank(rank)

    @classmethod
    def of(cls, table: pd.DataFrame, start: str = "start_ns") -> _Spans:
        edges_ns = np.stack([table[name].to_numpy(np.int64) for name in (start, "end_ns")])
        return cls(table["rank"].to_numpy(np.int64), edges_ns)

    def where(self, which: npt.NDArray[np.bool_]) -> _Spans:
        """Those of some rows of the table."""
        return _Spans(self._rank[which], self._edges_ns[:, which])

    def of_rank(self, rank: int) -> Int64Array:
        """Those of one rank, (2, n)."""
        return self._edges_ns[:, self._rows[rank]]


def _hulls(phases_ns: Int64Array, steps_ns: Int64Array) -> Int64Array:
    """(2, n) of the steps of a rank the stretch from the first of its phases to the end of the last."""
    steps_ns = steps_ns[:, np.argsort(steps_ns[0], kind="stable")]
    place = np.searchsorted(steps_ns[1], phases_ns[0], side="right")
    inside = place < steps_ns.shape[1]
    place, phases_ns = place[inside], phases_ns[:, inside]
    first_ns, last_ns = steps_ns[1].copy(), steps_ns[0].copy()
    np.minimum.at(first_ns, place, phases_ns[0])
    np.maximum.at(last_ns, place, phases_ns[1])
    return np.stack([np.maximum(first_ns, steps_ns[0]), np.minimum(last_ns, steps_ns[1])])


def _under_way(trace: Trace) -> tuple[Int64Array, Int64Array]:
    """When gradients are communicated: of which rank (n,), and from when until when (2, n), disjoint on each."""
    reduced = trace.collectives[(trace.collectives["bucket"] >= 0) & trace.collectives["end_ns"].notna()]
    start_ns = reduced["start_ns"].fillna(reduced["launch_ns"])
    rank, *edges_ns = union(
        reduced["rank"].to_numpy(), start_ns.to_numpy(np.int64), reduced["end_ns"].to_numpy(np.int64)
    )
    return rank, np.stack(edges_ns)


class _Cut:
    """Cuts spans at the edges of steps."""

    def __init__(self, rank: Int64Array, start_ns: Int64Array, end_ns: Int64Array) -> None:
        self._order = np.lexsort((start_ns, rank))
        self._rank, self._start_ns, self._end_ns = rank[self._order], start_ns[self._order], end_ns[self._order]

    def waits(self, whole: Waits) -> tuple[Waits, Int64Array]:
        """The parts of waits within steps, and in which row each lies."""
        which, row, edges_ns = self._parts(whole.rank, np.stack([whole.start_ns, whole.end_ns]))
        return replace(whole.of(which), start_ns=edges_ns[0], end_ns=edges_ns[1]), row

    def at_steps(self, rank: Int64Array, edges_ns: Int64Array) -> tuple[Int64Array, Int64Array, Int64Array]:
        """Of the parts of spans within steps: whose they are, in which row, from when until when (2, n)."""
        which, row, edges_ns = self._parts(rank, edges_ns)
        return rank[which], row, edges_ns

    def _parts(self, rank: Int64Array, edges_ns: Int64Array) -> tuple[Int64Array, Int64Array, Int64Array]:
        first, count = np.zeros((2, len(rank)), dtype=np.int64)
        rows_of = RowsByRank(rank)
        for one in np.unique(rank).tolist():
            begin, end = np.searchsorted(self._rank, [one, one + 1])
            theirs = rows_of[one]
            first[theirs] = begin + np.searchsorted(self._end_ns[begin:end], edges_ns[0, theirs], side="right")
            last = begin + np.searchsorted(self._start_ns[begin:end], edges_ns[1, theirs], side="left")
            count[theirs] = np.maximum(0, last - first[theirs])
        which = np.repeat(np.arange(len(count)), count)
        place = first[which] + np.arange(len(which)) - np.repeat(np.cumsum(count) - count, count)
        from_ns = np.maximum(edges_ns[0, which], self._start_ns[place])
        until_ns = np.minimum(edges_ns[1, which], self._end_ns[place])
        return which, self._order[place], np.stack([from_ns, until_ns])
