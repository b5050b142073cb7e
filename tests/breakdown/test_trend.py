"""Figures over steps: merged into points, interrupted where steps are missing, and all of them in one strip."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from overlapscope.breakdown.breakdown import compute_breakdown
from overlapscope.breakdown.summary import Summary, summarize
from overlapscope.breakdown.trend import add_breaks, build_step_strip, trend_by_step
from overlapscope.trace.recording import Trace, read_trace
from tests.breakdown.recordings import build_timeline
from tests.synthetic import write_recording, write_straggling_recording

MS = 1_000_000


def per_step(ranks: int, steps: int) -> pd.DataFrame:
    rank, step = (values.ravel() for values in np.meshgrid(np.arange(ranks), np.arange(steps), indexing="ij"))
    return pd.DataFrame({"rank": rank, "step": step, "exposed_ns": 100 * step + rank, "overlap_ratio": np.nan})


def test_a_step_has_the_mean_and_the_range_of_its_ranks() -> None:
    trend = trend_by_step(per_step(3, 2), "exposed_ns")
    assert trend[["step", "last_step"]].to_numpy().tolist() == [[0, 0], [1, 1]]
    assert trend[["low", "usual_low", "middle", "mean", "usual_high", "high"]].to_numpy().tolist() == [
        [0, 0, 1, 1, 2, 2],
        [100, 100, 101, 101, 102, 102],
    ]


def test_an_outlier_moves_the_extremes_of_its_point_and_its_mean_and_nothing_else() -> None:
    figures = per_step(2, 5).assign(exposed_ns=[10, 10, 500, 10, 10, 20, 20, 20, 20, 20])
    (point,) = trend_by_step(figures, "exposed_ns", 1).to_dict("records")
    assert (point["step"], point["last_step"]) == (0, 4)
    assert (point["low"], point["usual_low"], point["middle"], point["usual_high"]) == (10, 10, 15, 20)
    assert (point["high"], point["mean"]) == (500, (4 * 15 + 260) / 5)


def test_steps_without_a_value_are_left_out() -> None:
    assert trend_by_step(per_step(2, 4), "overlap_ratio").empty


def test_many_steps_are_merged_equally_many_to_a_point_and_none_across_the_end_of_the_warm_up() -> None:
    trend = trend_by_step(per_step(1, 300), "exposed_ns", 100)
    assert len(trend) == 100
    assert set(trend["last_step"] - trend["step"]) == {2}
    trend = trend_by_step(per_step(1, 300), "exposed_ns", 60, first_step=3)
    assert trend["step"].tolist()[:3] == [0, 3, 8]


def test_no_point_lies_across_steps_that_are_missing_and_no_line_leads_there() -> None:
    figures = per_step(1, 1800)
    figures = figures[~figures["step"].between(100, 299)]
    trend = trend_by_step(figures, "exposed_ns")
    assert 99 in trend["last_step"].tolist()
    assert 300 in trend["step"].tolist()
    assert (trend["last_step"] - trend["step"]).max() <= 2
    (gap,) = add_breaks(trend, 3).loc[lambda points: points["middle"].isna(), "step"]
    assert 100 <= gap < 300


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


def test_many_steps_are_taken_together_and_leave_no_gap(tmp_path: Path) -> None:
    trace, summary = read(write_recording(tmp_path / "traces", steps=30))
    strip = build_step_strip(summary.figures, build_timeline(trace), 7)
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
