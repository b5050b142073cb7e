"""What belongs to a span: the same on every rank, and all that concerns the same bucket or phase."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest

from dashboards.plots.related_spans import find_counterparts, find_related_spans, get_subject
from overlapscope.breakdown.lanes import LANE_NAMES, Lane, Timeline
from overlapscope.trace.recording import Trace, read_trace
from tests.breakdown.recordings import build_timeline
from tests.synthetic import write_recording, write_straggling_recording

US = 1_000
MS = 1_000_000


@pytest.fixture
def trace(tmp_path: Path) -> Trace:
    """Rank 1 begins each step 50 us after rank 0."""
    return read_trace(write_recording(tmp_path / "traces"))


@pytest.fixture
def timeline(trace: Trace) -> Timeline:
    return build_timeline(trace)


def span_at(timeline: Timeline, name: str, moment_us: int, rank: int = 0) -> tuple[Lane, int]:
    """The first span of a lane that begins at a moment or later."""
    lane = timeline.lanes[rank * len(LANE_NAMES) + LANE_NAMES.index(name)]
    index = int((lane.spans.starts_ns >= moment_us * US).argmax())
    return lane, int(lane.spans.rows[index])


def names_and_starts(timeline: Timeline, number: int, indices: list[int]) -> list[tuple[str, int]]:
    lane = timeline.lanes[number]
    return [(lane.name, int(lane.spans.starts_ns[index]) // US) for index in indices]


def test_a_bucket_is_its_gradients_wait_copies_and_all_reduce_in_one_step_on_all_ranks(
    trace: Trace, timeline: Timeline
) -> None:
    subject = get_subject(trace, *span_at(timeline, "communication", 25_000))
    assert (subject.step, subject.bucket, subject.phase) == (2, 1, "")
    about = {number: indices.tolist() for number, indices in find_related_spans(trace, timeline, subject).items()}
    of_rank_0 = [one for number in range(4) for one in names_and_starts(timeline, number, about.get(number, []))]
    assert sorted(of_rank_0) == [
        ("buckets", 24_950),
        ("buckets", 24_950),
        ("buckets", 28_340),
        ("communication", 25_000),
        ("gradients", 24_950),
    ]
    of_rank_1 = [one for number in range(4, 8) for one in names_and_starts(timeline, number, about.get(number, []))]
    assert sorted(of_rank_1) == sorted((name, start + 50) for name, start in of_rank_0)


@pytest.mark.parametrize("name", LANE_NAMES)
def test_whatever_span_is_chosen_it_is_among_those_that_are_about_the_same(
    trace: Trace, timeline: Timeline, name: str
) -> None:
    lane, row = span_at(timeline, name, 33_000, rank=1)
    about = find_related_spans(trace, timeline, get_subject(trace, lane, row))
    number = timeline.lanes.index(lane)
    assert row in lane.spans.rows[about[number]].tolist()


def test_a_phase_is_about_no_bucket(trace: Trace, timeline: Timeline) -> None:
    subject = get_subject(trace, *span_at(timeline, "phases", 13_000))
    assert (subject.step, subject.phase, subject.bucket) == (1, "backward", -1)
    found = {timeline.lanes[number].name for number in find_related_spans(trace, timeline, subject)}
    assert found == {"phases"}


def test_ranks_arrive_wait_for_the_last_and_end_together(tmp_path: Path) -> None:
    folder = write_straggling_recording(tmp_path / "t", late_us=lambda rank, _: 300 * (rank == 2), ranks=3, steps=4)
    trace = read_trace(folder)
    same = find_counterparts(trace, *span_at(build_timeline(trace), "communication", 11_000))
    assert same["rank"].tolist() == [0, 1, 2]
    assert same["late_ns"].tolist() == [0, 0, 300 * US]
    assert same["wait_ns"].tolist() == [300 * US, 300 * US, 0]
    assert same["transfer_ns"].tolist() == [800 * US] * 3
    assert same["end_ns"].nunique() == 1


@pytest.mark.parametrize(("name", "moment_us", "takes_us"), [("phases", 500, 2_000), ("gradients", 0, 0)])
def test_phases_and_gradients_have_no_wait(
    trace: Trace, timeline: Timeline, name: str, moment_us: int, takes_us: int
) -> None:
    same = find_counterparts(trace, *span_at(timeline, name, moment_us))
    assert same["late_ns"].tolist() == [0, 50 * US]
    assert (same["end_ns"] - same["start_ns"]).tolist() == [takes_us * US] * 2
    assert same["wait_ns"].isna().all()


def test_of_the_same_twice_in_a_step_the_second_belongs_to_the_second(trace: Trace, timeline: Timeline) -> None:
    """As with two forwards, or the micro-batches of an accumulated step."""
    is_forward = (trace.phases["phase"] == "forward") & (trace.phases["step"] == 1)
    again = trace.phases[is_forward].assign(
        start_ns=lambda t: t["start_ns"] + MS // 2, end_ns=lambda t: t["end_ns"] + MS
    )
    twice = trace.__class__(**{**vars(trace), "phases": pd.concat([trace.phases, again], ignore_index=True)})
    lanes = build_timeline(twice)
    lane = lanes.lanes[0]
    chosen = lane.spans.rows[lane.spans.rows >= len(trace.phases)][0]
    same = find_counterparts(twice, lane, int(chosen))
    assert same["start_ns"].tolist() == again.sort_values("rank")["start_ns"].tolist()
