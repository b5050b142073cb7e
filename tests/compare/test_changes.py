"""What differs beyond noise: how often that is said of nothing, and of what would be seen."""

from __future__ import annotations

import numpy as np
import pytest

from overlapscope.breakdown.means import mean_with_ci, mean_with_conservative_ci
from overlapscope.compare.changes import Change, compare_series

PAIRS = 1000
STEPS = 100


def noise(kind: str, seed: int) -> np.ndarray:
    """(STEPS, PAIRS) of mean 10."""
    luck = np.random.default_rng(seed)
    shocks = luck.standard_normal((STEPS, PAIRS))
    if kind == "heavy-tailed":
        return 10 + 0.3 * np.exp(shocks)
    slow = shocks.copy()
    for step in range(1, STEPS):
        slow[step] = 0.9 * slow[step - 1] + np.sqrt(1 - 0.9**2) * shocks[step]
    return 10 + {"white": shocks, "slow": slow, "both": 0.9 * luck.standard_normal(shocks.shape) + 0.4 * slow}[kind]


def changes(base: np.ndarray, new: np.ndarray) -> list[Change]:
    names = [str(pair) for pair in range(base.shape[1])]
    sides = (dict(zip(names, side.T, strict=True)) for side in (base, new))
    return list(compare_series(*sides, between_run_share=0.0).values())


@pytest.mark.parametrize("kind", ["white", "slow", "both", "heavy-tailed"])
def test_of_steps_that_do_not_differ_hardly_any_are_called_longer(kind: str) -> None:
    found = changes(noise(kind, 1), noise(kind, 2))
    for longer in ([each.mean.is_longer for each in found], [each.middle.is_longer for each in found]):
        assert np.mean(longer) <= 0.02


def test_what_would_have_been_seen_is_seen_in_nineteen_of_twenty_cases() -> None:
    base, new = noise("white", 1), noise("white", 2)
    usual = float(np.mean([each.mean.seen_ns for each in changes(base, new)]))
    assert np.mean([each.mean.is_longer for each in changes(base, new + usual)]) >= 0.94
    assert np.mean([each.mean.is_longer for each in changes(base, new + usual / 3)]) < 0.5


def test_a_few_long_steps_hide_a_change_in_the_mean_and_not_in_the_middle() -> None:
    luck = np.random.default_rng(3)
    base, new = (10 + 0.1 * luck.standard_normal(STEPS) for _ in range(2))
    base[::20], new[::25] = 30, 30
    (found,) = compare_series({"step": base}, {"step": new + 0.3}, between_run_share=0.0).values()
    assert not found.mean.is_longer
    assert found.middle.is_longer
    assert found.middle.ns.value == pytest.approx(0.3, abs=0.1)
    assert found.most_significant is found.middle


def test_more_long_steps_show_in_the_mean_and_not_in_the_middle() -> None:
    luck = np.random.default_rng(3)
    base, new = (10 + 0.1 * luck.standard_normal((400, 1)) for _ in range(2))
    new[::15] = 30
    (found,) = changes(base, new)
    assert found.mean.is_longer
    assert found.middle.ns.value < 0.1
    assert found.most_significant is found.mean


@pytest.mark.parametrize("steps", [8, 50, 300])
def test_a_wary_interval_is_about_the_same_mean_and_never_narrower(steps: int) -> None:
    series = np.random.default_rng(steps).standard_normal((steps, 50))
    for wary, usual in zip(mean_with_conservative_ci(series), mean_with_ci(series), strict=True):
        assert wary.value == usual.value
        assert wary.high >= usual.high


def test_of_too_few_steps_nothing_is_called_longer() -> None:
    (found,) = changes(np.ones((7, 1)), 2 * np.ones((7, 1)))
    assert np.isnan(found.mean.ns.low)
    assert not found.mean.is_longer


def test_between_two_runs_differences_are_less_sure_by_a_share_of_the_time() -> None:
    base, new = noise("white", 1)[:, 0], noise("white", 2)[:, 0] + 2
    of_one, of_two = (
        compare_series({"step": base}, {"step": new}, between_run_share=share)["step"].mean for share in (0.0, 0.01)
    )
    assert of_two.ns.value == of_one.ns.value
    assert of_one.ns.low - of_two.ns.low == pytest.approx(0.01 * base.mean())
    assert of_two.seen_ns - of_one.seen_ns == pytest.approx(0.01 * base.mean())
