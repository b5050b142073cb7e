"""Drift of the step time: said where steps change, with the steady ones, and not where they only vary."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from overlapscope.analysis import Analysis
from overlapscope.breakdown.drift import find_drift
from overlapscope.breakdown.text import describe_drift
from overlapscope.report.summary import build_summary_report
from tests.simulated_job import MS, Job


def test_steps_that_fall_and_then_stay(golden: Callable[[str, str], None]) -> None:
    rng = np.random.default_rng(1)
    falling = np.concatenate([np.linspace(600, 180, 15), np.full(25, 180.0)]) * rng.normal(1, 0.02, 40) * MS
    drift = find_drift(np.arange(40), falling)
    assert drift is not None
    assert (drift.first_ns, drift.last_ns) == (pytest.approx(540 * MS, rel=0.05), pytest.approx(180 * MS, rel=0.03))
    assert drift.steady is not None
    assert 13 <= drift.steady[0] <= 17
    assert drift.steady[1] == 39
    golden("summaries/drift", describe_drift(drift))


def test_steps_that_rise_to_the_end_have_no_steady_ones() -> None:
    drift = find_drift(np.arange(100), np.linspace(100, 900, 100) * MS)
    assert drift is not None
    assert drift.first_ns < drift.last_ns
    assert drift.steady is None


@given(seed=st.integers(0, 100_000), count=st.integers(1, 300), noise=st.floats(0, 0.3))
def test_noise_is_no_drift_and_units_do_not_matter(seed: int, count: int, noise: float) -> None:
    series = np.random.default_rng(seed).normal(1, noise, count)
    times = np.maximum(series, 0.01) * 50 * MS
    drift = find_drift(np.arange(count), times)
    assert (drift is None) or noise > 0.1
    scaled = find_drift(np.arange(count), 1000 * times)
    assert (drift is None) == (scaled is None)


def test_a_summary_says_it_and_its_interval_stays_within_the_steps() -> None:
    job = Job(steps=40, noise=0.02)
    job.local_ns["forward"] += (np.maximum(0, 15 - np.arange(40)) * 40 * MS)[:, None]
    analysis = Analysis(job.run())
    (section, *_) = build_summary_report(analysis).sections
    assert analysis.summary.drift is not None
    assert describe_drift(analysis.summary.drift) in section.notes
    times_ns = analysis.summary.figures[analysis.summary.is_steady]["step_time_ns"]
    step = analysis.summary.mean.step
    assert times_ns.min() <= step.low <= step.value <= step.high <= times_ns.max()
    assert Analysis(Job(steps=40, noise=0.02).run()).summary.drift is None
