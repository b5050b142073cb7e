"""Time is shared out exactly, against an oracle that hands out nanoseconds one by one."""

from __future__ import annotations

from itertools import chain

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from overlapscope.breakdown.breakdown import RankTimeline, assign_owners

times = st.integers(-8, 8)
Spans = list[tuple[int, int]]
spans = st.lists(st.tuples(times, times), max_size=8)
wider = st.integers(-12, 12)


def painted(claims: list[Spans]) -> RankTimeline:
    number = np.repeat(np.arange(len(claims), dtype=np.int8), [len(own) for own in claims])
    edges_ns = np.array(list(chain(*claims)), dtype=np.int64).reshape(-1, 2).T
    return assign_owners(number, edges_ns, len(claims))


def shares_one_by_one(claims: list[Spans], start: int, end: int) -> list[int]:
    shares = [0] * (len(claims) + 1)
    for moment in range(start, end):
        who = (number for number, own in enumerate(claims) if any(first <= moment < last for first, last in own))
        shares[next(who, len(claims))] += 1
    return shares


@given(st.lists(spans, max_size=5), st.lists(st.tuples(wider, wider), max_size=5))
def test_each_nanosecond_belongs_to_the_first_who_claims_it(claims: list[Spans], stretches: Spans) -> None:
    timeline = painted(claims)
    start_ns, end_ns = np.array(stretches, dtype=np.int64).reshape(-1, 2).T
    shares_ns = timeline.within(start_ns, end_ns)
    assert shares_ns.tolist() == [shares_one_by_one(claims, *stretch) for stretch in stretches]
    assert shares_ns.sum(axis=1).tolist() == np.maximum(0, end_ns - start_ns).tolist()


@given(st.lists(spans, max_size=5))
def test_neighboring_pieces_have_different_owners(claims: list[Spans]) -> None:
    timeline = painted(claims)
    assert (np.diff(timeline.edges_ns) > 0).all()
    assert (timeline.owner[1:] != timeline.owner[:-1]).all()


@given(st.lists(spans, max_size=5))
def test_what_a_claimant_has_are_the_moments_in_which_it_is_first(claims: list[Spans]) -> None:
    timeline = painted(claims)
    for number in range(len(claims)):
        moments = [moment for first, last in timeline.spans_of(number).T for moment in range(first, last)]
        assert moments == [one for one in range(-8, 8) if shares_one_by_one(claims, one, one + 1)[number]]
