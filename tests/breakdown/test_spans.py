"""Rows and spans by rank, cut at the edges of steps and joined: against oracles that look at each nanosecond."""

from __future__ import annotations

import itertools
from itertools import pairwise
from random import Random

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from overlapscope.breakdown.spans import RowsByRank, SpansByRank, StepsByRank, merge_intervals

ranks_of_rows = st.lists(st.integers(-1, 5), max_size=20)


@given(ranks_of_rows | ranks_of_rows.map(sorted))
def test_each_row_is_found_with_its_rank(ranks: list[int]) -> None:
    rows_of, number = RowsByRank(ranks), np.arange(len(ranks))
    assert rows_of.ranks == sorted(set(ranks))
    for rank in range(-2, 7):
        assert number[rows_of[rank]].tolist() == [row for row, own in enumerate(ranks) if own == rank]


def test_rows_that_are_in_order_are_not_copied() -> None:
    assert RowsByRank([0, 0, 3])[0] == slice(0, 2)


def test_spans_are_those_of_a_rank() -> None:
    spans = SpansByRank(np.array([1, 0, 1]), np.array([5, 6, 7]), np.array([8, 9, 10]))
    assert spans[1].tolist() == [[5, 7], [8, 10]]
    assert spans[2].shape == (2, 0)


times = st.integers(0, 30)
edges_of_steps = st.lists(times, min_size=2, max_size=8, unique=True).map(sorted)
lists_of_spans = st.lists(st.tuples(times, st.integers(1, 12)).map(lambda pair: (pair[0], sum(pair))), max_size=6)


@given(edges_of_steps, lists_of_spans, st.randoms(use_true_random=False))
def test_each_part_is_in_its_step(edges: list[int], spans: list[tuple[int, int]], shuffle: Random) -> None:
    steps = [(1, *step) for step in pairwise(edges)] + [(0, 0, 30)]
    shuffle.shuffle(steps)
    expected = [
        (which, row, max(start, begin), min(end, until))
        for which, (start, end) in enumerate(spans)
        for begin, until, row in sorted((begin, until, row) for row, (rank, begin, until) in enumerate(steps) if rank)
        if start < until and begin < end
    ]
    which, row, edges_ns = StepsByRank(*np.array(steps).T).cut(1, np.array(spans, dtype=np.int64).reshape(-1, 2).T)
    assert list(zip(which.tolist(), row.tolist(), *edges_ns.tolist(), strict=True)) == expected


GROUPS = 2
# A narrow range makes touching, nested, equal, empty and backward intervals common.
spans = st.lists(st.tuples(st.integers(0, GROUPS - 1), st.integers(-6, 6), st.integers(-6, 6)), max_size=25)
Span = tuple[int, int, int]


def union_of(rows: list[Span]):
    return merge_intervals(*np.array(rows, dtype=np.int64).reshape(-1, 3).T)


def covered(rows: list[Span], group: int) -> set[int]:
    return {moment for g, start, end in rows if g == group for moment in range(start, end)}


@given(spans)
def test_union_covers_exactly_the_moments_of_its_intervals(rows: list[Span]) -> None:
    joined = list(zip(*(values.tolist() for values in union_of(rows)), strict=True))
    for group in range(GROUPS):
        assert covered(joined, group) == covered(rows, group)


@given(spans)
def test_union_is_sorted_disjoint_and_has_no_touching_or_empty_parts(rows: list[Span]) -> None:
    joined = list(zip(*(values.tolist() for values in union_of(rows)), strict=True))
    assert all(start < end for _, start, end in joined)
    for (group, _, end), (next_group, next_start, _) in itertools.pairwise(joined):
        assert group < next_group or (group == next_group and end < next_start)


def test_touching_intervals_are_joined_within_a_group_and_not_across() -> None:
    joined = union_of([(0, 0, 5), (1, 9, 11), (0, 5, 9)])
    assert [values.tolist() for values in joined] == [[0, 1], [0, 9], [9, 11]]


def test_times_near_the_limit_of_64_bits_stay_exact_in_many_groups() -> None:
    # Offsetting each group by the range of the times, as a one-pass union would, overflows here.
    base = 2**62
    groups = np.repeat(np.arange(1000), 2)
    starts = np.tile([base, base + 5], 1000)
    joined = merge_intervals(groups, starts, starts + 7)
    assert len(joined.groups) == 1000
    assert (joined.ends_ns - joined.starts_ns).tolist() == [12] * 1000


def test_lengths_beyond_what_a_float_holds_are_exact() -> None:
    joined = merge_intervals(np.array([0, 0]), np.array([0, 2**60]), np.array([2**53 + 1, 2**60 + 2]))
    assert (joined.ends_ns - joined.starts_ns).tolist() == [2**53 + 1, 2]
