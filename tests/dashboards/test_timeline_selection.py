"""What is chosen on the timeline: outlined, described, followed through the lanes, and found again by its name."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from dashboards.pages.timeline import connect_markup, render_selected_span
from dashboards.plots.lane_layout import layout_lanes
from dashboards.plots.timeline import TimelinePlot
from dashboards.plots.timeline_selection import MARKERS

MS = 1_000_000
NUMBERS = itertools.count()
US = 1_000


@pytest.fixture
def timeline(snapshot):
    return snapshot.lanes.timeline([0, 1])


@pytest.fixture
def plot(snapshot, timeline):
    return TimelinePlot(snapshot, timeline)


def choose(plot, lane, row):
    plot.selection.chosen.data = {"id": [next(NUMBERS)], "lane": [lane], "row": [row], "name": [""]}


def test_what_is_chosen_is_outlined_and_described(plot, snapshot, timeline):
    connect_markup(plot, snapshot)
    lane = timeline.lanes[3]
    row = int(lane.spans.rows[4])
    choose(plot, 3, row)
    assert (plot.selection.response.data["lane"], plot.selection.response.data["row"]) == ([3], [row])
    assert len(plot.selection.flow) == 12
    described = render_selected_span(snapshot.trace, snapshot.rounds, timeline, 3, row, plot.selection.flow)
    assert plot.rpc.sources["panel"].data["markup"] == [described]
    assert plot.selection.response.data["from_ns"] == [int(lane.spans.starts_ns[4])]
    assert sorted(plot.selection.outlines.data["line_width"])[-2:] == [1.5, 3.0]
    choose(plot, -1, -1)
    assert len(plot.selection.outlines.data["left"]) == 0
    assert len(plot.selection.marks.data["x"]) == 0


def test_the_way_of_a_chosen_bucket_leads_through_the_lanes_of_every_rank_and_across_them(plot, timeline):
    choose(plot, 3, int(timeline.lanes[3].spans.rows[4]))
    x, y = (np.asarray(plot.selection.bucket_path.data[name]) for name in ("x", "y"))
    assert np.nanmin(x) == 14_950 * US
    assert np.nanmax(x) == 18_410 * US
    for rank in (0, 1):
        lanes = [plot.layout.lane_px(rank * 4 + lane) for lane in (1, 2, 3)]
        assert all(np.any((top < y) & (y < bottom)) for top, bottom in lanes)
    assert set(plot.selection.marks.data["marker"]) == set(MARKERS.values())
    meeting = plot.selection.meetings.data
    assert list(meeting["x"]) == [15_050 * US]
    assert meeting["top"][0] < plot.layout.rank_px(1)[0] < meeting["bottom"][0]


def test_a_span_is_selected_by_the_name_that_it_had_when_it_was_chosen(plot, timeline):
    choose(plot, 7, int(timeline.lanes[7].spans.rows[4]))
    chosen = {name: list(values) for name, values in plot.selection.response.data.items()}
    assert chosen["name"] == ["1-communication-1-1"]
    choose(plot, -1, -1)
    plot.selection.chosen.data = {"id": [99], "lane": [-1], "row": [-1], "name": chosen["name"]}
    assert plot.selection.response.data == chosen
    assert len(plot.selection.outlines.data["left"]) > 0


def test_the_breakdown_of_a_step_is_sent_once_while_the_view_moves_within_it(plot, snapshot):
    connect_markup(plot, snapshot)
    sent = []
    plot.rpc.sources["breakdown"].on_change("data", lambda _attribute, _old, new: sent.append(new["step"][0]))
    for number, middle_ms in enumerate((25, 26, 37)):
        window = {"from_ns": [(middle_ms - 1) * MS], "to_ns": [(middle_ms + 1) * MS], "width_px": [800]}
        window |= {"top_px": [0], "bottom_px": [620]}
        plot.view.data = {"id": [number], **window, "is_ideal": [False], "is_path": [False]}
    assert sent == [2, 3]


def test_a_selection_that_is_not_here_is_said(plot):
    plot.selection.chosen.data = {"id": [99], "lane": [-1], "row": [-1], "name": ["9-communication-1-1"]}
    assert (plot.selection.response.data["note"] != [""], plot.selection.response.data["name"]) == (True, [""])
    assert len(plot.selection.outlines.data["left"]) == 0


def test_a_phase_has_no_way(plot, timeline):
    choose(plot, 0, int(timeline.lanes[0].spans.rows[4]))
    assert len(plot.selection.outlines.data["left"]) > 0
    assert len(plot.selection.marks.data["x"]) == len(plot.selection.bucket_path.data["x"]) == 0


def test_what_is_looked_for_is_shown_and_chosen(plot):
    plot.selection.sought.data = {"text": ["bucket 1"], "from_ns": [20 * MS]}
    assert plot.picked.data["from_ns"][0] <= 25 * MS <= plot.picked.data["to_ns"][0]
    assert plot.selection.response.data["from_ns"] == [25 * MS]
    plot.selection.sought.data = {"text": ["<b>"], "from_ns": [0]}
    assert "'<b>'" in plot.selection.response.data["note"][0]


def test_a_selection_by_name_is_cleared_like_any_other(plot):
    plot.selection.sought.data = {"text": ["bucket 1"], "from_ns": [20 * MS]}
    assert len(plot.selection.outlines.data["left"]) > 0
    choose(plot, -1, -1)
    assert len(plot.selection.outlines.data["left"]) == len(plot.selection.marks.data["x"]) == 0


def test_a_selection_stays_when_ranks_are_sorted_collapsed_and_scrolled(plot, snapshot):
    choose(plot, 7, int(plot.shown.timeline.lanes[7].spans.rows[4]))
    from_ns, name = plot.selection.response.data["from_ns"], plot.selection.response.data["name"]
    plot.show_ranks(snapshot.lanes.timeline([1, 0]), layout_lanes(2, [0]))
    assert plot.selection.response.data["lane"] == [3]
    assert (plot.selection.response.data["from_ns"], plot.selection.response.data["name"]) == (from_ns, name)
    collapsed = plot.shown.layout.lane_px(7)
    outlines = zip(plot.selection.outlines.data["top"], plot.selection.outlines.data["bottom"], strict=True)
    assert collapsed in outlines, "where the all-reduce of the collapsed rank is"
    plot.draw_ranks(range(1))
    assert max(plot.selection.outlines.data["bottom"]) <= plot.shown.layout.rank_px(0)[1]
    plot.show_ranks(snapshot.lanes.timeline([0]), layout_lanes(1))
    assert len(plot.selection.outlines.data["left"]) == 0
