"""What is said of repetitions, and what can't be."""

from __future__ import annotations

import math

import pytest

from overlapscope.interval import Interval
from overlapscope.lab.experiments.estimates import (
    estimate_change,
    estimate_mean,
    format_difference,
    is_significant,
    make_stacked_bar,
    select_rows,
)
from tests.lab.experiments.rows import MS, rows_of, together


def interval(value: float, low: float, high: float) -> Interval:
    return Interval(value=value, low=low, high=high)


def test_a_setting_without_a_value_is_one_that_is_not_set():
    rows = together(rows_of([1, 2]), rows_of([3, 4], bucket_cap_mb=5.0))
    assert select_rows(rows, bucket_cap_mb=None)["step_ns"].tolist() == [1 * MS, 2 * MS]
    assert select_rows(rows, bucket_cap_mb=5.0)["step_ns"].tolist() == [3 * MS, 4 * MS]


def test_what_drifts_between_repetitions_is_no_difference():
    """Twice as slow each time, but always 10 % apart."""
    found = estimate_change(rows_of([100, 200, 400]), rows_of([90, 180, 360]))
    assert found.value == pytest.approx(-0.1)
    assert found.high - found.low == pytest.approx(0, abs=1e-9)
    assert is_significant(found)


def test_twice_and_half_as_long_are_no_difference_together():
    found = estimate_change(rows_of([100, 100, 100, 100]), rows_of([200, 50, 200, 50]))
    assert found.value == pytest.approx(0, abs=1e-9)
    assert -1 < found.low < 0 < found.high
    assert not is_significant(found)


def test_repetitions_that_one_of_both_lacks_are_left_out():
    assert estimate_change(rows_of([100, 200, 400, 800]), rows_of([90, 180, 360])).value == pytest.approx(-0.1)
    assert math.isnan(estimate_change(rows_of([100]), rows_of([90]).assign(repetition=7)).value)


def test_fewer_than_three_repetitions_tell_nothing():
    found = estimate_change(rows_of([100, 100]), rows_of([50, 51]))
    assert math.isnan(found.low)
    assert not is_significant(found)


def test_the_mean_of_repetitions_is_in_its_interval():
    found = estimate_mean([90.0, 100.0, 110.0])
    assert found.low < found.value == 100.0 < found.high


def test_the_interval_is_students_whatever_the_order_of_repetitions():
    """Of three the 95 % quantile is 2.92."""
    for values in ([90.0, 100.0, 110.0], [90.0, 110.0, 100.0]):
        assert estimate_mean(values).high == pytest.approx(100 + 2.92 * 10 / math.sqrt(3), rel=2e-3)


def test_a_difference_that_was_never_negative_may_still_be_so():
    found = estimate_change(rows_of([100, 100, 100]), rows_of([101, 105, 120]))
    assert found.low < 0 < found.value
    assert not is_significant(found)


def test_a_sentence_says_no_more_than_its_interval(golden):
    differences = (
        interval(-0.12, -0.15, -0.09),
        interval(0.30, 0.25, 0.35),
        interval(0.01, -0.02, 0.04),
        interval(-0.01, math.nan, math.nan),
        interval(math.nan, math.nan, math.nan),
    )
    golden("lab/differences", "\n".join(format_difference("this", each, "that") for each in differences))


def test_the_parts_of_a_bar_sum_to_its_step():
    rows = rows_of([10, 20, 30], {"forward_ns": 2 * MS})
    rows["backward_ns"] -= 2 * MS
    bar = make_stacked_bar("", rows)
    assert bar.parts_ns == {"forward": 2 * MS, "backward": 18 * MS}
    assert sum(bar.parts_ns.values()) == bar.step_ns.value == 20 * MS
