"""What an all-reduce costs: by size, in spite of outliers, and what is said where it can't be known."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from overlapscope.bucket_model.cost import CollectiveCost, draw_cost, fit_cost, fit_line
from overlapscope.bucket_model.observation import Spans
from overlapscope.errors import OverlapScopeError

MB = 1024**2


def spans(bytes_: list[float] | np.ndarray, times_ns: list[float] | np.ndarray) -> Spans:
    return Spans(
        bytes=np.asarray(bytes_, dtype=float),
        time_ns=np.asarray(times_ns, dtype=float),
        cycle=np.arange(len(bytes_)) % 5,
    )


def line_of(sizes: np.ndarray, alpha: float = 2e6, beta: float = 8.0) -> np.ndarray:
    return alpha + beta * sizes


@given(st.lists(st.tuples(st.floats(1, 1e8), st.floats(1, 1e9)), min_size=1, max_size=40))
def test_a_larger_message_never_takes_less(samples: list[tuple[float, float]]) -> None:
    cost = fit_cost(spans(*zip(*samples, strict=True)), world_size=2)
    times_ns = cost.time_ns(np.geomspace(0.5, 2e8, 300))
    assert (np.diff(times_ns) >= -1e-9 * times_ns[1:]).all()
    assert (times_ns > 0).all()


def test_latency_and_bandwidth_are_found_among_outliers() -> None:
    random = np.random.default_rng(1)
    sizes = np.repeat(np.geomspace(0.05, 60, 8) * MB, 9)
    times_ns = line_of(sizes) * np.exp(0.02 * random.standard_normal(len(sizes)))
    times_ns[::9] *= 7  # one in nine met something else
    cost = fit_cost(spans(sizes, times_ns), world_size=2)
    assert cost.alpha_ns == pytest.approx(2e6, rel=0.1)
    assert cost.line.beta_ns == pytest.approx(8.0, rel=0.05)
    assert cost.is_identifiable
    asked = np.array([0.01, 0.3, 17, 200]) * MB
    np.testing.assert_allclose(cost.time_ns(asked), line_of(asked), rtol=0.1)


def test_where_sizes_leave_the_line_so_does_the_cost() -> None:
    """Small messages ride the burst of a rate limiter, ten times as fast as what follows."""
    sizes = np.geomspace(0.1, 64, 20) * MB
    times_ns = np.where(sizes < 2 * MB, sizes * 1.0, 2 * MB + (sizes - 2 * MB) * 10.0)
    cost = fit_cost(spans(sizes, times_ns), world_size=2)
    asked = np.array([0.15, 1.0, 8.0, 40.0]) * MB
    truth = np.where(asked < 2 * MB, asked, 2 * MB + (asked - 2 * MB) * 10)
    np.testing.assert_allclose(cost.time_ns(asked), truth, rtol=0.05)


def test_between_sizes_far_apart_a_line_is_no_curve() -> None:
    """In logarithms a line is bent, and sizes between two measured ones would seem to take 3 % longer than they do."""
    sizes = np.array([0.5, 2, 8, 47]) * MB
    cost = fit_cost(spans(sizes, line_of(sizes)), world_size=2)
    asked = np.array([1.0, 4, 15, 30]) * MB
    np.testing.assert_allclose(cost.time_ns(asked), line_of(asked), rtol=1e-4)


def test_what_one_size_met_says_nothing_of_the_sizes_beside_it() -> None:
    """Each size is off by something of its own, as by what ran beside it; the others say where it would lie."""
    sizes = np.array([1, 2, 4, 8, 16, 32, 48]) * MB
    off = np.array([1.0, 1.06, 0.95, 1.05, 0.96, 1.05, 1.0])
    cost = fit_cost(spans(np.repeat(sizes, 5), np.repeat(off * line_of(sizes), 5)), world_size=2)
    np.testing.assert_allclose(cost.time_ns(sizes), line_of(sizes), rtol=0.03)


def test_a_single_size_says_what_is_missing_and_spreads_its_draws() -> None:
    samples = spans([25 * MB] * 10, [2e7] * 10)
    cost = fit_cost(samples, world_size=2)
    assert not cost.is_identifiable
    assert cost.time_ns(25 * MB) == pytest.approx(2e7)
    random = np.random.default_rng(0)
    small = [float(draw_cost(samples, 2, None, random).time_ns(MB)) for _ in range(100)]
    assert max(small) > 5 * min(small)


def test_what_a_slow_link_takes_for_many_bytes_is_not_taken_for_latency() -> None:
    """Two rounds, 10 ms each at most."""
    samples = spans([16 * MB, 32 * MB] * 10, [4e8, 8e8] * 10)
    random = np.random.default_rng(0)
    small = [float(draw_cost(samples, 2, None, random).time_ns(MB)) for _ in range(100)]
    assert min(small) > 0.8 * 25e6
    assert max(small) < 25e6 + 20e6


def test_a_calibration_gives_the_sizes_that_the_recording_lacks() -> None:
    sizes = np.geomspace(0.01, 64, 12) * MB
    calibration = spans(sizes, line_of(sizes))
    recorded = spans([25 * MB] * 20, 1.2 * line_of(np.full(20, 25 * MB)))
    cost = fit_cost(recorded, 2, calibration)
    assert cost.is_identifiable
    asked = np.array([0.1, 1.0, 25.0]) * MB
    np.testing.assert_allclose(cost.time_ns(asked), 1.2 * line_of(asked), rtol=0.02)


def test_times_that_are_no_times_are_left_out() -> None:
    cost = fit_cost(spans([MB, MB, 0, 8 * MB], [1e6, np.nan, 5e6, -1.0]), world_size=2)
    assert cost.sizes_bytes == pytest.approx([MB])
    with pytest.raises(OverlapScopeError, match="calibrate"):
        fit_cost(spans([MB], [0.0]), world_size=2)


@pytest.mark.parametrize(
    ("algorithm", "latencies"),
    [("ring", 14 / 2), ("tree", 3.0)],  # 2 (N - 1) and 2 log2 N turns
)
def test_more_ranks_take_more_turns_and_nearly_the_same_bytes(algorithm: str, latencies: float) -> None:
    sizes = np.geomspace(0.001, 64, 12) * MB
    cost = fit_cost(spans(sizes, line_of(sizes)), world_size=2)
    eight: CollectiveCost = cost.extrapolate(8, algorithm)  # type: ignore[arg-type]
    expected = latencies * 2e6 + 8.0 * sizes * (7 / 8) / (1 / 2)
    np.testing.assert_allclose(eight.time_ns(sizes), expected, rtol=0.02)
    assert eight.world_size == 8


def test_one_rank_says_nothing_of_two() -> None:
    cost = fit_cost(spans([MB, 9 * MB], [1e6, 8e6]), world_size=1)
    with pytest.raises(OverlapScopeError, match="at least 2"):
        cost.extrapolate(2)


def test_twice_the_bandwidth_halves_what_is_not_latency() -> None:
    sizes = np.geomspace(0.01, 64, 12) * MB
    cost = fit_cost(spans(sizes, line_of(sizes)), world_size=2)
    np.testing.assert_allclose(cost.scale(byte_time=0.5).time_ns(sizes), line_of(sizes, beta=4.0), rtol=1e-3)


@given(st.floats(0, 1e6), st.floats(0, 100), st.lists(st.floats(1, 1e7), min_size=3, max_size=20, unique=True))
def test_a_line_is_found_where_there_is_one(alpha: float, beta: float, sizes: list[float]) -> None:
    x = np.array(sizes)
    if (alpha + beta * x).min() < 1 or np.ptp(x) < 1:
        return
    line = fit_line(x, alpha + beta * x)
    np.testing.assert_allclose(line.time_ns(x), alpha + beta * x, rtol=1e-3)
