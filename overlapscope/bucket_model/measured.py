"""Measured mean steps, and predictions expressed as changes relative to them.

The model omits some costs, so it is off where it can be compared: for the plan whose steps were measured. Predictions
for another plan are therefore relative to that one. The measured plan has its measured mean, and the prediction for
another one is a breakdown again: backward and copies change by as much as in the model, and the rest of the change is
more or less exposed communication.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from overlapscope.bucket_model.partition import Buckets, Float64Array, PlanTable, build_table
from overlapscope.bucket_model.plans import UniformPlan, default_plan, uniform_plans
from overlapscope.bucket_model.schedule import Costs, ReplayResult, replay
from overlapscope.bucket_model.work import ComputeTimes
from overlapscope.interval import Interval

# Bucket sizes that are worth predicting, and the predicted step time of each.
#
# Everything that chooses among plans begins here: the recommendation for a recording, the page of bucket sizes, and
# ``bucket_cap_mb="auto"``. The best plan of all, which need not be that of a single size, is ``search.best_plan``.

MIN_GAIN: Final = 0.01
"""Smallest share of the step that is worth a change."""

_MAX_SIZES: Final = 250
_MAX_BUCKETS: Final = 100
"""Number of buckets above which sizes are not considered: latency alone makes them slow."""


@dataclass(frozen=True, eq=False, kw_only=True)
class PredictedSizes:
    """Predicted step times of DDP's default and of Q sizes with different buckets."""

    default: UniformPlan
    default_ns: float
    sizes: tuple[UniformPlan, ...]
    """Plans of the sizes, small caps first."""
    sizes_ns: Float64Array
    """(Q,) step times of the sizes."""

    @property
    def fastest(self) -> int:
        """Return the index of the best size."""
        return int(np.argmin(self.sizes_ns))

    @property
    def best(self) -> UniformPlan:
        """Return the plan of the best size, or the default if no size is better."""
        return self.sizes[self.fastest] if self.sizes_ns[self.fastest] < self.default_ns else self.default

    @property
    def best_ns(self) -> float:
        """Return the step time of ``best``."""
        return min(float(self.sizes_ns[self.fastest]), self.default_ns)


def predict_sizes(work: ComputeTimes, costs: Costs, first_bucket_bytes: int | None = None) -> PredictedSizes:
    """Replay every size that makes a difference.

    Args:
        first_bucket_bytes: Separate limit for the first bucket of each size; DDP's default always has one.
    """
    gradients = work.gradients
    smallest = max(1, gradients.total_bytes // _MAX_BUCKETS)
    default = default_plan(gradients)
    sizes = uniform_plans(gradients, first_bucket_bytes, max_plans=_MAX_SIZES, smallest_cap_bytes=smallest)
    step_ns = replay([plan.buckets for plan in (default, *sizes)], work, costs).typical_ns
    return PredictedSizes(default=default, default_ns=float(step_ns[0]), sizes=sizes, sizes_ns=step_ns[1:])


@dataclass(frozen=True, kw_only=True)
class MeasuredSteps:
    """Measured mean step of the job as it is."""

    plan: Buckets
    step_ns: Interval
    exposed_ns: float
    """Exposed communication in that step."""
    others_ns: Mapping[Buckets, Interval] = field(default_factory=dict)
    """Measured mean steps with other plans."""

    def steps_ns(self, plan: Buckets) -> Interval | None:
        """Return the measured mean step with a plan; None if it was not measured."""
        return self.step_ns if plan == self.plan else self.others_ns.get(plan)


@dataclass(frozen=True, eq=False, kw_only=True)
class PredictedSteps:
    """Predicted mean steps of Q plans."""

    step_ns: Float64Array
    """(Q,) step times."""
    exposed_ns: Float64Array
    """(Q,) exposed communication."""
    backward_ns: Float64Array
    """(Q,) how much longer backward takes than with the measured plan; 0 if no plan was measured."""
    copies_ns: Float64Array
    """(Q,) how much longer copies out take than with the measured plan; 0 if no plan was measured."""
    error: float
    """Share of the step by which the model alone is off for the measured plan; NaN if no plan was measured."""


def predict_steps(
    table: PlanTable, work: ComputeTimes, costs: Costs, usual: Costs, measured: MeasuredSteps | None
) -> PredictedSteps:
    """Predict the mean steps of plans, relative to the measured one if there is one.

    Args:
        table: Table of Q plans.
        costs: Costs to predict with.
        usual: Fitted costs, without further assumptions.
    """
    step_ns, exposed_ns, backward_ns = _median_times(replay(table, work, costs))
    if measured is None:
        nothing = np.zeros_like(step_ns)
        return PredictedSteps(
            step_ns=step_ns, exposed_ns=exposed_ns, backward_ns=nothing, copies_ns=nothing, error=float("nan")
        )
    now_ns, exposed_now_ns, backward_now_ns = _median_times(
        replay(build_table([measured.plan], work.gradients), work, usual)
    )
    factor = measured.step_ns.value / now_ns
    change_ns, backward_change_ns = (step_ns - now_ns) * factor, (backward_ns - backward_now_ns) * factor
    copies_ns, copies_now_ns = step_ns - backward_ns - exposed_ns, now_ns - backward_now_ns - exposed_now_ns
    copies_change_ns = (copies_ns - copies_now_ns) * factor
    exposed_ns = measured.exposed_ns + change_ns - backward_change_ns - copies_change_ns
    return PredictedSteps(
        step_ns=measured.step_ns.value + change_ns,
        exposed_ns=np.maximum(exposed_ns, 0.0),
        backward_ns=backward_change_ns + np.minimum(exposed_ns, 0.0),  # exposed time can't be negative
        copies_ns=copies_change_ns,
        error=float(now_ns[0] / measured.step_ns.value - 1),
    )


def _median_times(replayed: ReplayResult) -> tuple[Float64Array, Float64Array, Float64Array]:
    """Return (Q,) step times, exposed communication, and the end of backward."""
    exposed_ns = np.median(replayed.exposed_ns, axis=1)
    return replayed.typical_ns, exposed_ns, np.median(replayed.backward_end_ns, axis=1)
