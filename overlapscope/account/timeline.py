"""What one rank does at each moment: a line of time painted in colours, without gap or overlap.

Several things happen at once: a garbage collection interrupts an optimizer, copies are a part of backward. A moment
belongs to the first that claims it. However the line is cut into stretches, what each holds sums to its length.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from overlapscope.account.intervals import Int64Array, union


@dataclass(frozen=True, eq=False, kw_only=True)
class Timeline:
    """Who has each moment: M pieces between M + 1 edges, K claimants."""

    edges_ns: Int64Array
    """(M + 1,) ascending; empty if nobody claims anything."""
    owner: npt.NDArray[np.int8]
    """(M,) number of the claimant; -1 for nobody."""
    claimants: int
    """K"""

    def within(self, start_ns: npt.ArrayLike, end_ns: npt.ArrayLike) -> Int64Array:
        """How much of some stretches belongs to whom.

        Args:
            start_ns: (Q,) in any order; stretches may overlap.
            end_ns: (Q,) a stretch that does not end after its start is empty.

        Returns:
            (Q, K + 1) nanoseconds; the last column is nobody's. Rows sum to the lengths of the stretches.
        """
        start_ns, end_ns = (np.asarray(values, dtype=np.int64) for values in (start_ns, end_ns))
        end_ns = np.maximum(start_ns, end_ns)
        shares_ns = np.zeros((len(start_ns), self.claimants + 1), dtype=np.int64)
        if len(self.owner) and len(start_ns):
            before_ns = np.zeros((len(self.owner) + 1, self.claimants + 1), dtype=np.int64)
            before_ns[np.arange(1, len(self.owner) + 1), self.owner] = np.diff(self.edges_ns)
            np.cumsum(before_ns, axis=0, out=before_ns)
            shares_ns += self._until(end_ns, before_ns) - self._until(start_ns, before_ns)
        shares_ns[:, -1] = end_ns - start_ns - shares_ns[:, :-1].sum(axis=1)
        return shares_ns

    def spans_of(self, claimant: int) -> Int64Array:
        """(2, n) from when until when a claimant has what it has, by time."""
        own = np.flatnonzero(self.owner == claimant)
        return np.stack([self.edges_ns[own], self.edges_ns[own + 1]])

    def _until(self, time_ns: Int64Array, before_ns: Int64Array) -> Int64Array:
        """(Q, K + 1) what belongs to whom from the first edge to some moments, which may lie outside."""
        time_ns = np.clip(time_ns, self.edges_ns[0], self.edges_ns[-1])
        piece = np.minimum(np.searchsorted(self.edges_ns, time_ns, side="right") - 1, len(self.owner) - 1)
        until_ns: Int64Array = before_ns.take(piece, axis=0)
        until_ns[np.arange(len(piece)), self.owner[piece]] += time_ns - self.edges_ns[piece]
        return until_ns


def paint(number: npt.NDArray[np.int8], edges_ns: Int64Array, claimants: int) -> Timeline:
    """Give every moment to the first who claims it.

    Args:
        number: (n,) whose each span is, in any order; 0, the first claimant, comes before the others.
        edges_ns: (2, n) from when until when.
        claimants: how many there are, at most 62.
    """
    # Where the spans of a claimant do not overlap, each edge turns its bit on or off.
    number, starts_ns, ends_ns = union(number, *edges_ns)
    times_ns = np.concatenate([starts_ns, ends_ns])
    order = np.argsort(times_ns, kind="stable")
    times_ns = times_ns[order]
    claiming = np.bitwise_xor.accumulate(np.tile(np.left_shift(1, number, dtype=np.int64), 2)[order])[:-1]
    lasts = np.diff(times_ns) > 0
    begin_ns, claiming = times_ns[:-1][lasts], claiming[lasts]
    # The lowest bit is a power of 2, of which frexp gives the exponent exactly.
    owner = (np.frexp((claiming & -claiming).astype(np.float64))[1] - 1).astype(np.int8)
    changes = np.append(True, owner[1:] != owner[:-1])[: len(owner)]
    return Timeline(edges_ns=np.append(begin_ns[changes], times_ns[-1:]), owner=owner[changes], claimants=claimants)
