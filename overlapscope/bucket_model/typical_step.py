"""A recorded step of typical length, to draw it beside its replay with other buckets."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from overlapscope.bucket_model.fit import FittedModel
from overlapscope.bucket_model.observation import Observations
from overlapscope.bucket_model.partition import Buckets
from overlapscope.bucket_model.schedule import DrawnStep, replay_step
from overlapscope.bucket_model.work import ComputeTimes, extract_backward

_CANDIDATES: Final = 8


@dataclass(frozen=True, eq=False, kw_only=True)
class TypicalStep:
    """A recorded step of typical length."""

    number: int
    work: ComputeTimes
    """Work of this one step, to replay it with other buckets."""
    recorded: DrawnStep


def find_typical_step(fitted: FittedModel, plan: Buckets) -> TypicalStep:
    """Find the step of typical length that the model explains best.

    The drawing of another plan then differs from the recording only by what the plan changes.

    Args:
        plan: Preferred plan of the step, if recorded.
    """
    steps = [_read_step(fitted, cycle) for cycle in _typical_cycles(fitted.observations, plan)]

    def error_ns(step: TypicalStep) -> float:
        return abs(replay_step(step.recorded.plan, step.work, fitted.costs).cycle_ns - step.recorded.cycle_ns)

    return min(steps, key=error_ns)


def _read_step(fitted: FittedModel, cycle: int) -> TypicalStep:
    only = fitted.observations.select_cycles(np.arange(len(fitted.observations.steps)) == cycle)
    work = extract_backward(only, fitted.costs.copy_in).without_slowdown(fitted.costs.compute_slowdown)
    return TypicalStep(
        number=int(only.steps[0]),
        work=work.delayed_by(fitted.copy_overhead_ns),
        recorded=_recorded_step(only, fitted),
    )


def _typical_cycles(observations: Observations, plan: Buckets) -> list[int]:
    """Find the cycles closest to the median length, among those with that plan or otherwise the most frequent one."""
    settled = observations.plan == observations.previous_plan
    wanted = [number for number, each in enumerate(observations.plans) if each == plan]
    frequent = int(np.argmax(np.bincount(observations.plan)))
    candidates = [
        np.flatnonzero(with_plan & which)
        for with_plan in (np.isin(observations.plan, wanted), observations.plan == frequent)
        for which in (settled, np.ones_like(settled))
    ]
    cycles = next(found for found in candidates if len(found))
    cycle_ns = np.median(observations.cycle_ns[cycles], axis=1)
    by_distance = np.argsort(np.abs(cycle_ns - np.median(cycle_ns)), kind="stable")
    return [int(cycle) for cycle in cycles[by_distance[:_CANDIDATES]]]


def _recorded_step(only: Observations, fitted: FittedModel) -> DrawnStep:
    """Convert observations of a single cycle to a step."""
    shift_ns = fitted.copy_overhead_ns - only.copies_out_ns[0]
    collectives, plan = only.collectives, only.plans[int(only.plan[0])]
    end_ns = collectives.end_ns.T
    arrival_ns = end_ns - collectives.transfer_ns
    start_ns = arrival_ns.copy()
    lanes = fitted.costs.lanes
    for index in range(lanes, end_ns.shape[1]):
        lane_free_ns = np.sort(end_ns[:, :index], axis=1)[:, -lanes]
        start_ns[:, index] = np.minimum(np.maximum(arrival_ns[:, index], lane_free_ns), end_ns[:, index])
    backward_start_ns = only.backward_start_ns[0]
    numbers = collectives.bucket.tolist()
    ready_ns = np.array([np.nanmax(only.ready_ns[0][:, list(plan[bucket])], axis=1) for bucket in numbers]).T
    return DrawnStep(
        plan=tuple(plan[bucket] for bucket in numbers),
        ranks=only.ranks,
        bytes=collectives.bytes,
        backward_start_ns=backward_start_ns + shift_ns,
        backward_end_ns=backward_start_ns + only.backward_end_ns[0] + shift_ns,
        ready_ns=ready_ns + (backward_start_ns + shift_ns)[:, None],
        launch_ns=collectives.launch_ns.T + shift_ns[:, None],
        start_ns=start_ns + shift_ns[:, None],
        end_ns=end_ns + shift_ns[:, None],
        cycle_ns=float(np.median(only.cycle_ns[0])),
    )
