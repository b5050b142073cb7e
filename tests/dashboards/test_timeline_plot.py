"""The timeline, driven as the browser drives it: by writing into its sources and reading them."""

from __future__ import annotations

import itertools
import re
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest

from dashboards.pages.timeline import parse_view
from dashboards.plots import timeline as timeline_module
from dashboards.plots.lane_ends import describe_ends
from dashboards.plots.lane_layout import lane_units, layout_lanes
from dashboards.plots.span_details import SpanDetails
from dashboards.plots.timeline import TimelinePlot, compute_step_view
from dashboards.plots.timeline_columns import build_step_label_columns
from dashboards.plots.tooltip import build_tooltip
from dashboards.recording import RecordingCache, Snapshot
from dashboards.theme import SHADES
from overlapscope.breakdown.lanes import CATEGORIES, LANE_NAMES
from overlapscope.diagnosis.evidence import RankPosition
from overlapscope.text import format_ns
from tests.synthetic import write_recording

MS = 1_000_000
US = 1_000


@pytest.fixture
def timeline(snapshot):
    return snapshot.lanes.timeline([0, 1])


@pytest.fixture
def plot(snapshot, timeline):
    return TimelinePlot(snapshot, timeline)


def spans_of(plot, lane):
    data = plot.spans.data
    chosen = np.asarray(data["lane"]) == lane
    return {name: np.asarray(values)[chosen] for name, values in data.items()}


def ask(plot, from_ns, to_ns, width_px=1000, number=1, is_ideal=False, is_path=False, rows_px=(0, 620)):
    asked = {"id": number, "from_ns": from_ns, "to_ns": to_ns, "width_px": width_px}
    asked |= {"top_px": rows_px[0], "bottom_px": rows_px[1]}
    asked |= {"is_ideal": is_ideal, "is_path": is_path}
    plot.view.data = {name: [value] for name, value in asked.items()}


def test_it_opens_with_the_whole_recording(plot):
    assert plot.time_range.start < 0
    assert plot.time_range.end > 50 * MS
    assert len(plot.spans.data["left"]) == 2 * 5 * (5 + 3 + 9 + 3)


def test_all_reduces_of_a_step_lie_where_they_ran(plot):
    ask(plot, 0, 9_900 * US)
    communication = spans_of(plot, 3)
    first_step = communication["left"] < 10 * MS
    assert communication["left"][first_step].tolist() == [4000 * US, 5000 * US, 6900 * US]
    assert communication["right"][first_step].tolist() == [4800 * US, 6500 * US, 8300 * US]
    names = [CATEGORIES[category] for category in communication["category"][first_step]]
    assert names == ["bucket_0", "bucket_1", "bucket_2"]


def test_buckets_from_the_ninth_on_are_hatched(snapshot):
    trace = replace(
        snapshot.trace, collectives=snapshot.trace.collectives.assign(bucket=lambda table: table["bucket"] * 8)
    )
    other = Snapshot(trace)
    plot = TimelinePlot(other, other.lanes.timeline([0, 1]))
    ask(plot, 0, 9_900 * US)
    communication = spans_of(plot, 3)
    assert {CATEGORIES[category] for category in communication["category"]} == {"bucket_0"}
    assert communication["pattern"][:3].tolist() == [0, 1, 2]
    for number, source in enumerate(plot.hatches.sources, start=1):
        is_it = communication["pattern"] == number
        assert set(communication["left"][is_it]) <= set(source.data["left"])
    assert len(plot.hatches.sources[2].data["left"]) == 0


def test_an_instant_is_drawn_a_pixel_wide(plot):
    ask(plot, 0, 10 * MS, width_px=1000)
    gradients = spans_of(plot, 1)
    assert np.all(gradients["right"] - gradients["left"] >= 10 * US)


def test_spans_that_run_at_the_same_time_lie_one_above_the_other(plot):
    ask(plot, 0, 10 * MS)
    buckets = spans_of(plot, 2)
    wait, copy = (np.flatnonzero(buckets["left"] == 3950 * US)[at] for at in (0, 1))
    assert buckets["bottom"][wait] <= buckets["top"][copy] or buckets["bottom"][copy] <= buckets["top"][wait]


