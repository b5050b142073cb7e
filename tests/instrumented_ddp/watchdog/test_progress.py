"""How long it is normal that nothing happens."""

from __future__ import annotations

import random

import pytest

from instrumented_ddp.watchdog.progress import (
    MIN_STALL_LIMIT_S,
    STARTUP_NOTICE_S,
    STARTUP_STALL_LIMIT_S,
    ProgressTracker,
)


def observed(step_s, steps, look_every_s=0.5, counts_steps=True):
    progress_tracker = ProgressTracker()
    now_s = 0.0
    while now_s < steps * step_s:
        step = int(now_s / step_s)
        progress_tracker.observe(now_s, step if counts_steps else None, step)
        now_s += look_every_s
    return progress_tracker, now_s


@pytest.mark.parametrize("counts_steps", [True, False])
def test_short_steps_have_a_least_patience(counts_steps):
    progress_tracker, _ = observed(0.05, 200, counts_steps=counts_steps)
    assert progress_tracker.limit_s == MIN_STALL_LIMIT_S


@pytest.mark.parametrize("counts_steps", [True, False])
def test_long_steps_may_take_several_times_as_long(counts_steps):
    progress_tracker, _ = observed(10.0, 20, counts_steps=counts_steps)
    assert 35 < progress_tracker.limit_s < 50, "less than five steps"


def test_the_first_steps_may_take_longer():
    progress_tracker = ProgressTracker()
    progress_tracker.observe(0.0, 0, "construction")
    progress_tracker.observe(8.0, 0, "forward")
    assert progress_tracker.limit_s >= STARTUP_STALL_LIMIT_S


def test_a_standstill_in_the_first_steps_is_said_early():
    progress_tracker = ProgressTracker()
    progress_tracker.observe(0.0, 0, "construction")
    assert progress_tracker.is_starting
    assert progress_tracker.notice_limit_s == STARTUP_NOTICE_S < progress_tracker.limit_s


@pytest.mark.parametrize("counts_steps", [True, False])
def test_later_nothing_is_said_before_the_limit(counts_steps):
    progress_tracker, _ = observed(10.0, 20, counts_steps=counts_steps)
    assert not progress_tracker.is_starting
    assert progress_tracker.notice_limit_s == progress_tracker.limit_s


def test_steps_that_were_all_done_between_two_looks_count():
    progress_tracker = ProgressTracker()
    progress_tracker.observe(0.0, None, "construction")
    progress_tracker.observe(0.5, 12, "backward")
    assert progress_tracker.limit_s == MIN_STALL_LIMIT_S


def test_a_slow_first_step_is_forgotten():
    progress_tracker = ProgressTracker()
    progress_tracker.observe(0.0, 0, 0)
    for step in range(1, 40):
        progress_tracker.observe(60.0 + 0.1 * step, step, step)
    assert progress_tracker.limit_s == MIN_STALL_LIMIT_S


def test_steps_with_jitter_never_reach_the_limit():
    chance = random.Random(1)
    progress_tracker = ProgressTracker()
    now_s = 0.0
    for step in range(1000):
        now_s += chance.lognormvariate(0, 0.3)
        assert progress_tracker.idle_s(now_s) < progress_tracker.limit_s
        progress_tracker.observe(now_s, step, step)


def test_idle_time_counts_from_the_last_thing_that_happened():
    progress_tracker = ProgressTracker()
    assert progress_tracker.observe(1.0, 0, "a")
    assert not progress_tracker.observe(2.0, 0, "a")
    assert progress_tracker.idle_s(4.0) == 3.0
    assert progress_tracker.observe(4.0, 0, "b")
    assert progress_tracker.idle_s(4.5) == 0.5


def test_a_job_is_ended_after_a_pause_that_is_long_by_its_own_history():
    progress_tracker, now_s = observed(0.05, 200)
    assert progress_tracker.long_stall_s(120) == 120
    progress_tracker.observe(now_s + 90, 200, "checkpoint")
    assert progress_tracker.long_stall_s(120) > 3 * 90
    slow, _ = observed(30.0, 20)
    assert slow.long_stall_s(120) > 15 * 30


@pytest.mark.parametrize(
    ("idle_s", "undecided_for_s", "next_s"), [(3, None, 6), (3, 5, 6), (3, 1, 4), (3, 0.1, 3.75), (40, 0.1, 50)]
)
def test_a_standstill_that_is_nearly_one_for_too_long_is_looked_at_again_soon(idle_s, undecided_for_s, next_s):
    progress_tracker, _ = observed(0.05, 200)
    assert progress_tracker.next_check_idle_s(idle_s, undecided_for_s) == pytest.approx(next_s)
