"""Predicted gains of changes other than bucket sizes, each with the best bucket size for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from overlapscope.model.cost import Algorithm, CollectiveCost
from overlapscope.model.limits import with_zero_time
from overlapscope.model.line import ZERO_COST, CostLine
from overlapscope.model.measured import MeasuredSteps, predict_steps
from overlapscope.model.partition import Float64Array
from overlapscope.model.plan import UniformPlan
from overlapscope.model.plan_table import build_table
from overlapscope.model.schedule import Costs
from overlapscope.model.work import ComputeTimes

_NCCL: Final[tuple[Algorithm, ...]] = ("ring", "tree")
"""Algorithms of NCCL, which uses the faster one."""
_GLOO: Final[tuple[Algorithm, ...]] = ("ring",)


@dataclass(frozen=True, kw_only=True)
class WhatIf:
    """Predicted effect of one change."""

    change: str
    step_ns: float
    """Mean step with the best size for the change; mean micro-step if some steps are not reduced."""
    gain: float
    """Gain over the best size without the change, as a share; negative for a loss."""
    cap_mb: float | None
    """Best size for the change; None for DDP's default."""
    assumption: str
    """Assumption behind the prediction; empty if there is none."""


def predict_changes(
    plans: Sequence[UniformPlan],
    work: ComputeTimes,
    costs: Costs,
    hosts: int = 1,
    measured: MeasuredSteps | None = None,
) -> tuple[WhatIf, ...]:
    """Predict all changes that make sense for this job.

    Args:
        plans: Sizes to choose from.
        hosts: Number of hosts that the ranks run on: were all-reduces measured within one or between several?
        measured: Measurement that predictions are relative to, if there is one.
    """
    best = _BestSize(plans, work, costs, measured)
    cost = costs.collective
    found = [
        best.changed(
            "fp16 or bf16 compression hook",
            replace(costs, collective=halve_bytes(cost)),
            "gradients are float32, and casting them takes no time",
        )
    ]
    alone_ns = best.steps_ns(replace(costs, collective=with_zero_time(cost))).min()
    for every in (2, 4):
        step_ns = float(best.step_ns + (every - 1) * alone_ns) / every
        found.append(
            WhatIf(
                change=f"no_sync, and a reduction every {every} micro-steps",
                step_ns=step_ns,
                gain=1 - step_ns / best.step_ns,
                cap_mb=best.cap_mb,
                assumption=f"a micro-step is as long as a step is now; the batch is {every} times as large",
            )
        )
    if ZERO_COST not in (costs.copy_in, costs.copy_out):
        found.append(
            best.changed("gradient_as_bucket_view=True", replace(costs, copy_in=ZERO_COST, copy_out=ZERO_COST), "")
        )
    found.append(best.changed("links of twice the bandwidth", replace(costs, collective=cost.with_bandwidth(2.0)), ""))
    links = "links like those within this host" if hosts == 1 else f"links like those between these {hosts} hosts"
    algorithms = list_algorithms(costs)
    for times in (2, 4):
        ranks = times * cost.world_size
        ways = [
            best.changed(
                f"{ranks} ranks instead of {cost.world_size}",
                replace(costs, collective=cost.extrapolate(ranks, algorithm)),
                f"{algorithm} all-reduce over {links}, with the same work per rank",
            )
            for algorithm in algorithms
        ]
        found.append(min(ways, key=lambda way: way.step_ns))
    return tuple(found)


def list_algorithms(costs: Costs) -> tuple[Algorithm, ...]:
    """Return the algorithms that the backend may use for an all-reduce; it uses the fastest."""
    return _GLOO if costs.lanes > 1 else _NCCL


class _BestSize:
    """Selection of the best size under changed costs."""

    def __init__(
        self, plans: Sequence[UniformPlan], work: ComputeTimes, costs: Costs, measured: MeasuredSteps | None
    ) -> None:
        self._plans, self._work, self._costs, self._measured = plans, work, costs, measured
        self._table = build_table([plan.buckets for plan in plans], work.gradients)
        self.step_ns, self.cap_mb = self._best(costs)

    def steps_ns(self, costs: Costs) -> Float64Array:
        """Return (Q,) the mean steps with each size."""
        return predict_steps(self._table, self._work, costs, self._costs, self._measured).step_ns

    def changed(self, change: str, costs: Costs, assumption: str) -> WhatIf:
        step_ns, cap_mb = self._best(costs)
        return WhatIf(
            change=change, step_ns=step_ns, gain=1 - step_ns / self.step_ns, cap_mb=cap_mb, assumption=assumption
        )

    def _best(self, costs: Costs) -> tuple[float, float | None]:
        steps_ns = self.steps_ns(costs)
        best = int(np.argmin(steps_ns))
        plan = self._plans[best]
        return float(steps_ns[best]), None if plan.is_default else plan.cap_mb


def halve_bytes(cost: CollectiveCost) -> CollectiveCost:
    """Return the cost of gradients that are sent in half of their bytes, as by an fp16 compression hook."""
    line = CostLine(alpha_ns=cost.line.alpha_ns, beta_ns=cost.line.beta_ns / 2)
    return replace(cost, sizes_bytes=2 * cost.sizes_bytes, line=line)
