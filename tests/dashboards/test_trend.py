"""Figures over steps and over ranks."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pandas as pd

from dashboards.plots.trend import FIGURES, MAX_POINTS, TrendPlot, trend_by_rank, trend_by_step
from overlapscope.breakdown.breakdown import compute_breakdown
from overlapscope.breakdown.summary import summarize
from overlapscope.trace.recording import read_trace
from tests.synthetic import write_recording


def per_step(ranks, steps):
    rank, step = (values.ravel() for values in np.meshgrid(np.arange(ranks), np.arange(steps), indexing="ij"))
    return pd.DataFrame({"rank": rank, "step": step, "exposed_ns": 100 * step + rank, "overlap_ratio": np.nan})


def test_a_step_has_its_mean_and_the_band_of_its_ranks():
    trend = trend_by_step(per_step(3, 2), "exposed_ns")
    assert trend.to_dict("list") == {
        "step": [0, 1],
        "last_step": [0, 1],
        "low": [0, 100],
        "mean": [1.0, 101.0],
        "high": [2, 102],
    }


def test_steps_without_a_value_are_left_out():
    assert trend_by_step(per_step(2, 4), "overlap_ratio").empty
    assert trend_by_rank(per_step(2, 4), "overlap_ratio").empty


def test_many_steps_are_taken_together_equally_many_to_a_point():
    trend = trend_by_step(per_step(1, 3 * MAX_POINTS), "exposed_ns")
    assert len(trend) == MAX_POINTS
    assert set(trend["last_step"] - trend["step"]) == {2}


def test_each_rank_has_a_line_of_its_own():
    ranks = trend_by_rank(per_step(2, 3), "exposed_ns")
    assert ranks[ranks["rank"] == 1]["mean"].tolist() == [1, 101, 201]


def test_no_point_lies_across_steps_that_are_missing_and_no_line_leads_there():
    figures = per_step(1, 3 * MAX_POINTS)
    figures = figures[~figures["step"].between(100, 299)]
    trend = trend_by_step(figures, "exposed_ns")
    assert 99 in trend["last_step"].tolist()
    assert 300 in trend["step"].tolist()
    assert (trend["last_step"] - trend["step"]).max() <= 2


def test_a_line_is_interrupted_where_many_steps_are_missing(tmp_path):
    trace = read_trace(write_recording(tmp_path, steps=60))
    summary = summarize(trace, compute_breakdown(trace))
    plot = TrendPlot(FIGURES[0], summary)
    assert not np.isnan(plot.source.data["mean"]).any()
    kept = ~summary.figures["step"].between(20, 39)
    cut = replace(summary, figures=summary.figures[kept], is_steady=summary.is_steady[kept])
    plot = TrendPlot(FIGURES[0], cut)
    (at,) = np.flatnonzero(np.isnan(plot.source.data["mean"]))
    assert 20 <= plot.source.data["step"][at] <= 39
    assert all(np.isnan(line).sum() == 1 for line in plot.rank_lines.data["ys"])
