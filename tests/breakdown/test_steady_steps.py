"""Which steps count for a mean, and which are kept apart and why."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from overlapscope.analysis import Analysis
from overlapscope.breakdown.breakdown import compute_breakdown
from overlapscope.breakdown.lanes import LaneCache
from overlapscope.breakdown.steady_steps import SteadySteps, select_steady_steps
from overlapscope.trace.recording import read_trace
from tests.breakdown.recordings import Rows, recording
from tests.synthetic import write_recording

STEPS = 40


def steady(step_ns: dict[int, int], *, collectives: Rows = (), ranks: int = 2, **blocks: int) -> SteadySteps:  # type: ignore[assignment]
    """Steps of 100 to 102 ns, some of another length, which is spent in the phases named."""
    steps: Rows = []
    phases: Rows = []
    for rank in range(ranks):
        now_ns = 0
        for step in range(STEPS):
            end_ns = now_ns + step_ns.get(step, 100 + step % 3)
            place: dict[str, Any] = {"rank": rank, "step": step, "start_ns": now_ns, "end_ns": end_ns}
            steps.append(place)
            if step in step_ns:
                phases += [place | {"phase": name} for name in blocks]
            now_ns = end_ns
    trace = recording(steps=steps, phases=phases, collectives=collectives, ranks=ranks)
    return select_steady_steps(trace, compute_breakdown(trace))


def reasons(found: SteadySteps) -> dict[str, tuple[int, ...]]:
    return {excluded.why: excluded.steps for excluded in found.excluded}


def test_the_first_steps_are_a_warm_up() -> None:
    found = steady({})
    assert reasons(found) == {"warm-up": (0, 1, 2)}
    assert found.steps.tolist() == list(range(3, STEPS))


def test_a_checkpoint_is_far_longer_and_it_is_said_where() -> None:
    found = steady({20: 5_000}, forward=1)
    assert reasons(found) == {"warm-up": (0, 1, 2), "slow outlier": (20,)}
    assert found.excluded[-1].block == "forward"


def test_a_step_that_leaves_out_most_is_far_shorter() -> None:
    assert reasons(steady({20: 10}))["fast outlier"] == (20,)


def test_what_happens_in_every_fifth_step_is_how_steps_are() -> None:
    assert reasons(steady(dict.fromkeys(range(4, STEPS, 5), 500))) == {"warm-up": (0, 1, 2)}


def test_evaluations_are_kept_apart_however_long_they_are() -> None:
    evaluated = dict.fromkeys(range(4, STEPS, 5), 103)
    assert reasons(steady(evaluated, evaluation=1))["evaluation"] == tuple(evaluated)


def test_a_job_that_always_evaluates_is_like_that() -> None:
    assert "evaluation" not in reasons(steady(dict.fromkeys(range(STEPS), 100), evaluation=1))


def test_steps_with_other_buckets_than_most_are_kept_apart() -> None:
    reduced = [{"rank": r, "step": s, "plan_epoch": 2 if s < 10 else 3} for r in range(2) for s in range(STEPS)]
    assert reasons(steady({}, collectives=reduced))["other buckets"] == tuple(range(3, 10))


def of_models(models: dict[int, tuple[int, ...]]) -> Rows:
    """Collectives of both ranks, by step of which models; of model 0 where nothing is said."""
    return [
        {"rank": rank, "step": step, "model": model}
        for rank in range(2)
        for step in range(STEPS)
        for model in models.get(step, (0,))
    ]


def test_of_two_models_that_take_turns_the_newer_half_is_counted() -> None:
    turns = of_models(dict.fromkeys(range(0, STEPS, 2), (0, 1)))
    assert set(reasons(steady({}, collectives=turns))) == {"warm-up", "other buckets"}


def test_plans_of_two_models_are_told_apart() -> None:
    """Whatever sums of their numbers are."""
    epochs = {20: (1, 0)}
    rows = [
        {"rank": rank, "step": step, "model": model, "plan_epoch": epochs.get(step, (0, 1))[model]}
        for rank in range(2)
        for step in range(STEPS)
        for model in (0, 1)
    ]
    assert reasons(steady({}, collectives=rows))["other buckets"] == (20,)


def test_a_model_that_is_reduced_in_few_steps_makes_these_other_ones() -> None:
    assert reasons(steady({}, collectives=of_models({20: (0, 1), 30: (1,)})))["other buckets"] == (20, 30)


def test_steps_that_a_rank_did_not_finish_are_kept_apart() -> None:
    steps = [{"rank": 0, "step": step, "start_ns": 9 * step, "end_ns": 9 * step + 9} for step in range(9)]
    steps += [{"rank": 1} | {name: step[name] for name in ("step", "start_ns", "end_ns")} for step in steps[:-1]]
    trace = recording(steps=steps)
    assert reasons(select_steady_steps(trace, compute_breakdown(trace)))["unfinished"] == (8,)


def test_steps_that_a_rank_began_and_none_finished_are_among_them() -> None:
    steps = [
        {"rank": rank, "step": step, "start_ns": 9 * step, "end_ns": 9 * step + 9}
        for rank in (0, 1)
        for step in range(9)
    ]
    begun = [
        {"rank": rank, "step": 9, "start_ns": 81, "end_ns": 83, "phase": name}
        for rank, name in ((0, "data_wait"), (1, "forward"))
    ]
    trace = recording(steps=steps, phases=begun)
    assert reasons(Analysis(trace).summary.steady)["unfinished"] == (9,)
    assert LaneCache(trace).timeline([0], is_over=True).steps.iloc[-1].tolist() == [9, 81, 83]
    for other in (replace(trace, phases=trace.phases[:1]), replace(trace, extent="chosen")):
        assert "unfinished" not in reasons(Analysis(other).summary.steady)
        assert LaneCache(other).timeline([0], is_over=True).steps["step"].max() == 8


@pytest.mark.parametrize("count", range(4))
def test_of_few_steps_more_than_half_remain(count: int) -> None:
    steps = [{"rank": 0, "step": step, "start_ns": step, "end_ns": step + 1} for step in range(count)]
    trace = recording(steps=steps, ranks=1)
    found = select_steady_steps(trace, compute_breakdown(trace))
    excluded = sum(len(each.steps) for each in found.excluded)
    assert len(found.steps) + excluded == count
    assert len(found.steps) >= excluded
    assert np.shape(found.rows) == (len(found.steps), min(count, 1))


def test_light_steps_are_kept_apart_unless_there_are_no_others(tmp_path: Path) -> None:
    trace = read_trace(write_recording(tmp_path, steps=20))
    breakdown = compute_breakdown(trace)
    is_light = trace.steps["step"] % 5 != 0
    sampled = select_steady_steps(replace(trace, steps=trace.steps.assign(is_light=is_light)), breakdown)
    assert sampled.steps.tolist() == [5, 10, 15]
    assert reasons(sampled)["light"] == tuple(step for step in range(3, 20) if step % 5)
    light = select_steady_steps(replace(trace, steps=trace.steps.assign(is_light=True)), breakdown)
    assert light.steps.tolist() == [*range(3, 20)]
