"""Charts as drawings: axes with round numbers, and the figures where they belong."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from dashboards.recording import Recording
from dashboards.report.charts import build_curve_chart, build_trend_charts
from dashboards.report.frame import nice_ticks
from overlapscope.advice.advice import advise
from tests.synthetic import write_recording

NUMBERS = st.floats(-1e12, 1e12, allow_nan=False)


@given(low=NUMBERS, high=NUMBERS, most=st.integers(1, 10))
def test_ticks_are_equally_far_apart_within_their_range_and_not_too_many(low: float, high: float, most: int) -> None:
    assume(high - low > 1e-6 * max(abs(low), abs(high), 1e-3))
    ticks = nice_ticks(low, high, most)
    assert len(ticks) <= most + 1
    slack = 1e-6 * (high - low)
    assert all(low - slack <= tick <= high + slack for tick in ticks)
    assert np.ptp(np.diff(ticks)) <= slack if len(ticks) > 2 else True


@given(most=st.integers(2, 10), high=st.floats(1e-3, 1e12))
def test_there_are_ticks_enough_to_read_a_chart_by(most: int, high: float) -> None:
    assert len(nice_ticks(0, high, most)) >= 2 * most / 5


def heights(path: str) -> list[float]:
    return [float(y) for y in re.findall(r",([-\d.]+)", path)]


def test_a_trend_is_drawn_at_its_figure_with_a_text_for_each_point(tmp_path: Path) -> None:
    summary = Recording(write_recording(tmp_path / "traces", steps=20)).latest().summary
    step_time, exposed, ratio = build_trend_charts(summary)
    (ten_ms,) = [y for y, label in step_time.y_ticks if label == "10 ms"]
    assert heights(step_time.mean) == pytest.approx([ten_ms] * 20, abs=0.06)
    assert [label for _, label in ratio.y_ticks] == ["0 %", "50 %", "100 %"]
    assert [text for _, _, text in exposed.points][:2] == ["step 0: 1.30 ms", "step 1: 1.30 ms"]
    assert len(step_time.ranks) == 2
    assert step_time.warm_up_px > step_time.frame.left


def test_the_curve_passes_through_its_marks(tmp_path: Path) -> None:
    snapshot = Recording(write_recording(tmp_path / "traces", steps=30)).latest()
    chart = build_curve_chart(advise(snapshot).recommendation.curve)
    line = heights(chart.predicted)
    assert min(line) >= chart.frame.top
    assert max(line) <= chart.frame.bottom
    assert {text for _, _, text, _ in chart.marks} >= {"best size"}
    for _, y, text, _ in chart.marks:
        assert "default" in text or min(abs(y - each) for each in line) < 0.1
