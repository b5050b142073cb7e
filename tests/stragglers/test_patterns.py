"""Patterns in a series of delays: what was put in comes out, and from noise comes nothing."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from overlapscope.stragglers.patterns import (
    DelayPattern,
    estimate_baseline,
    find_patterns,
    runs_test_p_value,
)

MS = 1e6
LEAST_NS = 0.5 * MS


def noise(count: int, seed: int, sigma_ms: float = 0.3) -> np.ndarray:
    return np.random.default_rng(seed).normal(0, sigma_ms * MS, count)


def patterns_of(series: np.ndarray, first_step: int = 3) -> list[DelayPattern]:
    return find_patterns(series, np.arange(first_step, first_step + len(series)), LEAST_NS)


seeds = st.integers(0, 100_000)


@given(seed=seeds, count=st.integers(20, 400), sigma_ms=st.floats(0, 3))
def test_noise_has_no_pattern(seed: int, count: int, sigma_ms: float) -> None:
    found = patterns_of(noise(count, seed, sigma_ms))
    # One in some hundred values of noise lies far out of the lower half of so few.
    assert [pattern.kind for pattern in found] in ([], ["transient"])
    assert all(pattern.where.sum() <= 2 for pattern in found)


@given(seed=seeds, count=st.integers(20, 400), correlation=st.floats(0.5, 0.99))
def test_noise_that_lasts_for_some_steps_has_no_lasting_pattern(seed: int, count: int, correlation: float) -> None:
    series = noise(count, seed)
    for step in range(1, count):
        series[step] += correlation * series[step - 1]
    assert {found.kind for found in patterns_of(series)} <= {"transient"}


@given(seed=seeds, count=st.integers(80, 400), delay_ms=st.floats(1, 50))
def test_a_delay_in_every_step_is_persistent(seed: int, count: int, delay_ms: float) -> None:
    found = patterns_of(noise(count, seed) + delay_ms * MS)[0]
    assert found.kind == "persistent"
    assert found.where.all()
    assert found.p_value < 1e-6


@given(seed=seeds, count=st.integers(20, 100), drift=st.floats(-1, 1))
def test_a_steady_delay_is_persistent_however_slowly_it_drifts(seed: int, count: int, drift: float) -> None:
    steady = 20 * MS * (1 + np.linspace(0, 0.05 * drift, count)) + noise(count, seed, 0.03)
    found = patterns_of(steady)[0]
    assert found.kind == "persistent"
    assert found.p_value <= 2 * 0.5**count


@given(seed=seeds, period=st.integers(3, 50), phase=st.integers(0, 49), periods=st.integers(18, 24))
def test_a_delay_every_k_steps_is_periodic(seed: int, period: int, phase: int, periods: int) -> None:
    series = noise(period * periods, seed)
    where = np.arange(len(series)) % period == phase % period
    series[where] += 15 * MS
    found = patterns_of(series)[0]
    assert (found.kind, found.period) == ("periodic", period)
    np.testing.assert_array_equal(found.where, where)
    assert found.usual_ns == pytest.approx(0, abs=1.0 * MS)


def test_a_period_bears_that_some_delays_are_missing_and_some_are_of_another_kind() -> None:
    series = noise(200, seed=1)
    series[::10] += 15 * MS
    series[[30, 90]] -= 15 * MS
    series[[3, 77]] += 15 * MS
    periodic, rest = patterns_of(series, first_step=0)
    assert (periodic.period, periodic.where.sum()) == (10, 18)
    assert (rest.kind, np.flatnonzero(rest.where).tolist()) == ("transient", [3, 77])


@given(seed=seeds, count=st.integers(200, 400), share=st.floats(0.25, 0.75), rises=st.booleans())
def test_a_change_at_one_step_is_a_shift(seed: int, count: int, share: float, rises: bool) -> None:
    change = int(share * count)
    late = (np.arange(count) >= change) == rises
    found = patterns_of(noise(count, seed) + np.where(late, 8 * MS, 0), first_step=0)[0]
    assert found.kind == "shift"
    np.testing.assert_array_equal(found.where, late)
    assert (f"from step {change} on" if rises else f"until step {change - 1}") in found.statistic


@given(seed=seeds, count=st.integers(100, 400), begin=st.integers(5, 60), length=st.integers(15, 30))
def test_a_delay_in_some_steps_on_end_is_a_stretch(seed: int, count: int, begin: int, length: int) -> None:
    late = np.zeros(count, dtype=bool)
    late[begin : begin + length] = True
    found = patterns_of(noise(count, seed) + np.where(late, 8 * MS, 0), first_step=0)[0]
    assert found.kind == "episode"
    np.testing.assert_array_equal(found.where, late)
    assert f"{length} steps are " in found.statistic
    assert "in 1 episode" in found.statistic
    assert found.usual_ns == pytest.approx(0, abs=0.2 * MS)


def test_stretches_after_every_checkpoint_are_one_pattern() -> None:
    series = noise(300, seed=7)
    late = np.arange(300) % 50 < 12
    late[:50] = False
    series[late] += 8 * MS
    (found,) = patterns_of(series)
    np.testing.assert_array_equal(found.where, late)
    assert "in 5 episodes" in found.statistic


def test_steps_that_are_late_in_no_order_are_no_stretches() -> None:
    for seed in range(100):
        late = np.random.default_rng(seed).random(100) < 0.2
        assert "episode" not in [found.kind for found in patterns_of(noise(100, seed) + np.where(late, 8 * MS, 0))]


def test_what_comes_and_goes_slowly_is_no_stretch() -> None:
    hill = 10 * MS * np.exp(-(((np.arange(200) - 100) / 25) ** 4))
    assert "episode" not in [found.kind for found in patterns_of(noise(200, seed=10) + hill)]


def test_a_delay_that_ends_before_the_last_steps_is_no_shift() -> None:
    series = noise(116, seed=8)
    series[70:110] += 8 * MS
    assert [found.kind for found in patterns_of(series)] == ["episode"]


def test_a_rank_that_is_late_throughout_and_gets_worse_is_persistent() -> None:
    series = noise(100, seed=2) + 10 * MS
    series[50:] += 5 * MS
    assert patterns_of(series)[0].kind == "persistent"


@given(seed=seeds, count=st.integers(20, 400), data=st.data())
def test_one_long_pause_is_transient(seed: int, count: int, data: st.DataObject) -> None:
    at = data.draw(st.integers(0, count - 1))
    series = noise(count, seed)
    series[at] += 2000 * MS
    (found,) = patterns_of(series)
    assert (found.kind, np.flatnonzero(found.where).tolist()) == ("transient", [at])
    assert "standard deviations above normal" in found.statistic


def test_beside_a_pause_hiccups_do_not_count() -> None:
    series = noise(100, seed=3)
    series[20] += 2000 * MS
    series[60] += 10 * MS
    (found,) = patterns_of(series)
    assert np.flatnonzero(found.where).tolist() == [20]


def test_delays_at_random_distances_are_no_period() -> None:
    random = np.random.default_rng(4)
    for seed in range(50):
        series = noise(300, seed)
        series[random.choice(300, 20, replace=False)] += 15 * MS
        assert "periodic" not in [found.kind for found in patterns_of(series)]


def test_a_persistent_and_a_periodic_delay_of_one_rank_are_both_found() -> None:
    series = noise(200, seed=5) + 5 * MS
    series[4::10] += 15 * MS
    assert [found.kind for found in patterns_of(series)] == ["persistent", "periodic"]


def test_a_series_of_zeros_with_some_delays_has_no_noise_to_measure_them_by() -> None:
    """As garbage collection: most steps have none."""
    series = np.zeros(70)
    series[::7] = 60 * MS
    (found,) = patterns_of(series, first_step=0)
    assert (found.kind, found.period) == ("periodic", 7)


def test_what_is_usual_is_told_from_the_lower_half() -> None:
    series = noise(10_000, seed=6, sigma_ms=1.0)
    series[: 10_000 // 3] += 1000 * MS
    usual_ns, sigma_ns = estimate_baseline(series)
    assert abs(usual_ns) < 0.7 * MS
    assert 0.6 * MS < sigma_ns < 1.5 * MS


def test_steps_that_are_late_for_a_while_have_no_period() -> None:
    series_ns = np.zeros(100)
    series_ns[20:46] = 10e6
    series_ns[33] = 0.0
    kinds = [pattern.kind for pattern in find_patterns(series_ns, np.arange(100), 1e6)]
    assert "periodic" not in kinds


@pytest.mark.parametrize(("tries", "hits"), [(8, 3), (7, 5), (6, 1), (5, 5)])
def test_the_chance_of_few_runs_is_that_among_all_orders(tries: int, hits: int) -> None:
    orders = list(itertools.combinations(range(tries), hits))
    for runs in range(1, hits + 1):
        few = sum(1 + sum(b - a > 1 for a, b in itertools.pairwise(order)) <= runs for order in orders)
        assert runs_test_p_value(runs, hits, tries) == pytest.approx(few / len(orders))
