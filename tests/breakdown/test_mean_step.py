"""A mean step, and the difference of two."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from overlapscope.breakdown.breakdown import BLOCKS
from overlapscope.breakdown.means import MeanStep, compute_mean_step


def series(steps: int) -> st.SearchStrategy[np.ndarray]:
    return arrays(np.float64, (steps, len(BLOCKS)), elements=st.floats(0, 1e9))


def check_sum(mean: MeanStep) -> None:
    assert sum(each.value for each in mean.blocks.values()) == pytest.approx(mean.step.value, abs=1e-3)


@given(series(5), series(7))
def test_blocks_of_a_mean_and_of_a_difference_sum_to_the_step(one: np.ndarray, other: np.ndarray) -> None:
    for mean in (compute_mean_step(one), compute_mean_step(one).minus(compute_mean_step(other))):
        check_sum(mean)
        assert all(each.low <= each.value <= each.high for each in mean.blocks.values())


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
