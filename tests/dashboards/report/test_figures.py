"""Plots of the report: the figures of the recording, in one view that needs no server."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from dashboards.recording import RecordingCache
from dashboards.report.figures import ReportFigures
from dashboards.theme import LATENESS_SHADES
from overlapscope.advice.advice import advise
from tests.synthetic import write_recording, write_straggling_recording


def source_of(plot: Any, column: str) -> dict[str, Any]:
    """The data of the renderer that has a column."""
    found = [each.data_source.data for each in plot.renderers if column in each.data_source.data]
    return dict(found[0])


def test_a_trend_has_the_figure_of_each_step_with_a_text(tmp_path: Path) -> None:
    figures = ReportFigures()
    snapshot = RecordingCache(write_recording(tmp_path / "traces", steps=20)).latest()
    variables = figures.add_trends(snapshot.summary, snapshot.machine)
    assert [plot.shown.column for plot in variables["trends"]] == ["step_time_ns", "exposed_ns", "overlap_ratio"]
    assert source_of(figures.models["step_time_ns"], "middle")["middle"].tolist() == [10_000_000] * 20
    assert source_of(figures.models["exposed_ns"], "text")["text"][:2] == ["step 0: 1.30 ms", "step 1: 1.30 ms"]


def test_the_curve_passes_through_its_marks_within_its_frame(tmp_path: Path) -> None:
    snapshot = RecordingCache(write_recording(tmp_path / "traces", steps=30)).latest()
    figures = ReportFigures()
    figures.add_curve(advise(snapshot).recommendation.curve)
    plot = figures.models["curve"]
    line, marks = source_of(plot, "predicted"), source_of(plot, "y_offset")
    assert plot.y_range.start <= min(line["predicted"]) <= max(line["predicted"]) <= plot.y_range.end
    assert "best size" in marks["text"]
    for y, text in zip(marks["y"], marks["text"], strict=True):
        assert "default" in text or np.abs(np.asarray(line["predicted"]) - y).min() < 1e4


def shades(folder: Path, ranks: int) -> tuple[ReportFigures, dict[str, Any]]:
    """The heatmaps of a recording in which rank 1 is late in every step after the fourth."""
    write_straggling_recording(folder, late_us=lambda rank, _: 3_000 * (rank == 1), ranks=ranks, steps=30)
    figures = ReportFigures()
    variables = figures.add_heatmaps(RecordingCache(folder).latest().heatmap)
    return figures, {
        each["title"]: source_of(figures.models[each["root"]], "image")["image"][0] for each in variables["maps"]
    }


def test_the_late_rank_is_dark_where_it_is_late_and_the_others_where_they_wait(tmp_path: Path) -> None:
    figures, found = shades(tmp_path / "traces", ranks=4)
    for title in ("Compute", "Lateness"):
        assert (found[title][1] == LATENESS_SHADES).all()
        assert (found[title][[0, 2, 3]] == 0).all()
    assert (found["Wait"][1] == 0).all()
    assert (found["Wait"][[0, 2, 3]] > LATENESS_SHADES / 4).all()
    plot = figures.models["map_lateness"]
    assert plot.yaxis.formatter.args["names"].data["name"] == ["rank 0", "rank 1", "rank 2", "rank 3"]
    assert (plot.x_range.start, plot.x_range.end) == (3.5, 29.5)


def test_no_plot_asks_a_server_or_takes_the_wheel_from_the_page(tmp_path: Path) -> None:
    figures, _ = shades(tmp_path / "traces", ranks=2)
    for plot in figures.models.values():
        assert plot.toolbar.tools == []
        assert plot.tags == []
