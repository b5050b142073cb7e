"""What lies within an area of the timeline: as much of a step as its breakdown has, and no moment twice."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from overlapscope.breakdown.area import find_extremes, tabulate_area
from overlapscope.breakdown.breakdown import BLOCKS, compute_breakdown, tabulate_breakdown
from overlapscope.breakdown.waits import REASONS
from overlapscope.trace.recording import Trace, read_trace
from tests.breakdown.recordings import orderly_recordings, recording, wild_recordings
from tests.synthetic import write_recording

ANY = st.one_of(wild_recordings(), orderly_recordings())
MOMENTS = st.integers(-3, 50)
TIMES = [*(f"{name}_ns" for name in BLOCKS), *(f"exposed_{name}_ns" for name in REASONS)]
TIMES += ["compute_ns", "hidden_ns", "communication_ns"]
MS = 1_000_000


@given(ANY)
def test_the_area_of_a_step_has_the_times_of_its_breakdown(trace: Trace) -> None:
    breakdown = compute_breakdown(trace)
    table = tabulate_breakdown(breakdown)
    for row, (rank, start_ns, end_ns) in enumerate(
        zip(breakdown.rank.tolist(), breakdown.start_ns.tolist(), breakdown.end_ns.tolist(), strict=True)
    ):
        of_area = tabulate_area(trace, breakdown, start_ns, end_ns, [rank])
        assert of_area[TIMES].iloc[0].to_dict() == table[TIMES].iloc[row].to_dict()


@given(ANY, st.lists(MOMENTS, min_size=3, max_size=3))
def test_two_areas_side_by_side_have_what_one_over_both_has(trace: Trace, moments: list[int]) -> None:
    from_ns, between_ns, to_ns = sorted(moments)
    breakdown, ranks = compute_breakdown(trace), sorted(trace.ranks["rank"].tolist(), reverse=True)
    left, right, both = (
        tabulate_area(trace, breakdown, first_ns, last_ns, ranks)
        for first_ns, last_ns in ((from_ns, between_ns), (between_ns, to_ns), (from_ns, to_ns))
    )
    assert both["rank"].tolist() == ranks
    assert (left[TIMES] + right[TIMES]).equals(both[TIMES])
    assert (both[[f"{name}_ns" for name in BLOCKS]].sum(axis=1) == to_ns - from_ns).all()
    assert (both[[f"exposed_{name}_ns" for name in REASONS]].sum(axis=1) == both["exposed_ns"]).all()
    assert (left["gradients"] + right["gradients"]).equals(both["gradients"])


def test_collectives_and_gradients_of_an_area_are_counted(tmp_path: Path) -> None:
    trace = read_trace(write_recording(tmp_path / "traces"))
    breakdown = compute_breakdown(trace)
    start_ns = int(trace.steps.loc[trace.steps["step"] == 1, "start_ns"].min())
    step = tabulate_area(trace, breakdown, start_ns, start_ns + 10 * MS, [1, 0])
    reduced = trace.collectives[trace.collectives["step"] == 1]
    assert step["collectives"].tolist() == [len(reduced[reduced["rank"] == rank]) for rank in (1, 0)]
    assert step["bytes"].tolist() == [reduced.loc[reduced["rank"] == rank, "bytes"].sum() for rank in (1, 0)]
    assert step["gradients"].tolist() == [3, 3]
    row = reduced[reduced["bucket"] == 1].iloc[0]
    middle_ns = (int(row["start_ns"]) + int(row["end_ns"])) // 2
    part = tabulate_area(trace, breakdown, middle_ns, middle_ns + 1, [0])
    assert (part["collectives"].tolist(), part["bytes"].tolist()) == ([1], [row["bytes"]])


def test_a_collective_that_never_ended_runs_on_and_a_rank_without_a_record_is_not_known() -> None:
    launched = {"rank": 0, "bucket": 0, "op": "all_reduce", "launch_ns": 10, "bytes": 7}
    trace = recording(steps=[{"rank": 0, "step": 0, "start_ns": 0, "end_ns": 5}], collectives=[launched])
    area = tabulate_area(trace, compute_breakdown(trace), 20, 30, [0, 1])
    assert area["collectives"].tolist() == [1, 0]
    assert area["bytes"].tolist() == [7, 0]
    assert area["unattributed_ns"].tolist() == [10, 10]


def test_the_most_the_median_and_the_least_name_their_ranks() -> None:
    assert find_extremes(np.array([5, 9, 7, 8]), [4, 5, 6, 7]) == {"most": (5, 9), "median": (6, 7), "least": (4, 5)}
    assert find_extremes(np.array([3]), [12]) == {"most": (12, 3), "median": (12, 3), "least": (12, 3)}


def test_the_wait_for_a_bucket_that_never_ends_is_exposed_communication_for_an_unknown_reason() -> None:
    trace = recording(
        steps=[{"rank": 0, "step": 0, "start_ns": 0, "end_ns": 5}],
        phases=[
            {"rank": 0, "step": 1, "phase": "backward", "start_ns": 5, "end_ns": 12},
            {"rank": 0, "step": 1, "phase": "finalize", "start_ns": 12, "end_ns": 40},
        ],
        collectives=[{"rank": 0, "step": 1, "bucket": 0, "op": "all_reduce", "launch_ns": 10}],
    )
    breakdown = compute_breakdown(trace)
    area = tabulate_area(trace, breakdown, 8, 50, [0]).iloc[0]
    assert (area["backward_ns"], area["exposed_ns"], area["unattributed_ns"]) == (4, 28, 10)
    assert area["exposed_unattributed_ns"] == 28
    assert breakdown.exposed_spans_ns(0).tolist() == [[12], [40]]
