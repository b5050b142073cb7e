"""When a bucket is where on its way through a step."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest

from dashboards.plots.related_spans import MOMENTS, Subject, compute_bucket_flow, find_related_spans
from overlapscope.trace.recording import Trace, read_trace
from tests.breakdown.recordings import build_timeline
from tests.synthetic import write_straggling_recording

US = 1_000
MS = 1_000_000


@pytest.fixture
def trace(tmp_path: Path) -> Trace:
    """Three ranks, of which rank 2 is 300 us late."""
    folder = write_straggling_recording(tmp_path / "t", late_us=lambda rank, _: 300 * (rank == 2), ranks=3, steps=3)
    return read_trace(folder)


def way(trace: Trace, ranks: tuple[int, ...], bucket: int = 1, step: int = 0) -> pd.DataFrame:
    timeline = build_timeline(trace, ranks)
    return compute_bucket_flow(
        trace, timeline, find_related_spans(trace, timeline, Subject(model=0, step=step, bucket=bucket))
    )


def times_us(flow: pd.DataFrame, rank: int) -> dict[str, float]:
    own = flow[flow["rank"] == rank]
    return dict(zip(own["moment"], own["time_ns"] / US, strict=True))


def test_a_bucket_goes_from_gradient_to_copy_and_waits_for_the_last_rank(trace: Trace) -> None:
    flow = way(trace, (2, 0))
    assert flow["rank"].drop_duplicates().tolist() == [2, 0]
    assert flow["moment"].tolist() == [*MOMENTS, *MOMENTS]
    there, ended, copied = 5_300, 6_800, 8_660
    assert times_us(flow, 0) == dict(zip(MOMENTS, (4_950, 4_950, 5_000, there, ended, copied), strict=True))
    assert times_us(flow, 2) == dict(zip(MOMENTS, (5_250, 5_250, 5_300, there, ended, copied), strict=True))


def test_each_moment_is_at_an_edge_of_its_span(trace: Trace) -> None:
    timeline = build_timeline(trace)
    flow = compute_bucket_flow(trace, timeline, find_related_spans(trace, timeline, Subject(model=0, step=1, bucket=0)))
    assert len(flow) == 3 * len(MOMENTS)
    for one in flow[flow["moment"] != "last rank there"].to_dict("records"):
        spans = timeline.lanes[one["lane"]].spans
        assert one["time_ns"] in (spans.starts_ns[one["index"]], spans.ends_ns[one["index"]])
        assert timeline.lanes[one["lane"]].rank == one["rank"]


def test_what_never_ended_has_no_end_and_nobody_knows_when_all_were_there(trace: Trace) -> None:
    is_cut = (trace.collectives["rank"] == 0) & (trace.collectives["step"] == 2) & (trace.collectives["bucket"] == 1)
    collectives = trace.collectives.assign(end_ns=trace.collectives["end_ns"].mask(is_cut))
    flow = way(replace(trace, collectives=collectives), (0,), step=2)
    assert flow["moment"].tolist() == ["gradient ready", "bucket ready", "launched"]


def test_a_bucket_reduced_twice_in_a_step_has_two_ways_with_gradients_of_their_own(trace: Trace) -> None:
    """As with gradients that are accumulated without no_sync()."""
    later = {"ready_ns": 2 * MS, "launch_ns": 2 * MS, "start_ns": 2 * MS, "end_ns": 2 * MS}

    def twice(table: pd.DataFrame) -> pd.DataFrame:
        again = table[table["step"] == 0].copy()
        for name, by_ns in later.items():
            if name in again:
                again[name] += by_ns
        return pd.concat([table, again], ignore_index=True)

    flow = way(replace(trace, collectives=twice(trace.collectives), gradients=twice(trace.gradients)), (0,))
    gradients = flow[flow["moment"] == "gradient ready"]
    assert (gradients["time_ns"] / US).tolist() == [4_950, 6_950]
    assert gradients["occurrence"].tolist() == [0, 1]
    assert (flow.loc[flow["moment"] == "last rank there", "time_ns"] / US).tolist() == [5_300, 7_300]


def test_what_is_about_no_bucket_has_no_way(trace: Trace) -> None:
    timeline = build_timeline(trace)
    phase = Subject(model=0, step=1, phase="backward")
    assert compute_bucket_flow(trace, timeline, find_related_spans(trace, timeline, phase)).empty
