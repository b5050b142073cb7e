"""What is worth doing: named by size, with what it saves, and not at all where chance may have done it."""

from __future__ import annotations

import pytest

from overlapscope.advice.worth_doing import find_improvements
from overlapscope.analysis import Analysis
from overlapscope.report.improvements import tabulate_improvements
from tests.simulated_job import MS, Job

STEPS = 100


def found_in(job: Job) -> list[tuple[str, float]]:
    return [(each.what, each.saves.value / MS) for each in find_improvements(Analysis(job.run()), None)]


def test_in_a_job_that_wastes_nothing_nothing_is_worth_doing() -> None:
    job = Job(steps=STEPS, noise=0.02)
    job.local_ns["data_wait"][:] = 0
    job.local_ns["finalize"][:] = 0
    assert found_in(job) == []


def test_what_all_ranks_wait_for_is_worth_more_than_what_one_does_longer() -> None:
    job = Job(steps=STEPS, noise=0.02)
    job.local_ns["data_wait"] += 20 * MS
    job.slow_down(rank=3, share=0.2)
    (data, data_ms), (rank, rank_ms) = found_in(job)
    assert data.startswith("Have data ready")
    assert data_ms == pytest.approx(22, rel=0.05)
    assert rank.startswith("Rank 3 arrives")
    assert rank_ms == pytest.approx(6, rel=0.1)


def test_what_the_loop_itself_does_between_steps_is_worth_it_if_it_takes_long() -> None:
    job = Job(steps=STEPS, noise=0.02)
    job.local_ns["loop"] += 20 * MS
    (first, saved_ms), *_ = found_in(job)
    assert first.startswith("Do less in the loop")
    assert saved_ms == pytest.approx(20, rel=0.05)


def test_a_rank_that_waits_for_data_is_named_and_not_data_as_such() -> None:
    job = Job(steps=STEPS, noise=0.02)
    job.local_ns["data_wait"][:, 1] += 15 * MS
    first, *others = found_in(job)
    assert first[0].startswith("Rank 1 arrives")
    assert not any("Have data ready" in what for what, _ in others)


def test_a_delay_in_few_steps_saves_time_and_share_of_all_steps_with_the_outliers() -> None:
    job = Job(steps=STEPS, noise=0.02)
    job.local_ns["data_wait"][[20, 41, 67, 90], 2] += 800 * MS
    analysis = Analysis(job.run())
    (found,), stragglers = find_improvements(analysis, None), analysis.stragglers
    assert stragglers is not None
    assert found.saves.value == pytest.approx(4 * 800 * MS / 99, rel=0.1)
    assert found.step_ns == pytest.approx(analysis.summary.mean.step.value + found.saves.value, rel=0.1)
    (row,) = tabulate_improvements([found]).rows
    assert row["share"] == stragglers.findings[0].saving_share == found.saves.value / found.step_ns


def test_buffers_are_worth_it_if_their_broadcast_takes_time() -> None:
    job = Job(steps=STEPS, noise=0.02)
    job.broadcast_ns = 5 * MS
    (first, saved_ms), *_ = found_in(job)
    assert "broadcast_buffers=False" in first
    assert saved_ms == pytest.approx(5, rel=0.2)


def test_without_a_step_or_a_second_rank_nothing_is_said() -> None:
    assert find_improvements(Analysis(Job(ranks=1, steps=20).run()), None) == ()
    assert find_improvements(Analysis(Job(steps=1).run()), None) == ()