def test_the_critical_path_is_one_line_through_the_lanes_without_a_gap_in_time(plot, snapshot):
    ask(plot, 10 * MS, 30 * MS, is_path=True)
    x, y = (np.asarray(plot.path.data[name]) for name in ("x", "y"))
    assert np.all(np.diff(x) >= 0)
    assert x[0] <= 10 * MS < 30 * MS <= x[-1]
    assert np.array_equal(x[1:-1:2], x[2::2])
    lanes = {plot.layout.lane_px(number) for number in (0, 3, 4, 7)}
    assert all(any(top < at < bottom for top, bottom in lanes) for at in y)
    assert plot.response.data["path_hint"] == [""]
    ask(plot, 10 * MS, 30 * MS, number=2)
    assert len(plot.path.data["x"]) == 0


def test_the_critical_path_of_too_many_steps_is_not_drawn_and_it_says_why(plot, monkeypatch):
    monkeypatch.setattr(timeline_module, "MAX_PATH_STEPS", 2)
    ask(plot, 0, 50 * MS, is_path=True)
    assert "2 steps" in plot.response.data["path_hint"][0]
    assert len(plot.path.data["x"]) == 0


def test_exposed_communication_is_red_on_the_phases_of_each_rank_with_its_duration(plot, snapshot):
    ask(plot, 10 * MS, 20 * MS - 1)
    figures = snapshot.summary.figures.set_index(["rank", "step"])
    drawn = {name: np.asarray(values) for name, values in plot.exposed.data.items()}
    assert {CATEGORIES[category] for category in drawn["category"]} == {"exposed"}
    for rank in (0, 1):
        top, bottom = plot.layout.lane_px(rank * 4)
        own = (drawn["lane"] == rank * 4) & (drawn["left"] > 10 * MS) & (drawn["right"] < 20 * MS)
        assert set(drawn["top"][own]) == {top + 1}
        assert set(drawn["bottom"][own]) == {bottom - 1}
        exposed_ns = figures.loc[(rank, 1), "exposed_ns"]
        assert (drawn["right"] - drawn["left"])[own].sum() == exposed_ns > 0
        assert f"exposed {format_ns(int(exposed_ns))}" in plot.labels.data["text"]


def test_the_name_of_a_phase_is_beside_the_exposed_communication_that_covers_it(plot):
    ask(plot, 16 * MS, 19 * MS)
    labels = zip(plot.labels.data["text"], plot.labels.data["x"], plot.labels.data["y"], strict=True)
    drawn = {name: np.asarray(values) for name, values in plot.exposed.data.items()}
    named = [(x, y) for text, x, y in labels if text in ("wait for gradients", "backward")]
    assert len(named) >= 2
    for x, y in named:
        inside = (drawn["left"] < x) & (x < drawn["right"]) & (drawn["top"] < y) & (y < drawn["bottom"])
        assert not inside.any()


