"""Names by which addresses know spans."""

from __future__ import annotations

from pathlib import Path

import pytest

from dashboards.plots.span_search import find_span_by_name, make_span_name
from overlapscope.trace.recording import read_trace
from tests.breakdown.recordings import build_timeline
from tests.synthetic import write_recording


def test_every_span_has_a_name_of_its_own_by_which_it_is_found(tmp_path: Path) -> None:
    trace = read_trace(write_recording(tmp_path / "traces", steps=3))
    timeline = build_timeline(trace)
    spans = [(number, int(row)) for number, lane in enumerate(timeline.lanes) for row in lane.spans.rows]
    names = [make_span_name(trace, timeline, *span) for span in spans]
    assert len(set(names)) == len(spans) == 2 * 3 * 20
    assert [find_span_by_name(trace, timeline, name) for name in names] == spans


def test_a_name_means_the_same_among_other_ranks_and_after_more_steps(tmp_path: Path) -> None:
    short, long = (read_trace(write_recording(tmp_path / f"{steps}", steps=steps)) for steps in (3, 6))
    before, after = build_timeline(short), build_timeline(long, [1])
    name = make_span_name(short, before, 7, int(before.lanes[7].spans.rows[4]))
    found = find_span_by_name(long, after, name)
    assert found is not None
    lane, row = found
    index = after.lanes[lane].spans.rows.tolist().index(row)
    assert after.lanes[lane].spans.starts_ns[index] == before.lanes[7].spans.starts_ns[4]


@pytest.mark.parametrize(
    "name", ["", "0-communication-99-0", "0-communication-1-99", "7-phases-1-0", "0-lunch-1-0", "0"]
)
def test_what_names_nothing_is_nothing(tmp_path: Path, name: str) -> None:
    trace = read_trace(write_recording(tmp_path / "traces"))
    assert find_span_by_name(trace, build_timeline(trace), name) is None
