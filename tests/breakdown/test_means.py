"""Means and their intervals, a mean step, and the difference of two."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from overlapscope.breakdown.breakdown import BLOCKS
from overlapscope.breakdown.means import MeanStep, compute_mean_step, mean_with_ci

RNG = np.random.default_rng(15)


def autoregressive(correlation: float, steps: int, count: int) -> np.ndarray[tuple[int, int], np.dtype[np.float64]]:
    """(steps, count) series of mean 0 and standard deviation 1."""
    noise = RNG.standard_normal((steps, count))
    series = noise.copy()
    for step in range(1, steps):
        series[step] = correlation * series[step - 1] + math.sqrt(1 - correlation**2) * noise[step]
    return series


def test_a_mean_of_what_is_never_negative_is_not_negative_either() -> None:
    times, differences = mean_with_ci(np.array([[0.0, -1.0], [0.0, 1.0], [9.0, 9.0]]))
    assert times.low == 0 > differences.low


def test_the_mean_of_a_handful_is_students() -> None:
    (found,) = mean_with_ci(np.array([[11.0], [12.0], [13.0], [14.0], [15.0]]))
    assert found.value == 13.0
    # The neighbors of these are alike, so they count for fewer than five.
    assert found.high - 13.0 > 2.132 * math.sqrt(2.5 / 5)
    assert found.high - 13.0 == pytest.approx(13.0 - found.low)


def test_a_mean_of_positive_times_is_never_said_to_be_nothing() -> None:
    (found,) = mean_with_ci(np.array([[154.0], [335.0], [639.0]]))
    assert 0 < found.low < 154
    assert found.high > 639, "so little is known from three steps"
    (found,) = mean_with_ci(np.array([[50.0], [50.0], [200.0]]))
    assert (found.low, found.high <= 400.0) == (25.0, True)


def test_what_never_varies_is_sure() -> None:
    (found,) = mean_with_ci(np.full((10, 1), 7.0))
    assert (found.low, found.value, found.high) == (7.0, 7.0, 7.0)


@pytest.mark.parametrize("steps", [0, 1, 2])
def test_one_or_two_steps_tell_nothing_of_how_sure_it_is(steps: int) -> None:
    (found,) = mean_with_ci(np.ones((steps, 1)))
    assert math.isnan(found.low)
    assert math.isnan(found.high)
    assert math.isnan(found.value) == (steps == 0)


@pytest.mark.parametrize("correlation", [0.0, 0.5, 0.9])
@pytest.mark.parametrize("steps", [30, 100, 1000])
def test_nine_of_ten_intervals_hold(correlation: float, steps: int) -> None:
    found = mean_with_ci(autoregressive(correlation, steps, 2000))
    held = np.mean([interval.low <= 0 <= interval.high for interval in found])
    assert 0.82 <= held <= 0.95


def series(steps: int) -> st.SearchStrategy[np.ndarray]:
    return arrays(np.float64, (steps, len(BLOCKS)), elements=st.floats(0, 1e9))


def check_sum(mean: MeanStep) -> None:
    assert sum(each.value for each in mean.blocks.values()) == pytest.approx(mean.step.value, abs=1e-3)


@given(series(5), series(7))
def test_blocks_of_a_mean_and_of_a_difference_sum_to_the_step(one: np.ndarray, other: np.ndarray) -> None:
    for mean in (compute_mean_step(one), compute_mean_step(one).minus(compute_mean_step(other))):
        check_sum(mean)
        assert all(each.low <= each.value <= each.high for each in mean.blocks.values())


@given(series(5), series(5), series(5))
def test_what_is_cut_off_a_saving_makes_no_loss_of_it(one: np.ndarray, other: np.ndarray, whole: np.ndarray) -> None:
    saving, mean = compute_mean_step(one - other), compute_mean_step(whole)
    capped = saving.capped_at(mean)
    check_sum(capped)
    assert min(0.0, saving.step.value) - 1e-3 <= capped.step.value <= saving.step.value + 1e-3
    for name, block in capped.blocks.items():
        assert block.value <= mean.blocks[name].value + 1e-3
        assert (block.value <= 1e-3) or (saving.blocks[name].value >= 0)


def test_the_interval_of_a_difference_is_that_of_independent_errors() -> None:
    random = np.random.default_rng(0)
    steps = 100 + random.normal(size=(400, len(BLOCKS)))
    less = compute_mean_step(steps).minus(compute_mean_step(steps[:100] - 10))
    whole, part = compute_mean_step(steps).step, compute_mean_step(steps[:100]).step
    assert less.step.high - less.step.value == pytest.approx(
        np.hypot(whole.high - whole.value, part.value - part.low), rel=1e-6
    )
    assert less.step.value == pytest.approx(10 * len(BLOCKS), rel=0.05)


def test_what_takes_no_time_is_not_present() -> None:
    steps = np.zeros((4, len(BLOCKS)))
    steps[:, BLOCKS.index("forward")] = 3
    assert list(compute_mean_step(steps).present) == ["forward"]