def test_in_shades_exposed_communication_is_red_by_its_share(plot, snapshot, monkeypatch):
    monkeypatch.setattr(timeline_module, "MAX_SPANS", 10)
    ask(plot, 10 * MS, 20 * MS, width_px=20)
    first, red = CATEGORIES.index("exposed") * SHADES, plot.shades.data["image"][0][0]
    pixel_ns = plot.shades.data["dw"][0] / len(red)
    shares = np.where(red >= first, red - first, 0) / (SHADES - 1)
    in_step = slice(*((np.array([10, 20]) * MS - plot.shades.data["x"][0]) // pixel_ns).astype(int))
    exposed_ns = snapshot.summary.figures.set_index(["rank", "step"]).loc[(0, 1), "exposed_ns"]
    assert shares[in_step].sum() * pixel_ns == pytest.approx(exposed_ns, rel=0.25)


def test_the_ruler_says_how_long_it_is_and_how_much_of_that_is_exposed(plot, golden):
    def measured(from_ns, to_ns, rank):
        plot.ruler.asked.data = {"id": [1], "from_ns": [from_ns], "to_ns": [to_ns], "rank": [rank]}
        return plot.ruler.ruler.data["text"][0]

    spans_ms = ((6, 8, 0), (8, 6, 1), (1, 2, 0), (-1, 1, 0), (0, 1, 99))
    texts = [measured(from_ms * MS, to_ms * MS, rank) for from_ms, to_ms, rank in spans_ms]
    assert re.findall(r"[\d.]+ .s", texts[1]) == ["2.00 ms", "950 µs"]
    golden("pages/ruler", "\n".join(texts))
    plot.ruler.asked.data = {"id": [], "from_ns": [], "to_ns": [], "rank": []}
    assert len(plot.ruler.ruler.data["text"]) == 0


def test_too_many_spans_become_shades_of_exact_busy_time(plot, monkeypatch):
    monkeypatch.setattr(timeline_module, "MAX_SPANS", 10)
    ask(plot, 0, 10 * MS, width_px=20)
    assert plot.response.data["is_shaded"] == [True]
    assert len(plot.spans.data["left"]) == 0
    picture = plot.shades.data["image"][0]
    first, after = lane_units(3)
    begin, length = plot.shades.data["x"][0], plot.shades.data["dw"][0]
    pixel_ns = length / picture.shape[1]
    column = int((4250 * US - begin) // pixel_ns)
    assert np.all(picture[first:after, column] == CATEGORIES.index("bucket_0") * SHADES + SHADES - 1)
    idle = int((1 * MS - begin) // pixel_ns)
    assert np.all(picture[first:after, idle] == 0)


def test_shades_leave_room_for_single_spans(plot, monkeypatch):
    ask(plot, 20 * MS, 30 * MS)
    in_view = plot.response.data["spans"][0]
    monkeypatch.setattr(timeline_module, "MAX_SPANS", in_view)
    ask(plot, 20 * MS, 30 * MS, number=2)
    assert len(plot.spans.data["left"]) == in_view
    picture = plot.shades.data["image"][0]
    middle = picture.shape[1] // 2
    assert np.all(picture[:, middle - 100 : middle + 100] == 0)
    assert picture.any()


def test_an_answer_names_the_question_and_the_step_in_the_middle(plot):
    ask(plot, 30 * MS, 40 * MS, number=7)
    assert plot.response.data["id"] == [7]
    assert plot.response.data["step"] == [3]


@pytest.mark.parametrize(
    ("step", "move", "shown"), [(2, 0, 2), (2, 1, 3), (2, -1, 1), (4, 1, 4), (0, -1, 0), (99, 0, 4)]
)
def test_picking_a_step_shows_it_on_all_ranks(plot, timeline, step, move, shown):
    plot.pick.data = {"step": [step], "move": [move]}
    picked = plot.picked.data
    steps = timeline.steps.set_index("step")
    assert picked["from_ns"][0] < steps["start_ns"][shown]
    assert picked["to_ns"][0] > steps["end_ns"][shown]
    assert picked["to_ns"][0] - picked["from_ns"][0] < 12 * MS


def test_pointing_at_a_bucket_reads_its_parameter_size_and_times(plot):
    ask(plot, 0, 10 * MS)
    communication = spans_of(plot, 3)
    plot.pointed.data = {"id": [1], "lane": [3], "row": [int(communication["row"][1])], "round": [-1]}
    tooltip = plot.tooltip.data
    lines = dict(zip(tooltip["label"], tooltip["value"], strict=True))
    assert tooltip["title"][0] == "All-reduce · bucket 1"
    assert lines["parameter"] == "body.1.weight"
    assert lines["size"] == "16 MB of float32"
    assert lines["launched"] == "5.000 ms"
    assert lines["start"] == "5.000 ms or later"
    assert lines["duration"] == "1.50 ms"


def test_names_are_written_into_spans_that_hold_them(plot):
    ask(plot, 0, 10 * MS, width_px=1300)
    assert {"backward", "bucket 1"} <= set(plot.labels.data["text"])
    categories = dict(zip(plot.labels.data["text"], plot.labels.data["category"], strict=True))
    exposed = next(text for text in categories if text.startswith("exposed"))
    for text, name in (("backward", "backward"), (exposed, "exposed"), ("bucket 1", "bucket_1")):
        assert CATEGORIES[categories[text]] == name, "its ink is that of the span below it"
    ask(plot, 0, 10 * MS, width_px=60)
    assert plot.labels.data["text"] == []


def test_the_ideal_is_outlined_in_the_lanes_of_every_rank(plot):
    # Rank 1 is 50 µs late: the last all-reduce would have begun, and ended, that much earlier.
    ask(plot, 40 * MS, 50 * MS, is_ideal=True)
    outlines = {name: np.asarray(values) for name, values in plot.outlines.data.items()}
    for lane in (3, 7):
        top, bottom = plot.layout.lane_px(lane)
        inside = (outlines["top"] > top) & (outlines["bottom"] < bottom)
        assert outlines["left"][inside].tolist() == [44_000 * US, 45_000 * US, 46_900 * US]
        assert outlines["right"][inside].tolist() == [44_750 * US, 46_450 * US, 48_250 * US]
    assert plot.ideal_ends.data["x"].tolist() == [48_250 * US]
    assert plot.ideal_ends.data["label"] == ["ideal end: 50.0 µs earlier"]
    assert plot.response.data["ideal_hint"] == [""]
    ask(plot, 40 * MS, 50 * MS, number=2)
    assert len(plot.outlines.data["left"]) == len(plot.ideal_ends.data["x"]) == 0


def test_there_is_no_ideal_of_the_warm_up(plot):
    ask(plot, 0, 9 * MS, is_ideal=True)
    assert plot.response.data["ideal_hint"] != [""]
    assert len(plot.outlines.data["left"]) == 0


def test_the_ideal_of_too_many_steps_is_not_drawn(plot, monkeypatch):
    monkeypatch.setattr(timeline_module, "MAX_IDEAL_STEPS", 3)
    ask(plot, 0, 50 * MS, is_ideal=True)
    assert "3 steps" in plot.response.data["ideal_hint"][0]
    assert len(plot.outlines.data["left"]) == 0


def test_one_rank_alone_has_no_ideal(tmp_path):
    snapshot = RecordingCache(write_recording(tmp_path / "traces", ranks=1)).latest()
    plot = TimelinePlot(snapshot, snapshot.lanes.timeline([0]))
    ask(plot, 40 * MS, 50 * MS, is_ideal=True)
    assert plot.response.data["ideal_hint"] != [""]


@pytest.mark.parametrize(
    ("width_px", "label"), [(1000, "ideal end: 50.0 µs earlier"), (200, "\N{MINUS SIGN}50.0 µs"), (100, "")]
)
def test_how_much_earlier_is_said_as_far_as_there_is_room(plot, width_px, label):
    ask(plot, 40 * MS, 50 * MS, width_px=width_px, is_ideal=True)
    assert plot.ideal_ends.data["label"] == [label]


@pytest.mark.parametrize("ranks", [1, 4, 8, 9, 12, 16])
@pytest.mark.parametrize("thinnest_px", [4, 8])
def test_names_of_lanes_do_not_cover_each_other(ranks, thinnest_px):
    layout = layout_lanes(ranks, range(ranks), thinnest_px)
    middles = [sum(layout.lane_px(LANE_NAMES.index(name))) / 2 for name in layout.labeled_lanes]
    assert all(after - before >= 12 for before, after in itertools.pairwise(middles))


def test_every_lane_lies_within_the_height_of_the_plot(plot):
    assert plot.layout.lane_px(7)[1] <= plot.layout.height_px == plot.rows.data["top_px"][-1]


@pytest.mark.parametrize(("ranks", "is_expanded"), [(1, True), (8, True), (9, False), (1024, False)])
def test_ranks_are_expanded_while_they_fit_a_window(ranks, is_expanded):
    layout = layout_lanes(ranks)
    assert set(layout.is_expanded) == {is_expanded}
    assert layout.height_px <= 620 or not is_expanded


def test_a_collapsed_rank_has_one_lane_and_the_others_move_below_an_expanded_one():
    layout = layout_lanes(1024, [3])
    assert [layout.has_lane(lane) for lane in (8, 9, 12, 13, 16, 17)] == [True, False, True, True, True, False]
    heights = np.diff(layout.tops_px)
    assert heights[3] > 4 * heights[2] == 4 * heights[4] >= 4 * 12
    assert layout.find_positions(*layout.rank_px(3)) == range(3, 4)
    assert layout.find_positions(-100, 1) == range(1)
    assert layout.find_positions(10**9, 10**9 + 1) == range(1024, 1024)


def test_of_many_ranks_those_in_view_and_some_around_it_are_drawn(tmp_path):
    snapshot = RecordingCache(write_recording(tmp_path / "traces", ranks=100, steps=3)).latest()
    plot = TimelinePlot(snapshot, snapshot.lanes.timeline(range(100)))
    ask(plot, 0, 10 * MS, rows_px=(800, 960))
    assert plot.shown.drawn == range(45, 65)
    assert {int(lane) // 4 for lane in plot.spans.data["lane"]} == set(range(45, 65))
    assert {int(lane) % 4 for lane in plot.spans.data["lane"]} == {0}
    assert plot.response.data["spans"] == [10 * 4]
    assert (plot.response.data["top_px"], plot.response.data["bottom_px"]) == ([45 * 16], [65 * 16])


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        ({"from": [b"1000000"], "to": [b"2000000"]}, (1_000_000, 2_000_000)),
        ({"from": [b"2000000"], "to": [b"1000000"]}, None),
        ({"from": [b"nan"], "to": [b"inf"], "step": [b"x"]}, None),
        ({}, None),
    ],
)
def test_the_address_gives_the_view(timeline, query, expected):
    assert parse_view(timeline, query) == expected


def test_a_step_in_the_address_is_shown_unless_a_range_is_given(timeline):
    assert parse_view(timeline, {"step": [b"2"]}) == compute_step_view(timeline, 2)


@pytest.mark.parametrize(
    ("uncertainty_ns", "is_bound", "said"),
    [
        (0, False, ""),
        (0, True, "or earlier"),
        (2_000_000, True, "or up to 2.00 ms earlier"),
        (9_000_000, True, "at the latest"),
    ],
)
def test_a_tooltip_says_how_sure_the_end_of_a_collective_is(uncertainty_ns, is_bound, said):
    span = SpanDetails(
        what="all-reduce",
        rank=0,
        step=3,
        step_is_known=True,
        start_ns=1_000_000,
        end_ns=10_000_000,
        launch_ns=1_000_000,
        end_uncertainty_ns=uncertainty_ns,
        start_is_bound=is_bound,
    )
    _, rows = build_tooltip(span)
    assert dict(rows)["end"] == f"10.000 ms {said}".strip()


def test_where_the_recording_of_a_rank_ends_it_is_written_why(snapshot, timeline):
    plot = TimelinePlot(snapshot, timeline, ends={1: "step 5: never finished"})
    ends = plot.ends.data
    assert ends["text"] == ["step 5: never finished"]
    assert ends["x"] == [timeline.lanes[4].spans.ends_ns.max()]
    top, bottom = plot.layout.lane_px(4)
    assert top < ends["y"][0] < bottom


@pytest.mark.parametrize(
    ("is_incident", "begun", "said"),
    [(True, {12}, ["never finished", "ValueError"]), (True, {11}, ["ValueError"]), (False, {12}, [])],
)
def test_an_end_tells_the_step_of_the_incident_and_the_exception(is_incident, begun, said):
    ranks = {3: SimpleNamespace(failure=SimpleNamespace(type="ValueError")), 9: SimpleNamespace(failure=None)}
    verdict = SimpleNamespace(step=12, named=())
    diagnosis = SimpleNamespace(is_incident=is_incident, verdict=verdict, evidence=SimpleNamespace(ranks=ranks))
    ends = describe_ends(diagnosis, {3: frozenset(begun), 9: frozenset()})
    assert set(ends) == ({3} if said else set())
    assert all(part in ends[3] for part in said)


def test_the_end_of_a_rank_that_is_suspected_and_raised_nothing_tells_where_it_was():
    stuck = SimpleNamespace(failure=None, position=RankPosition(step=12, phase="forward"))
    verdict, ranks = SimpleNamespace(step=12, named=(9,)), {3: stuck, 9: stuck}
    diagnosis = SimpleNamespace(is_incident=True, verdict=verdict, evidence=SimpleNamespace(ranks=ranks))
    assert describe_ends(diagnosis, {3: frozenset(), 9: frozenset()}) == {9: "rank 9: in forward of step 12"}
    ends = describe_ends(diagnosis, {9: frozenset({12})})
    assert ends == {9: "step 12: never finished; rank 9: in forward"}, "the step is said once"
    stuck.position = RankPosition(step=12)
    assert describe_ends(diagnosis, {9: frozenset({12})}) == {9: "step 12: never finished"}


def test_of_steps_that_begin_close_to_each_other_the_last_has_a_label():
    steps = pd.DataFrame({"step": [9, 10, 11], "start_ns": [0, 300, 301], "end_ns": [300, 301, 900]})
    assert build_step_label_columns(steps, (-100, 1000), 1100)["label"] == ["step 9", "", "step 11"]
