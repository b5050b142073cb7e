"""Time is shared out exactly, against an oracle that hands out nanoseconds one by one."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from overlapscope.account.division import divide
from overlapscope.account.intervals import Intervals

STRETCHES = 3
times = st.integers(-8, 8)
stretches = st.lists(st.tuples(times, times), min_size=STRETCHES, max_size=STRETCHES)
claims = st.lists(st.lists(st.tuples(st.integers(0, STRETCHES - 1), times, times), max_size=8), max_size=5)
Spans = list[tuple[int, int, int]]


def shares_one_by_one(bounds: list[tuple[int, int]], claims: list[Spans]) -> list[list[int]]:
    shares = [[0] * (len(claims) + 1) for _ in bounds]
    for number, (start, end) in enumerate(bounds):
        for moment in range(start, end):
            who = (k for k, spans in enumerate(claims) if any(g == number and a <= moment < b for g, a, b in spans))
            shares[number][next(who, len(claims))] += 1
    return shares


@given(stretches, claims)
def test_each_nanosecond_goes_to_the_first_who_claims_it(bounds: list[tuple[int, int]], claims: list[Spans]) -> None:
    start_ns, end_ns = np.array(bounds, dtype=np.int64).T
    as_intervals = [Intervals(*np.array(spans, dtype=np.int64).reshape(-1, 3).T) for spans in claims]
    assert divide(start_ns, end_ns, as_intervals).tolist() == shares_one_by_one(bounds, claims)
