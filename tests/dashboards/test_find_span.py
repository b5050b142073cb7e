"""What people look for by name is found: steps, buckets, parameters."""

from __future__ import annotations

from pathlib import Path

import pytest

from dashboards.plots.span_search import find_span
from overlapscope.trace.recording import read_trace
from tests.breakdown.recordings import build_timeline
from tests.synthetic import write_recording

MS = 1_000_000


def found(tmp_path: Path, text: str, from_ns: int = 0) -> tuple[int, str, int] | int | None:
    """Step, lane and start of what is found; a step alone; or None."""
    trace = read_trace(write_recording(tmp_path / "traces"))
    timeline = build_timeline(trace)
    one = find_span(trace, timeline, text, from_ns)
    if one is None or one.lane is None:
        return None if one is None else one.step
    spans = timeline.lanes[one.lane].spans
    start_ns = spans.starts_ns[spans.rows.tolist().index(one.row)]
    return one.step, timeline.lanes[one.lane].name, int(start_ns)


@pytest.mark.parametrize("text", ["3", "step 3", " Step 3 ", "STEP3"])
def test_a_number_is_a_step(tmp_path: Path, text: str) -> None:
    assert found(tmp_path, text) == 3


@pytest.mark.parametrize("text", ["bucket 1", "Bucket 1", "bucket1"])
def test_a_bucket_is_its_next_all_reduce(tmp_path: Path, text: str) -> None:
    assert found(tmp_path, text, from_ns=20 * MS) == (2, "communication", 25 * MS)


def test_after_the_last_one_the_last_is_found(tmp_path: Path) -> None:
    assert found(tmp_path, "bucket 1", from_ns=49 * MS) == (4, "communication", 45 * MS)


@pytest.mark.parametrize("text", ["body.1.weight", "BODY.1", "y.1.w"])
def test_a_parameter_is_found_by_a_part_of_its_name(tmp_path: Path, text: str) -> None:
    assert found(tmp_path, text, from_ns=20 * MS) == (2, "gradients", 24_950_000)


@pytest.mark.parametrize("text", ["", "  ", "99", "bucket 9", "nothing like it", "(", "bucket -1"])
def test_what_is_not_there_is_not_found(tmp_path: Path, text: str) -> None:
    assert found(tmp_path, text) is None
