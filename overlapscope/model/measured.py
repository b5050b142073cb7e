"""What steps were measured to take, and predictions as changes of that.

The model leaves things out, so it is off where it can be compared: with the plan whose steps were measured. What it
says of another plan is taken relative to that. So the measured plan has its measured mean, and what is predicted for
another one is an account again: backward and copies change by as much as in the model, and the rest of the change is
communication that is exposed for more or less.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from overlapscope.interval import Interval
from overlapscope.model.partition import Buckets, Float64Array
from overlapscope.model.plan_table import PlanTable, table_of
from overlapscope.model.schedule import Costs, Replayed, replay
from overlapscope.model.work import Work


@dataclass(frozen=True, kw_only=True)
class Measured:
    """The mean step of the job as it is."""

    plan: Buckets
    step_ns: Interval
    exposed_ns: float
    """For how long of it communication is exposed."""
    others_ns: Mapping[Buckets, Interval] = field(default_factory=dict)
    """Mean steps with other plans."""

    def steps_ns(self, plan: Buckets) -> Interval | None:
        """The mean step with a plan; None if it was not measured."""
        return self.step_ns if plan == self.plan else self.others_ns.get(plan)


@dataclass(frozen=True, eq=False, kw_only=True)
class Predicted:
    """Mean steps of Q plans."""

    step_ns: Float64Array
    """(Q,)"""
    exposed_ns: Float64Array
    """(Q,)"""
    backward_ns: Float64Array
    """(Q,) how much longer backward takes than with the measured plan; 0 if none was measured."""
    copies_ns: Float64Array
    """(Q,) the same of copies back."""
    error: float
    """By which share of its step the model alone would be off for the measured plan; NaN if none was."""


def predict(table: PlanTable, work: Work, costs: Costs, usual: Costs, measured: Measured | None) -> Predicted:
    """Predict plans.

    Args:
        table: of Q plans.
        costs: those to predict with.
        usual: those that were measured, without other assumptions.
    """
    step_ns, exposed_ns, backward_ns = _typical(replay(table, work, costs))
    if measured is None:
        nothing = np.zeros_like(step_ns)
        return Predicted(
            step_ns=step_ns, exposed_ns=exposed_ns, backward_ns=nothing, copies_ns=nothing, error=float("nan")
        )
    now_ns, exposed_now_ns, backward_now_ns = _typical(replay(table_of([measured.plan], work.gradients), work, usual))
    factor = measured.step_ns.value / now_ns
    change_ns, backward_change_ns = (step_ns - now_ns) * factor, (backward_ns - backward_now_ns) * factor
    copies_ns, copies_now_ns = step_ns - backward_ns - exposed_ns, now_ns - backward_now_ns - exposed_now_ns
    copies_change_ns = (copies_ns - copies_now_ns) * factor
    exposed_ns = measured.exposed_ns + change_ns - backward_change_ns - copies_change_ns
    return Predicted(
        step_ns=measured.step_ns.value + change_ns,
        exposed_ns=np.maximum(exposed_ns, 0.0),
        backward_ns=backward_change_ns + np.minimum(exposed_ns, 0.0),  # no more can be exposed for less
        copies_ns=copies_change_ns,
        error=float(now_ns[0] / measured.step_ns.value - 1),
    )


def _typical(replayed: Replayed) -> tuple[Float64Array, Float64Array, Float64Array]:
    """(Q,) steps, exposed communication, and all before that."""
    exposed_ns = np.median(replayed.exposed_ns, axis=1)
    return replayed.typical_ns, exposed_ns, np.median(replayed.backward_end_ns, axis=1)
