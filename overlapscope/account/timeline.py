"""Timeline of one rank: each moment assigned to one owner, without gaps or overlaps.

Several activities overlap: a garbage collection interrupts an optimizer, copies are a part of backward. A moment
belongs to the claimant with the highest precedence. However the timeline is cut into spans, the shares of each span sum
to its length.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from overlapscope.account.intervals import Int64Array, merge_intervals


@dataclass(frozen=True, eq=False, kw_only=True)
class RankTimeline:
    """The owner of each moment: M segments between M + 1 edges, K claimants."""

    edges_ns: Int64Array
    """(M + 1,) Edges of the segments, ascending; empty if there are no claims."""
    owner: npt.NDArray[np.int8]
    """(M,) Number of the claimant that owns each segment; -1 for none."""
    claimants: int
    """Number of claimants, K."""

    def within(self, start_ns: npt.ArrayLike, end_ns: npt.ArrayLike) -> Int64Array:
        """Return how much of each span belongs to each claimant.

        Args:
            start_ns: (Q,) In any order; spans may overlap.
            end_ns: (Q,) A span that does not end after its start is empty.

        Returns:
            (Q, K + 1) Nanoseconds; the last column is time without an owner. Rows sum to the lengths of the spans.
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
        """Return the starts and ends (2, n) of the segments that a claimant owns, by time."""
        own = np.flatnonzero(self.owner == claimant)
        return np.stack([self.edges_ns[own], self.edges_ns[own + 1]])

    def _until(self, time_ns: Int64Array, before_ns: Int64Array) -> Int64Array:
        """Return the time (Q, K + 1) owned by each claimant from the first edge to moments, which may lie outside."""
        time_ns = np.clip(time_ns, self.edges_ns[0], self.edges_ns[-1])
        piece = np.minimum(np.searchsorted(self.edges_ns, time_ns, side="right") - 1, len(self.owner) - 1)
        until_ns: Int64Array = before_ns.take(piece, axis=0)
        until_ns[np.arange(len(piece)), self.owner[piece]] += time_ns - self.edges_ns[piece]
        return until_ns


def assign_owners(number: npt.NDArray[np.int8], edges_ns: Int64Array, claimants: int) -> RankTimeline:
    """Assign every moment to the claimant with the lowest number.

    Example: claimant 1 from 0 to 20 and claimant 0 from 10 to 12 give edges [0, 10, 12, 20] and owners [1, 0, 1].

    Args:
        number: (n,) Claimant of each span, in any order; 0 has the highest precedence.
        edges_ns: (2, n) Start and end of each span.
        claimants: Number of claimants, at most 62.
    """
    # Spans of one claimant do not overlap after the union, so each edge toggles its bit.
    number, starts_ns, ends_ns = merge_intervals(number, *edges_ns)
    times_ns = np.concatenate([starts_ns, ends_ns])
    order = np.argsort(times_ns, kind="stable")
    times_ns = times_ns[order]
    claiming = np.bitwise_xor.accumulate(np.tile(np.left_shift(1, number, dtype=np.int64), 2)[order])[:-1]
    lasts = np.diff(times_ns) > 0
    begin_ns, claiming = times_ns[:-1][lasts], claiming[lasts]
    # The lowest set bit is a power of 2, whose exponent frexp gives exactly.
    owner = (np.frexp((claiming & -claiming).astype(np.float64))[1] - 1).astype(np.int8)
    changes = np.append(True, owner[1:] != owner[:-1])[: len(owner)]
    return RankTimeline(edges_ns=np.append(begin_ns[changes], times_ns[-1:]), owner=owner[changes], claimants=claimants)
