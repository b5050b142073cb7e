"""Shares stretches of time out among claims on them: a moment goes to the first that claims it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from overlapscope.account.intervals import Int64Array, Intervals, measure, union


def divide(start_ns: Int64Array, end_ns: Int64Array, claims: Sequence[Intervals]) -> Int64Array:
    """Share out the time of G stretches among K claims.

    Each claim gets what it adds to those before it, so the shares of a stretch sum to its length exactly.

    Args:
        start_ns: (G,) of each stretch.
        end_ns: (G,) of each; one that does not end after its start is empty.
        claims: the intervals of each claim, by number of the stretch, the first claim first. What lies outside its
            stretch is no part of it.

    Returns:
        (G, K + 1) nanoseconds; the last column is what nobody claims.
    """
    count = len(start_ns)
    shares_ns = np.zeros((count, len(claims) + 1), dtype=np.int64)
    claimed = Intervals(*np.zeros((3, 0), dtype=np.int64))
    before_ns = np.zeros(count, dtype=np.int64)
    for place, claim in enumerate(claims):
        claimed = union(*(np.concatenate(pair) for pair in zip(claimed, _within(claim, start_ns, end_ns), strict=True)))
        together_ns = measure(claimed, count)
        shares_ns[:, place] = together_ns - before_ns
        before_ns = together_ns
    shares_ns[:, -1] = np.maximum(end_ns - start_ns, 0) - before_ns
    return shares_ns


def _within(claim: Intervals, start_ns: Int64Array, end_ns: Int64Array) -> Intervals:
    groups, starts_ns, ends_ns = claim
    return Intervals(groups, np.maximum(starts_ns, start_ns[groups]), np.minimum(ends_ns, end_ns[groups]))
