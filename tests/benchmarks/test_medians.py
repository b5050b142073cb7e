"""Intervals of medians hold the true one as often as they say, and are no wider than need be."""

from __future__ import annotations

import math
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.medians import CONFIDENCE, format_interval, median_with_ci


@pytest.mark.parametrize("count", range(1, 15))
def test_the_true_median_is_held_as_often_as_stated(count: int) -> None:
    # Each value is as likely below the true median, 0, as above. Only that counts, so all cases can be tried.
    intervals = [median_with_ci(sorted(signs)) for signs in product((-1.0, 1.0), repeat=count)]
    share = sum(each.low < 0 < each.high for each in intervals) / len(intervals)
    assert share >= CONFIDENCE or all(math.isnan(each.low) for each in intervals)
    assert (count >= 5) == (share > 0)


def test_it_is_the_narrowest_such_interval() -> None:
    interval = median_with_ci([float(value) for value in range(9)])  # 1 to 7 holds in 96 %, 2 to 6 in 82 %
    assert (interval.low, interval.value, interval.high) == (1, 4, 7)


@given(st.lists(st.floats(0.5, 2), min_size=5, max_size=40))
def test_the_median_is_within_its_interval(values: list[float]) -> None:
    interval = median_with_ci(values)
    assert min(values) <= interval.low <= interval.value <= interval.high <= max(values)


def test_it_is_shown_with_its_bounds_if_it_has_any() -> None:
    assert format_interval(median_with_ci([1.0, 1.01, 1.02, 1.03, 1.5]), 2) == "1.02 (1.00 to 1.50)"
    assert format_interval(median_with_ci([1.0, 1.01]), 3) == "1.005"
