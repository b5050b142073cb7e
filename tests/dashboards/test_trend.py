"""The plot of a figure over steps."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from dashboards.plots.trend import FIGURES, MAX_POINTS, TrendPlot
from overlapscope.breakdown.breakdown import compute_breakdown
from overlapscope.breakdown.summary import Summary, summarize
from overlapscope.trace.recording import read_trace
from tests.synthetic import write_recording


@pytest.fixture
def summary(tmp_path: Path) -> Summary:
    """Sixty equal steps of 10 ms."""
    trace = read_trace(write_recording(tmp_path, steps=60))
    return summarize(trace, compute_breakdown(trace))


def drawn(summary: Summary, per_step: pd.DataFrame | None = None) -> Any:
    return TrendPlot(FIGURES[0], summary, per_step)


def slowed(summary: Summary, **times: float) -> Summary:
    """With some steps, such as ``step_1=5``, so many times as long."""
    figures = summary.figures.copy()
    for step, times_longer in times.items():
        figures.loc[figures["step"] == int(step.removeprefix("step_")), "step_time_ns"] *= times_longer
    return replace(summary, figures=figures)


def test_a_line_is_interrupted_where_many_steps_are_missing(summary: Summary) -> None:
    plot = drawn(summary)
    assert not np.isnan(plot.source.data["middle"]).any()
    kept = ~summary.figures["step"].between(20, 39)
    cut = replace(summary, figures=summary.figures[kept], is_steady=summary.is_steady[kept])
    plot = drawn(cut)
    (at,) = np.flatnonzero(np.isnan(plot.source.data["middle"]))
    assert 20 <= plot.source.data["step"][at] <= 39
    assert [len(band.data["xs"]) for band in plot.bands] == [2, 2]


def test_the_axis_holds_all_steps_but_a_warm_up_that_would_flatten_them_which_has_a_mark(summary: Summary) -> None:
    plot = drawn(slowed(summary, step_1=1.5, step_30=1.4))
    assert plot.y_range.end > 15_000_000
    assert len(plot.beyond.data["x"]) == 0
    plot = drawn(slowed(summary, step_1=20, step_30=1.4))
    assert 14_000_000 < plot.y_range.end < 30_000_000
    assert plot.beyond.data["x"].tolist() == [1]
    assert plot.beyond.data["y"] < plot.y_range.end
    assert plot.source.data["text"][1] == "step 1: 200 ms"
    assert plot.caption == "mean and range of the ranks; ▲ up to 200 ms"


def test_what_the_bands_are_is_said(summary: Summary) -> None:
    assert drawn(summary).caption == "mean and range of the ranks"
    figures = summary.finished_together
    many = figures.loc[figures.index.repeat(3)].assign(step=np.tile(np.arange(3 * MAX_POINTS), 2))
    plot = drawn(summary, many)
    assert plot.steps_per_point == 3
    assert "medians of 3 steps" in plot.caption
    assert len(plot.source.data["step"]) <= MAX_POINTS + 1
