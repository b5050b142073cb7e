"""The vectorized unions against an oracle that counts nanoseconds one by one."""

from __future__ import annotations

import itertools

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from overlapscope.breakdown.spans import merge_intervals

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
