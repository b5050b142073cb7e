"""An area of the timeline: framed around its ranks, and a table of what each of them does in it."""

from __future__ import annotations

import re

import pytest

from dashboards.pages.timeline import connect_markup
from dashboards.plots.lane_layout import layout_lanes
from dashboards.plots.timeline import TimelinePlot
from dashboards.plots.timeline_area import parse_area
from dashboards.recording import RecordingCache
from tests.synthetic import write_straggling_recording

MS = 1_000_000


@pytest.fixture
def many(tmp_path):
    folder = write_straggling_recording(tmp_path / "t", late_us=lambda rank, _: 300 * (rank == 2), ranks=5, steps=4)
    return RecordingCache(folder).latest()


def make_plot(snapshot, ranks):
    plot = TimelinePlot(snapshot, snapshot.lanes.timeline(ranks))
    connect_markup(plot, snapshot)
    return plot


def ask(plot, from_ns, to_ns, ranks):
    plot.area.asked.data = {"id": [1], "from_ns": [from_ns], "to_ns": [to_ns], "ranks": [ranks]}


def frames(plot):
    data = plot.area.frames.data
    return list(zip(data["top"], data["bottom"], strict=True))


def test_an_area_is_framed_tabulated_and_taken_away(snapshot, golden):
    plot = make_plot(snapshot, [0, 1])
    ask(plot, 28 * MS, 20 * MS, "1,0")
    assert frames(plot) == [(0, plot.layout.height_px)]
    assert plot.area.response.data | {"id": []} == {
        "id": [],
        "from_ns": [20 * MS],
        "to_ns": [28 * MS],
        "ranks": ["0,1"],
        "note": [""],
    }
    table = plot.area.tabulate()
    assert table["rank"].tolist() == [0, 1]
    assert (table["exposed_ns"] > 0).all()
    golden("area_of_the_timeline.html", plot.rpc.sources["panel"].data["markup"][0])
    plot.area.asked.data = {"id": [], "from_ns": [], "to_ns": [], "ranks": []}
    assert frames(plot) == []
    assert plot.area.area is None


def test_ranks_that_are_not_below_each_other_have_frames_of_their_own_and_stay_when_sorted(many):
    plot = make_plot(many, [0, 1, 2, 3, 4])
    ask(plot, 0, 10 * MS, "0,1,3")
    tops = plot.layout.tops_px.tolist()
    assert frames(plot) == [(tops[0], tops[2]), (tops[3], tops[4])]
    plot.show_ranks(many.lanes.timeline([2, 3, 0]), layout_lanes(3, [0]))
    tops = plot.layout.tops_px.tolist()
    assert frames(plot) == [(tops[1], tops[3])]
    assert plot.area.tabulate()["rank"].tolist() == [3, 0]
    assert plot.area.response.data["ranks"] == ["0,1,3"], "for when rank 1 is shown again"
    plot.show_ranks(many.lanes.timeline([2, 4]), layout_lanes(2))
    assert frames(plot) == []
    assert plot.area.response.data["note"] != [""]


def test_of_several_ranks_the_most_the_median_and_the_least_are_named(many):
    plot = make_plot(many, [4, 3, 2, 1, 0])
    ask(plot, 0, 10 * MS, "")
    assert plot.area.response.data["ranks"] == [""]
    assert plot.area.tabulate()["rank"].tolist() == [4, 3, 2, 1, 0]
    markup = plot.rpc.sources["panel"].data["markup"][0]
    forward = plot.area.tabulate().set_index("rank")["forward_ns"]
    assert forward.idxmax() == 2
    most = re.search(r">most</th>(.*?)</tr>", markup)
    assert most is not None
    assert "rank 2" in most[1]
    assert markup.count('scope="row"') == 3 + 5


def test_nothing_is_selected_outside_the_recording_or_by_nonsense_in_the_address(snapshot):
    plot = make_plot(snapshot, [0, 1])
    ask(plot, 10**15, 2 * 10**15, "")
    assert frames(plot) == []
    ask(plot, 0, 10 * MS, "7")
    assert frames(plot) == []
    assert [parse_area(text) for text in ("5-9", "", "9", "-3-9", "a-b", "1" * 30 + "-2")] == [(5, 9), *[None] * 5]
