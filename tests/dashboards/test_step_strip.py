"""All steps in one strip."""

from __future__ import annotations

from pathlib import Path

import pytest

from dashboards.plots import trend
from dashboards.plots.trend import build_step_strip
from overlapscope.breakdown.breakdown import compute_breakdown
from overlapscope.breakdown.summary import Summary, summarize
from overlapscope.trace.recording import Trace, read_trace
from tests.breakdown.recordings import build_timeline
from tests.synthetic import write_recording, write_straggling_recording

MS = 1_000_000


def read(folder: Path) -> tuple[Trace, Summary]:
    trace = read_trace(folder)
    return trace, summarize(trace, compute_breakdown(trace))


def test_each_step_lies_where_the_timeline_has_it_with_its_exposed_time(tmp_path: Path) -> None:
    trace, summary = read(write_recording(tmp_path / "traces"))
    strip = build_step_strip(summary.figures, build_timeline(trace))
    assert strip["step"].tolist() == strip["last_step"].tolist() == list(range(5))
    assert strip["start_ns"].tolist() == [10 * MS * step for step in range(5)]
    assert strip["exposed_ns"].tolist() == pytest.approx([1.3 * MS] * 5)
    assert strip["exposed_share"].tolist() == pytest.approx([0.13] * 5)


def test_many_steps_are_taken_together_and_leave_no_gap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trend, "MAX_POINTS", 7)
    trace, summary = read(write_recording(tmp_path / "traces", steps=30))
    strip = build_step_strip(summary.figures, build_timeline(trace))
    assert len(strip) <= 7
    assert strip["step"].tolist()[1:] == (strip["last_step"] + 1).tolist()[:-1]
    assert strip["last_step"].iloc[-1] == 29


def test_without_a_finished_step_there_is_nothing(tmp_path: Path) -> None:
    trace, summary = read(write_recording(tmp_path / "traces", steps=0))
    assert build_step_strip(summary.figures, build_timeline(trace)).empty
    assert summary.typical_step is None


def test_the_typical_step_is_neither_quick_nor_slow(tmp_path: Path) -> None:
    """Steps become slower and slower."""
    _, summary = read(write_straggling_recording(tmp_path / "t", late_us=lambda _, step: 100 * step, ranks=2, steps=31))
    counted = summary.figures.loc[summary.is_steady, "step"]
    assert summary.typical_step == sorted(counted.unique())[(counted.nunique() - 1) // 2]
