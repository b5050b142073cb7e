"""The rounds of an all-reduce on the timeline: drawn where they can be told apart, pointed at, and in the panel."""

from __future__ import annotations

import re

import numpy as np
import pytest

from dashboards.pages.timeline import render_selected_span
from dashboards.plots.timeline import TimelinePlot
from dashboards.recording import Snapshot
from overlapscope.trace.recording import read_trace
from tests.segments import ROUNDS, write_ring_recording

US = 1_000
COMMUNICATION = 3


@pytest.fixture(scope="module")
def snapshot(tmp_path_factory):
    return Snapshot(read_trace(write_ring_recording(tmp_path_factory.mktemp("ring"))))


@pytest.fixture
def plot(snapshot):
    return TimelinePlot(snapshot, snapshot.lanes.timeline([1]))


def test_in_a_close_view_each_round_is_drawn_on_its_all_reduce(plot):
    plot.update((3_900 * US, 5_100 * US), width_px=1000)
    drawn = plot.segments.data
    assert (np.asarray(drawn["left"]) / US).tolist() == [start_us for _, start_us, _ in ROUNDS]
    assert (np.asarray(drawn["right"]) / US).tolist() == [end_us for _, _, end_us in ROUNDS]
    spans = plot.spans.data
    (of_bucket,) = np.flatnonzero(
        (np.asarray(spans["row"]) == drawn["row"][0]) & (np.asarray(spans["lane"]) == COMMUNICATION)
    )
    assert spans["top"][of_bucket] < drawn["top"][0]
    assert drawn["bottom"][0] == pytest.approx(spans["bottom"][of_bucket])
    assert drawn["alpha"][0] != drawn["alpha"][1]


def test_from_afar_where_they_are_a_pixel_wide_they_are_not_drawn(plot):
    plot.update((0, 200_000 * US), width_px=1000)
    assert len(plot.segments.data["left"]) == 0
    assert len(plot.spans.data["left"]) > 0


def test_a_round_that_is_pointed_at_is_in_the_tooltip(plot):
    plot.update((3_900 * US, 5_100 * US), width_px=1000)
    row, segment = (int(plot.segments.data[name][1]) for name in ("row", "segment"))

    def rows(number, segment):
        plot.pointed.data = {"id": [number], "lane": [COMMUNICATION], "row": [row], "round": [segment]}
        return dict(zip(plot.tooltip.data["label"], plot.tooltip.data["value"], strict=True))

    shown = rows(1, segment)
    assert shown["round"] == "all-gather"
    assert shown["sends"] == "512 kB to rank 0"
    assert shown["receives"] == "512 kB from rank 0"
    assert shown["takes"] == "400 µs"
    assert "round" not in rows(2, -1)


def test_the_panel_lists_the_rounds_of_every_rank_that_of_the_span_first(snapshot):
    timeline = snapshot.lanes.timeline([0, 1])
    row = int(snapshot.rounds.table.query("rank == 1 and step == 1")["row"].iloc[0])
    lane = next(number for number, one in enumerate(timeline.lanes) if one.rank == 1 and one.name == "communication")
    markup = render_selected_span(
        snapshot.trace,
        snapshot.rounds,
        timeline,
        lane,
        row,
        snapshot.trace.steps[:0].assign(occurrence=0, moment="", time_ns=0),
    )
    table = markup.partition('<table class="rounds">')[2]
    ranks = re.findall(r'<th scope="row">(\d)</th><td>([\w-]+)</td>', table)
    assert ranks == [(rank, phase) for rank in ("1", "0") for phase, _, _ in ROUNDS]


def test_the_panel_of_an_all_reduce_without_rounds_has_no_such_table(snapshot):
    timeline = snapshot.lanes.timeline([0, 1])
    row = int((snapshot.trace.collectives["bucket"] == 1).argmax())
    flow = snapshot.trace.steps[:0].assign(occurrence=0, moment="", time_ns=0)
    markup = render_selected_span(snapshot.trace, snapshot.rounds, timeline, COMMUNICATION, row, flow)
    assert 'class="rounds"' not in markup
