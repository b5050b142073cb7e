"""Fingerprints cost a thousandth of a step, and ranks with different periods share those of the longer one."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from instrumented_ddp.recording.cost_account import MAX_PERIOD
from instrumented_ddp.replicas.schedule import MAX_COST_SHARE, FingerprintSchedule, number_part

NUMBERS = [17, 4, 4, 1023, 999_999_937, 8]

costs = st.integers(1_000, 50_000_000)
steps = st.floats(1e6, 1e10)


def settled(cost_ns: float, step_ns: float) -> FingerprintSchedule:
    """After some passes that have all cost the same."""
    schedule = FingerprintSchedule(NUMBERS)
    for _ in range(64):
        schedule.end_pass(cost_ns, 1, schedule.period * step_ns, step_ns)
    return schedule


@given(costs, steps)
def test_the_cost_is_a_thousandth_of_a_step_or_the_period_as_long_as_it_may_be(cost_ns: int, step_ns: float) -> None:
    period = settled(cost_ns, step_ns).period
    assert cost_ns / period <= MAX_COST_SHARE * step_ns or period == MAX_PERIOD
    assert period == 1 or cost_ns / period > MAX_COST_SHARE * step_ns / 5  # and no longer than that takes


@dataclass
class Training:
    """Steps and fingerprints on a virtual clock."""

    schedule: FingerprintSchedule = field(default_factory=lambda: FingerprintSchedule(NUMBERS))
    spent_ns: float = 0.0
    steps_ns: float = 0.0
    largest_ns: float = 0.0

    def run_pass(self, cost_ns: float, step_ns: float) -> None:
        """Train for one period, with all fingerprints."""
        period = self.schedule.period
        self.spent_ns += cost_ns
        self.steps_ns += period * step_ns
        self.largest_ns = max(self.largest_ns, cost_ns)
        self.schedule.end_pass(cost_ns, 1, period * step_ns, step_ns)


@given(
    st.integers(10_000, 1_000_000),
    st.floats(1e7, 1e10),
    st.lists(st.tuples(st.floats(0.05, 20), st.floats(0.2, 5)), min_size=1, max_size=30),
)
def test_whatever_jumps_the_share_is_a_thousandth_but_for_some_passes(
    cost_ns: int, step_ns: float, jumps: list[tuple[float, float]]
) -> None:
    """What was not foreseen is paid for by the passes after it."""
    training = Training()
    for of_cost, of_step in jumps:
        training.run_pass(cost_ns * of_cost, step_ns * of_step)
        assert (
            training.spent_ns <= MAX_COST_SHARE * training.steps_ns + 10 * training.largest_ns
            or training.schedule.period == MAX_PERIOD
        )


@given(st.integers(10_000, 1_000_000), st.floats(1e7, 1e10), st.integers(1, 1000))
def test_a_slow_first_pass_is_paid_for_and_then_forgotten(cost_ns: int, step_ns: float, factor: int) -> None:
    training = Training()
    training.run_pass(factor * cost_ns, step_ns)
    for _ in range(600):
        training.run_pass(cost_ns, step_ns)
    assert training.spent_ns <= MAX_COST_SHARE * training.steps_ns + cost_ns
    assert training.schedule.period in {
        settled(cost_ns, step_ns).period * factor for factor in (1, 2)
    }  # either is right


@given(costs, steps)
def test_in_a_pass_each_part_is_due_once(cost_ns: int, step_ns: float) -> None:
    schedule = settled(cost_ns, step_ns)
    begin = 12_345
    due = schedule.list_due(begin)
    assert sorted(part for _, parts in due for part in parts) == list(range(len(NUMBERS)))
    assert [moment for moment, _ in due] == sorted({moment for moment, _ in due})
    assert all(begin <= moment < begin + schedule.period for moment, _ in due)


@given(costs, costs, steps)
def test_what_is_due_at_the_longer_period_is_due_at_the_shorter_one(a_ns: int, b_ns: int, step_ns: float) -> None:
    one, other = sorted((settled(a_ns, step_ns), settled(b_ns, step_ns)), key=lambda schedule: schedule.period)
    passes = range(0, MAX_PERIOD, one.period)
    taken = {(moment, part) for first in passes for moment, parts in one.list_due(first) for part in parts}
    assert {(moment, part) for moment, parts in other.list_due(0) for part in parts} <= taken


@given(st.integers(0, 12), st.integers(1, 4096))
def test_parts_share_a_step_only_if_there_are_more_of_them_than_steps(log: int, parts: int) -> None:
    period = 2**log
    counts = Counter(number_part(part) % period for part in range(parts))
    assert max(counts.values()) == -(-parts // period)


def test_the_period_follows_steps_that_become_shorter_and_longer() -> None:
    schedule = settled(1_000_000, 1e8)
    assert schedule.period == 16
    schedule.end_pass(1_000_000, 1, 16 * 1e7, 1e7)  # of which only 160 us were allowed, so 840 are to be paid
    assert schedule.period == 256
    schedule.end_pass(1_000_000, 1, 256 * 1e7, 1e7)
    assert schedule.period == 128
    schedule.end_pass(1_000_000, 1, 128 * 1e10, 1e10)
    assert schedule.period == 1


def test_the_second_pass_is_taken_at_once_and_a_first_one_that_was_slow_makes_periods_no_more_than_twice_as_long() -> (
    None
):
    schedule = FingerprintSchedule(NUMBERS)
    schedule.end_pass(7_000_000, 1, 1e8, 1e8)
    assert schedule.period == 1
    schedule.end_pass(1_000_000, 1, 1e8, 1e8)
    assert schedule.period == 2 * settled(1_000_000, 1e8).period


def test_a_pass_that_was_cut_short_says_what_a_whole_one_costs() -> None:
    schedule, other = settled(1_000_000, 1e8), settled(1_000_000, 1e8)
    schedule.end_pass(250_000, 0.25, 4 * 1e8, 1e8)
    other.end_pass(1_000_000, 1, 16 * 1e8, 1e8)
    assert schedule.period == other.period
    schedule.end_pass(0, 0, 50 * 1e8, 1e8)  # nothing was due, which says nothing
    assert schedule.period == other.period


def test_at_any_cost_everything_is_taken_in_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("instrumented_ddp.replicas.schedule.MAX_COST_SHARE", 1e9)
    assert settled(1_000_000, 1e6).period == 1
