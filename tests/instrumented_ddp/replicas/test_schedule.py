"""Fingerprints cost a thousandth of a step, and ranks with different periods share those of the longer one."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from instrumented_ddp.replicas.replica import MAX_COST_SHARE, MAX_PERIOD, FingerprintSchedule

NUMBERS = [17, 4, 4, 1023, 999_999_937, 8]

costs = st.integers(1_000, 50_000_000)
steps = st.floats(1e6, 1e10)


def settled(cost_ns: int, step_ns: float) -> FingerprintSchedule:
    """After some passes that have all cost the same."""
    schedule = FingerprintSchedule(NUMBERS)
    for _ in range(16):
        schedule.update_period(cost_ns, step_ns)
    return schedule


@given(costs, steps)
def test_the_cost_is_a_thousandth_of_a_step_or_the_period_as_long_as_it_may_be(cost_ns: int, step_ns: float) -> None:
    period = settled(cost_ns, step_ns).period
    assert cost_ns / period <= MAX_COST_SHARE * step_ns or period == MAX_PERIOD
    assert period == 1 or cost_ns / period > MAX_COST_SHARE * step_ns / 5  # and no longer than that takes


@given(costs, steps)
def test_in_a_sweep_each_tensor_is_due_once(cost_ns: int, step_ns: float) -> None:
    schedule = settled(cost_ns, step_ns)
    begin = 12_345
    list_due_tensors = schedule.list_due_tensors(begin)
    assert sorted(index for _, indices in list_due_tensors for index in indices) == list(range(len(NUMBERS)))
    assert [moment for moment, _ in list_due_tensors] == sorted({moment for moment, _ in list_due_tensors})
    assert all(begin <= moment < begin + schedule.period for moment, _ in list_due_tensors)


@given(costs, costs, steps)
def test_what_is_due_at_the_longer_period_is_due_at_the_shorter_one(a_ns: int, b_ns: int, step_ns: float) -> None:
    one, other = sorted((settled(a_ns, step_ns), settled(b_ns, step_ns)), key=lambda schedule: schedule.period)
    passes = range(0, MAX_PERIOD, one.period)
    taken = {
        (moment, index) for first in passes for moment, indices in one.list_due_tensors(first) for index in indices
    }
    assert {(moment, index) for moment, indices in other.list_due_tensors(0) for index in indices} <= taken


def test_the_first_sweeps_are_whole_and_one_slow_moment_among_them_counts_for_nothing() -> None:
    schedule = FingerprintSchedule(NUMBERS)
    for cost_ns in (900_000_000, 10_000, 80_000_000):
        schedule.update_period(cost_ns, 1e7)
        assert schedule.period == 1
    schedule.update_period(10_000, 1e7)
    assert schedule.period == 4


def test_the_period_follows_steps_that_become_shorter_and_longer() -> None:
    schedule = settled(1_000_000, 1e8)
    assert schedule.period == 16
    schedule.update_period(1_000_000, 1e7)
    assert schedule.period == 128
    schedule.update_period(1_000_000, 1e10)
    assert schedule.period == 1
