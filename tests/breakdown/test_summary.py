"""The sentence and its figures: which variant is said when, and what the figures are."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest

from overlapscope.breakdown.breakdown import compute_breakdown
from overlapscope.breakdown.summary import Limit, Summary, summarize
from overlapscope.breakdown.text import describe_summary
from tests.breakdown.recordings import Rows, recording

MS = 1_000_000


def summary(
    *,
    compute: float = 0,
    hidden: float = 0,
    exposed: float = 0,
    data_wait: float = 0,
    loop: float = 0,
    optimizer: float = 0,
    rest: float = 0,
    steps: int = 10,
    buckets: int = 2,
) -> Summary:
    """So many equal steps of one rank, in milliseconds; all-reduces end with the finalize that waits for them."""
    rows: dict[str, Rows] = {"steps": [], "phases": [], "collectives": []}
    now_ns = 0
    for step in range(steps):
        place = {"rank": 0, "step": step}
        begin_ns = now_ns
        lasting = {"data_wait": data_wait, "loop": loop, "backward": compute, "finalize": exposed}
        for phase, milliseconds in lasting.items():
            start_ns, now_ns = now_ns, now_ns + round(milliseconds * MS)
            rows["phases"].append(place | {"phase": phase, "start_ns": start_ns, "end_ns": now_ns})
        if hidden or exposed:
            launch_ns = now_ns - round((exposed + hidden) * MS)
            times = {"launch_ns": launch_ns, "ready_ns": launch_ns, "end_ns": now_ns}
            rows["collectives"] += [place | times | {"bucket": bucket, "op": "all_reduce"} for bucket in range(buckets)]
        start_ns, now_ns = now_ns, now_ns + round(optimizer * MS)
        rows["phases"].append(place | {"phase": "optimizer", "start_ns": start_ns, "end_ns": now_ns})
        now_ns += round(rest * MS)
        rows["steps"].append(place | {"start_ns": begin_ns, "end_ns": now_ns})
    trace = recording(**rows, ranks=1)
    return summarize(trace, compute_breakdown(trace))


CASES: dict[str, tuple[dict[str, float], Limit]] = {
    "not recorded": ({"steps": 0}, "not recorded"),
    "no communication": ({"compute": 44, "rest": 4}, "no communication"),
    "some exposed": ({"compute": 44, "hidden": 8, "exposed": 3.1, "rest": 0.9}, "exposed"),
    "little exposed": ({"compute": 49, "rest": 0.97, "hidden": 9.97, "exposed": 0.03}, "nothing"),
    "bound by communication": ({"compute": 20, "hidden": 10, "exposed": 40}, "communication"),
    "one bucket": ({"compute": 44, "exposed": 6, "buckets": 1}, "exposed"),
    "one bucket, bound by communication": ({"compute": 20, "exposed": 40, "buckets": 1}, "communication"),
    "large optimizer": ({"compute": 40, "hidden": 5, "exposed": 5, "optimizer": 15}, "exposed"),
    "data": ({"compute": 40, "data_wait": 55, "hidden": 5, "exposed": 5}, "data wait"),
    "training loop": ({"compute": 40, "loop": 55, "hidden": 5, "exposed": 5}, "host loop"),
    "data and yet more communication": (
        {"compute": 40, "data_wait": 25, "hidden": 20, "exposed": 30, "rest": 5},
        "communication",
    ),
}


def test_the_means_are_those_of_the_steps() -> None:
    found = summary(compute=44, hidden=8, exposed=3.1, rest=0.9)
    assert (found.mean.step.value, found.mean.blocks["exposed"].value) == (48 * MS, 3_100_000)
    assert found.overlap_ratio == pytest.approx(8 / 11.1)
    assert found.share_of(found.mean.blocks["exposed"]) == pytest.approx(3.1 / 48)


@pytest.mark.parametrize("case", CASES)
def test_what_the_step_time_is_lost_to(case: str) -> None:
    milliseconds, limit = CASES[case]
    assert summary(**milliseconds).limit == limit  # type: ignore[arg-type]


def test_each_case_has_its_own_sentence(golden: Callable[[str, str], None]) -> None:
    said = {case: describe_summary(summary(**milliseconds)) for case, (milliseconds, _) in CASES.items()}  # type: ignore[arg-type]
    begun = replace(summary(steps=0), has_steps=True)
    for is_over, limit in ((False, "no step"), (True, "no step ended")):
        assert replace(begun, is_over=is_over).limit == limit
        said[limit] = describe_summary(replace(begun, is_over=is_over))
    said["later rank"] = describe_summary(with_a_later_rank())
    golden("sentences/breakdown", "\n".join(f"{case}: {sentence}" for case, sentence in said.items()))


def with_a_later_rank() -> Summary:
    phases: Rows = [
        {"rank": 0, "phase": "backward", "start_ns": 0, "end_ns": 20 * MS},
        {"rank": 0, "phase": "finalize", "start_ns": 20 * MS, "end_ns": 80 * MS},
        {"rank": 1, "phase": "backward", "start_ns": 0, "end_ns": 70 * MS},
        {"rank": 1, "phase": "finalize", "start_ns": 70 * MS, "end_ns": 80 * MS},
    ]
    collectives: Rows = [{"rank": rank, "launch_ns": (20, 70)[rank] * MS, "end_ns": 80 * MS} for rank in range(2)]
    steps: Rows = [{"rank": rank, "end_ns": 100 * MS} for rank in range(2)]
    trace = recording(steps=steps, phases=phases, collectives=collectives)
    return summarize(trace, compute_breakdown(trace))


def test_communication_that_waits_for_a_later_rank_is_not_called_long() -> None:
    found = with_a_later_rank()
    assert (found.limit, found.waits_for_stragglers) == ("exposed", True)
    assert {reason: mean.value for reason, mean in found.exposed_for.items() if mean.value} == {
        "straggler": 25 * MS,
        "transfer": 10 * MS,
    }


def test_without_a_finished_step_there_are_no_means() -> None:
    found = summary(steps=0)
    assert found.limit == "not recorded", "there is not even a phase"
    assert (found.ranks, found.steps) == (0, 0)
    assert math.isnan(found.mean.step.value)
    assert math.isnan(found.overlap_ratio)
    assert found.means_by_rank().empty


@pytest.mark.parametrize("steps", [1, 2, 3, 20])
def test_everything_that_is_counted_adds_up(steps: int) -> None:
    found = summary(compute=4, data_wait=1, hidden=2, exposed=3, rest=0.5, steps=steps)
    assert sum(mean.value for mean in found.mean.blocks.values()) == pytest.approx(found.mean.step.value)
    assert sum(mean.value for mean in found.exposed_for.values()) == pytest.approx(found.mean.blocks["exposed"].value)
    assert found.job is not None
    assert sum(mean.value for mean in found.job.blocks.values()) == pytest.approx(found.mean.step.value)
    assert found.steps + sum(len(excluded.steps) for excluded in found.steady.excluded) == steps
    (row,) = found.means_by_rank().to_dict("records")
    assert row["step_time_ns"] == pytest.approx(found.mean.step.value)
    assert row["overlap_ratio"] == pytest.approx(found.overlap_ratio)


def test_a_step_that_a_rank_never_finished_is_in_no_trend_of_all_ranks() -> None:
    steps = [
        {
            "rank": rank,
            "step": step,
            "start_ns": 10 * MS * step,
            "end_ns": 10 * MS * step + (10 if step < 6 else 1) * MS,
        }
        for rank in range(2)
        for step in range(7)
        if (rank, step) != (0, 6)
    ]
    trace = recording(steps=steps, phases=[], collectives=[], ranks=2)
    found = summarize(trace, compute_breakdown(trace))
    assert set(found.figures["step"]) == set(range(7))
    assert set(found.finished_together["step"]) == set(range(6))


def test_steps_of_which_none_was_finished_by_all_ranks_are_in_trends() -> None:
    steps = [
        {"rank": rank, "step": rank, "start_ns": 10 * MS * rank, "end_ns": 10 * MS * (rank + 1)} for rank in range(2)
    ]
    trace = recording(steps=steps, phases=[], collectives=[], ranks=2)
    found = summarize(trace, compute_breakdown(trace))
    assert set(found.finished_together["step"]) == {0, 1}
