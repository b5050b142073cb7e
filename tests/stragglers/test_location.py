"""Whether a rank is later all the time: how often noise says so, and what two real recordings say."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from overlapscope.stragglers.location_test import LocationTest, independent_share, run_location_test

MS = 1e6
DEVICE_BEHIND = (
    *(536, 239, 642, 576, 240, 629, 608, 637, 634, 1007, 1250, 1010, 1257, 1257, 1009, 1253, 1006, 1251, 237),
    *(1009, 1258, 1009, 1255, 1252, 1010, 1253, 1257, 1249, 78, 1007, 1250, 1007, 1257, 1007, 1255, 1010, 1256),
)
"""How much longer one of two ranks took than the other in units of 0.01 ms: its device slept 10 ms in each step."""


def judged(series: np.ndarray) -> LocationTest:
    return run_location_test(series, independent_share(series))


def noise(rng: np.random.Generator, steps: int, correlation: float, count: int = 1) -> np.ndarray:
    """First-order autoregressive series (steps, count)."""
    series = rng.standard_normal((steps, count))
    for step in range(1, steps):
        series[step] = correlation * series[step - 1] + np.sqrt(1 - correlation**2) * series[step]
    return series


@pytest.mark.parametrize("correlation", [0.0, 0.5, 0.9])
@pytest.mark.parametrize("steps", [30, 100, 700])
def test_noise_is_rarely_later_all_the_time(steps: int, correlation: float) -> None:
    rng = np.random.default_rng(steps)
    p_values = np.array([judged(series).p_value for series in noise(rng, steps, correlation, 500).T])
    assert (p_values <= 0.01).mean() < 0.03
    assert (p_values <= 0.5).mean() > 0.1, "a test that says nothing is always right"


@given(seed=st.integers(0, 10_000), steps=st.integers(30, 600), scale=st.floats(1e-3, 1e9))
def test_units_do_not_matter_and_later_is_the_opposite_of_earlier(seed: int, steps: int, scale: float) -> None:
    series = noise(np.random.default_rng(seed), steps, 0.3)[:, 0] + 0.2
    later, scaled, earlier = judged(series), judged(series * scale), judged(-series)
    assert scaled.p_value == pytest.approx(later.p_value, rel=1e-6)
    assert max(later.p_value, earlier.p_value) >= 0.5


def test_sizes_count_where_signs_alone_say_little() -> None:
    found = judged(noise(np.random.default_rng(4), 100, 0.6)[:, 0] + 1)
    assert found.independent is None
    assert found.p_value < 1e-3


def test_a_pause_that_dwarfs_everything_hides_no_rank_that_is_later_in_each_step() -> None:
    series = np.random.default_rng(4).normal(1, 0.2, 60)
    series[20] = 1000
    found = judged(series)
    assert found.independent is not None, "by signs"
    assert found.p_value < 1e-6


def test_a_steady_delay_is_no_noise_however_slowly_it_drifts() -> None:
    assert judged(np.linspace(20, 20.2, 20)).p_value <= 2 * 0.5**20


def test_a_device_that_was_behind_in_37_of_37_steps_is_probably_late() -> None:
    """Its delay changed its level, so that 37 steps are fewer than they seem."""
    found = judged(np.array(DEVICE_BEHIND, dtype=float))
    assert (found.late, found.values) == (37, 37)
    assert 2.5e-4 < found.p_value < 5e-3


@pytest.mark.parametrize("series", [np.zeros(30), np.array([1.0, -1.0])], ids=["zero", "two"])
def test_where_nothing_varies_or_little_is_there_nothing_is_said(series: np.ndarray) -> None:
    assert run_location_test(series, 1.0).p_value >= 0.5
