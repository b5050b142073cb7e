"""A typical step of some ranks, as recorded and as predicted with other buckets, on one time axis."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from overlapscope.bucket_model.fit import FittedModel
from overlapscope.bucket_model.observation import Observations
from overlapscope.bucket_model.partition import Buckets, Float64Array, Int64Array
from overlapscope.bucket_model.schedule import Costs, replay_step
from overlapscope.bucket_model.work import ComputeTimes, extract_backward

_CANDIDATES: Final = 8


@dataclass(frozen=True, eq=False, kw_only=True)
class DrawnStep:
    """One step of R ranks with B buckets; times are relative to the end of the previous step's averaging."""

    plan: Buckets
    ranks: Int64Array
    """(R,) rank numbers."""
    bytes: Int64Array
    """(B,) bytes of each bucket."""
    backward_start_ns: Float64Array
    """(R,) start of backward."""
    backward_end_ns: Float64Array
    """(R,) end of backward."""
    ready_ns: Float64Array
    """(R, B) time at which a bucket's last gradient is ready."""
    launch_ns: Float64Array
    """(R, B) launch of each bucket."""
    start_ns: Float64Array
    """(R, B) start of each transfer, once all ranks have launched it and a lane is free."""
    end_ns: Float64Array
    """(R, B) end of each all-reduce."""
    cycle_ns: float

    @property
    def exposed_ns(self) -> Float64Array:
        """Return (R,) the time from the end of backward to the end of the last all-reduce."""
        return np.maximum(self.end_ns.max(axis=1) - self.backward_end_ns, 0.0)


class TypicalStep:
    """A recorded step of typical length, and its prediction with other buckets.

    Of the steps of typical length it is the one that the model explains best: the drawing of another plan then differs
    from the recording only by what the plan changes.

    Args:
        plan: Preferred plan of the step, if recorded.
    """

    def __init__(self, fitted: FittedModel, plan: Buckets) -> None:
        observations = fitted.observations
        steps = [_SingleCycle.of(fitted, cycle) for cycle in _typical_cycles(observations, plan)]
        step = min(steps, key=lambda each: each.error_ns(fitted))
        self.number = int(step.observations.steps[0])
        self._work = step.work
        self._ranks = observations.ranks
        self.recorded = _recorded_step(step.observations, fitted)

    def predict_with_buckets(self, plan: Buckets, costs: Costs) -> DrawnStep:
        """Predict the same step with other buckets."""
        predicted = replay_step(plan, self._work, costs)
        shape = predicted.ready_ns.shape
        gradients = self._work.gradients
        return DrawnStep(
            plan=plan,
            ranks=self._ranks,
            bytes=np.array([gradients.bytes[list(bucket)].sum() for bucket in plan]),
            backward_start_ns=predicted.backward_start_ns,
            backward_end_ns=predicted.backward_end_ns,
            ready_ns=predicted.ready_ns,
            launch_ns=predicted.launch_ns,
            start_ns=np.broadcast_to(predicted.start_ns, shape),
            end_ns=np.broadcast_to(predicted.end_ns, shape),
            cycle_ns=predicted.cycle_ns,
        )


@dataclass(frozen=True, eq=False)
class _SingleCycle:
    """Observations and work of a single cycle."""

    observations: Observations
    work: ComputeTimes

    @classmethod
    def of(cls, fitted: FittedModel, cycle: int) -> _SingleCycle:
        only = fitted.observations.select_cycles(np.arange(len(fitted.observations.steps)) == cycle)
        backward = extract_backward(only, fitted.costs.copy_in)
        return cls(only, backward.without_slowdown(fitted.costs.compute_slowdown).delayed_by(fitted.copy_overhead_ns))

    def error_ns(self, fitted: FittedModel) -> float:
        plan = self.observations.plans[int(self.observations.plan[0])]
        predicted_ns = replay_step(plan, self.work, fitted.costs).cycle_ns
        return abs(predicted_ns - float(np.median(self.observations.cycle_ns[0])))


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
