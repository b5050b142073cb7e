"""What held ranks back is a trend over the steps of the Overview page."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from dashboards.pages.overview import build_overview_context
from dashboards.plots.trend import plot_machine_trends
from dashboards.recording import RecordingCache
from tests.machine.said import HOT, gpu, write_machine
from tests.synthetic import write_recording


def test_a_condition_has_a_trend_with_the_share_of_each_step(tmp_path: Path) -> None:
    write_recording(tmp_path, ranks=2, steps=10)
    write_machine(tmp_path, 1, gpu("gpu 1", [0] * 5 + [HOT] * 7, begin_s=1.0, every_s=0.01))
    snapshot = RecordingCache(tmp_path).latest()
    (plot,) = plot_machine_trends(snapshot.machine, snapshot.summary)
    shares = plot.source.data["middle"]
    # Steps of rank 1 begin 0.05 ms after the samples.
    np.testing.assert_allclose(shares, [0, 0, 0, 0, 0.005, *[1] * 5], atol=0.002)
    assert plot.y_range.end == pytest.approx(1.04)
    section = build_overview_context(snapshot)["machine"]
    assert [row["what"] for row in section.tables[0].rows] == ["GPU clock held down by heat"]


def test_without_facts_there_is_no_trend_and_no_section(tmp_path: Path) -> None:
    snapshot = RecordingCache(write_recording(tmp_path, ranks=2, steps=10)).latest()
    assert plot_machine_trends(snapshot.machine, snapshot.summary) == []
    assert build_overview_context(snapshot)["machine"] is None
