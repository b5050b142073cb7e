"""A recording arranged in lanes, and what is known about each span."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from dashboards.plots.lane_layout import layout_lanes, show_lanes
from dashboards.plots.span_details import get_span_details
from dashboards.plots.timeline_columns import build_unfinished_columns
from overlapscope.breakdown.lanes import CATEGORIES, LANE_NAMES, LaneCache, bucket_categories, colors_and_patterns
from overlapscope.trace.recording import read_trace
from overlapscope.trace.schema import Flag, Kind, pack_body
from tests.breakdown.recordings import build_timeline
from tests.simulated_job import Job
from tests.synthetic import make_rank, write_recording, write_step

US = 1_000
BEGIN = 1_000_000_000


@pytest.fixture
def trace(tmp_path):
    return read_trace(write_recording(tmp_path / "traces"))


def recorded(tmp_path, *records):
    log = make_rank(tmp_path / "traces", 0, world_size=1)
    for kind, start_us, end_us, options in records:
        uncertainty_ns = options.pop("end_uncertainty_ns", 0)
        log.append(pack_body(kind, **options), 0, BEGIN + start_us * US, BEGIN + end_us * US, uncertainty_ns)
    log.close()
    return read_trace(tmp_path / "traces")


def test_each_rank_has_the_same_lanes_in_the_same_order(trace):
    timeline = build_timeline(trace)
    assert [(lane.rank, lane.name) for lane in timeline.lanes] == [(r, name) for r in (0, 1) for name in LANE_NAMES]


def test_time_counts_from_the_earliest_moment_of_all_ranks(trace):
    timeline = build_timeline(trace)
    assert timeline.lanes[0].spans.starts_ns[0] == 0
    assert timeline.lanes[4].spans.starts_ns[0] == 50 * US
    assert timeline.length_ns == 50_050 * US


def test_a_step_lasts_from_the_first_rank_that_begins_it_to_the_last_that_ends_it(trace):
    step = build_timeline(trace).steps.iloc[1]
    assert (step["start_ns"], step["end_ns"]) == (10_000 * US, 20_050 * US)


def test_phases_are_colored_by_name_and_gradients_by_bucket(trace):
    phases, gradients = build_timeline(trace).lanes[:2]
    assert [CATEGORIES[category] for category in phases.spans.categories[:3]] == ["data_wait", "forward", "backward"]
    assert [CATEGORIES[category] for category in gradients.spans.categories[:3]] == ["bucket_0", "bucket_1", "bucket_2"]


def test_the_lane_of_buckets_holds_waits_and_copies(trace):
    buckets = build_timeline(trace).lanes[2]
    about = [get_span_details(trace, BEGIN, buckets, int(row)).what for row in buckets.spans.rows[:9]]
    assert sorted(about) == ["copy in"] * 3 + ["copy out"] * 3 + ["wait for launch"] * 3
    assert buckets.is_wait(buckets.spans.rows[:9]).sum() == 3


def test_a_collective_knows_its_bucket_parameters_times_and_bandwidth(trace):
    timeline = build_timeline(trace)
    communication = timeline.lanes[7]
    details = get_span_details(trace, timeline.begin_ns, communication, int(communication.spans.rows[4]))
    assert (details.rank, details.step, details.bucket, details.parameters) == (1, 1, 1, ("body.1.weight",))
    # All times count from when the first rank began the step, 50 µs before this one did.
    assert (details.ready_ns, details.launch_ns, details.start_ns) == (5000 * US, 5050 * US, 5050 * US)
    assert (details.end_ns, details.duration_ns, details.start_is_bound) == (6550 * US, 1500 * US, True)
    assert details.bytes == 16 * 1024**2
    assert details.arrival is not None
    assert (details.arrival.last_rank, details.arrival.wait_ns, details.arrival.transfer_ns) == (1, 0, 1500 * US)
    assert details.arrival.algbw_bytes_per_s == pytest.approx(16 * 1024**2 / 1.5e-3)
    assert details.arrival.busbw_bytes_per_s == details.arrival.algbw_bytes_per_s, "2(N-1)/N is 1 of two ranks"
    assert details.call_site == "train.py:42"


def test_a_collective_knows_whom_it_waited_for(trace):
    """Rank 1 begins each step 50 us after rank 0."""
    timeline = build_timeline(trace)
    communication = timeline.lanes[3]
    arrival = get_span_details(trace, timeline.begin_ns, communication, int(communication.spans.rows[4])).arrival
    assert arrival is not None
    assert (arrival.last_rank, arrival.wait_ns, arrival.transfer_ns) == (1, 50 * US, 1450 * US)


def test_a_collective_that_never_completed_reaches_to_the_end_of_the_recording(tmp_path):
    trace = recorded(
        tmp_path,
        (Kind.GRADIENT_READY, 0, 0, {"index": 0}),
        (Kind.LAUNCH, 10, 10, {"op": "all_reduce", "index": 2, "dtype": "float32", "elements": 4}),
        (Kind.GRADIENT_READY, 90, 90, {"index": 1}),
    )
    timeline = build_timeline(trace)
    unfinished = timeline.unfinished_of(0).to_dict("records")
    assert unfinished == [{"row": 0, "start_ns": 10 * US, "end_ns": 90 * US, "bucket": 2}]
    details = get_span_details(trace, timeline.begin_ns, timeline.lanes[3], 0)
    assert (details.end_ns, details.duration_ns, details.arrival) == (None, None, None)
    assert not details.step_is_known


def test_a_broadcast_of_buffers_belongs_to_no_bucket(tmp_path):
    buffers = {"op": "broadcast", "index": 0xFFFFFFFF, "dtype": "float32", "elements": 4}
    trace = recorded(
        tmp_path,
        (Kind.LAUNCH, 10, 10, dict(buffers)),
        (Kind.COLLECTIVE, 10, 30, {**buffers, "flags": Flag.END_IS_UPPER_BOUND, "end_uncertainty_ns": 7}),
    )
    timeline = build_timeline(trace)
    communication = timeline.lanes[3]
    assert CATEGORIES[communication.spans.categories[0]] == "no_bucket"
    details = get_span_details(trace, timeline.begin_ns, communication, 0)
    assert (details.what, details.bucket, details.parameters, details.end_uncertainty_ns) == ("broadcast", None, (), 7)


def test_a_recording_that_has_only_begun_is_an_empty_timeline(tmp_path):
    make_rank(tmp_path / "traces", 0, world_size=1).close()
    timeline = build_timeline(read_trace(tmp_path / "traces"))
    assert len(timeline.lanes) == 4
    assert timeline.steps.empty


def test_steps_of_one_rank_need_not_be_those_of_another(tmp_path):
    for rank, steps in ((0, 1), (1, 3)):
        log = make_rank(tmp_path / "traces", rank, world_size=2)
        for step in range(steps):
            write_step(log, step, BEGIN + step * 10_000 * US)
        log.close()
    assert build_timeline(read_trace(tmp_path / "traces")).steps["step"].tolist() == [0, 1, 2]


def test_only_the_ranks_asked_for_have_lanes_in_the_order_asked_for(tmp_path):
    trace = read_trace(write_recording(tmp_path / "traces", ranks=4))
    everything, some = build_timeline(trace), build_timeline(trace, ranks=[3, 1])
    assert [(lane.rank, lane.name) for lane in some.lanes] == [(r, name) for r in (3, 1) for name in LANE_NAMES]
    assert some.ranks == (3, 1)
    assert (some.begin_ns, some.length_ns) == (everything.begin_ns, everything.length_ns)
    for lane, same in zip(some.lanes, everything.lanes[12:] + everything.lanes[4:8], strict=True):
        assert lane.spans.starts_ns.tolist() == same.spans.starts_ns.tolist()
        assert lane.spans.rows.tolist() == same.spans.rows.tolist()


def test_tables_need_not_be_in_the_order_of_ranks(trace):
    names = ("steps", "phases", "gradients", "copies", "collectives")
    mixed = {name: getattr(trace, name).sample(frac=1, random_state=0, ignore_index=True) for name in names}
    for lane, same in zip(build_timeline(replace(trace, **mixed)).lanes, build_timeline(trace).lanes, strict=True):
        assert lane.spans.starts_ns.tolist() == same.spans.starts_ns.tolist()
        assert lane.spans.ends_ns.tolist() == same.spans.ends_ns.tolist()


def test_lanes_are_made_once(trace):
    by_rank = LaneCache(trace)
    first, again = by_rank.timeline([0]), by_rank.timeline([1, 0])
    assert again.lanes[4:] == first.lanes[:]


def test_what_never_completed_lies_in_the_lane_of_its_rank_wherever_that_is(tmp_path):
    for rank in (0, 1):
        log = make_rank(tmp_path / "traces", rank, world_size=2)
        body = pack_body(Kind.LAUNCH, op="all_reduce", index=rank, dtype="float32", elements=4)
        log.append(body, 0, BEGIN + rank, BEGIN + rank)
        log.close()
    trace = read_trace(tmp_path / "traces")
    timeline = build_timeline(trace, ranks=[1, 0])
    for rank, row in ((1, 1), (0, 0)):
        assert timeline.unfinished_of(rank)[["row", "bucket"]].to_numpy().tolist() == [[row, rank]]
    drawn = build_unfinished_columns(show_lanes(timeline))
    for top, bottom, lane in zip(drawn["top"], drawn["bottom"], (3, 7), strict=True):
        above, below = layout_lanes(2).lane_px(lane)
        assert above <= top < bottom <= below


def test_a_step_that_a_rank_has_begun_and_not_finished_has_a_start(tmp_path):
    log = make_rank(tmp_path / "traces", 0, world_size=1)
    for kind, step, start_us, end_us in ((Kind.STEP, 0, 10, 50), (Kind.PHASE, 1, 50, 60), (Kind.PHASE, 1, 60, 70)):
        log.append(pack_body(kind), step, BEGIN + start_us * US, BEGIN + end_us * US)
    log.close()
    starts = build_timeline(read_trace(tmp_path / "traces")).step_starts(0)
    assert starts[["step", "start_ns", "is_finished"]].to_numpy().tolist() == [[0, 0, True], [1, 40 * US, False]]


def test_a_rank_without_a_common_clock_does_not_stretch_the_timeline():
    """Its clock may have begun on another day."""
    trace = Job(ranks=3, steps=4).run()
    length_ns = build_timeline(trace).length_ns
    for name in ("steps", "phases", "collectives"):
        table = getattr(trace, name)
        times = [column for column in table if column in ("start_ns", "end_ns", "launch_ns", "ready_ns")]
        table.loc[table["rank"] == 2, times] += 86_400_000_000_000
    trace.ranks.loc[2, "clock"] = "none"
    timeline = build_timeline(trace)
    assert timeline.length_ns == length_ns
    assert timeline.steps["end_ns"].max() == length_ns
    assert {lane.rank for lane in timeline.lanes} == {0, 1, 2}


def test_32_buckets_differ_by_color_or_pattern_and_what_has_none_is_plain() -> None:
    categories = bucket_categories(np.arange(-1, 33))
    color, pattern = colors_and_patterns(categories)
    looks = list(zip([CATEGORIES[place] for place in color], pattern.tolist(), strict=True))
    assert looks[0] == ("no_bucket", 0)
    assert looks[1:4] == [("bucket_0", 0), ("bucket_1", 0), ("bucket_2", 0)]
    assert looks[9] == ("bucket_0", 1)
    assert looks[31] == ("bucket_6", 3)
    assert len(set(looks[1:33])) == 32
    assert looks[33] == looks[1]
