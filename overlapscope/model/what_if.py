"""What changes other than bucket sizes would give, each with the best bucket size for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from overlapscope.model.cost import Algorithm, CollectiveCost
from overlapscope.model.limits import without_time
from overlapscope.model.line import NOTHING, Line
from overlapscope.model.plan import UniformPlan
from overlapscope.model.plan_table import PlanTable, table_of
from overlapscope.model.schedule import Costs, replay
from overlapscope.model.work import Work

_NCCL: Final[tuple[Algorithm, ...]] = ("ring", "tree")
"""The algorithms of NCCL, which takes the faster one."""
_GLOO: Final[tuple[Algorithm, ...]] = ("ring",)


@dataclass(frozen=True, kw_only=True)
class WhatIf:
    """One change."""

    change: str
    step_ns: float
    """Step time with the best size for it; of a micro-step where some are not reduced."""
    gain: float
    """Gain over the best size without the change, as a share; negative if it costs."""
    cap_mb: float | None
    """None: DDP's default."""
    assumption: str
    """What was assumed; empty if nothing."""


def what_ifs_of(plans: Sequence[UniformPlan], work: Work, costs: Costs, hosts: int = 1) -> tuple[WhatIf, ...]:
    """All changes that make sense for this job.

    Args:
        plans: sizes to choose from.
        hosts: on how many the ranks run: whether all-reduces were measured within one or between several.
    """
    typical, table = work.typical(), table_of([plan.buckets for plan in plans], work.gradients)
    usual = _Best(plans, table, typical, costs)
    cost = costs.collective
    found = [
        usual.changed(
            "fp16 or bf16 compression hook",
            replace(costs, collective=of_half_the_bytes(cost)),
            "gradients are float32, and casting them takes no time",
        )
    ]
    alone_ns = float(replay(table, typical, replace(costs, collective=without_time(cost))).cycle_ns.min())
    for every in (2, 4):
        step_ns = (usual.step_ns + (every - 1) * alone_ns) / every
        found.append(
            WhatIf(
                change=f"no_sync, and a reduction every {every} micro-steps",
                step_ns=step_ns,
                gain=1 - step_ns / usual.step_ns,
                cap_mb=usual.cap_mb,
                assumption=f"a micro-step is as long as a step is now; the batch is {every} times as large",
            )
        )
    if NOTHING not in (costs.copy_in, costs.copy_out):
        found.append(
            usual.changed("gradient_as_bucket_view=True", replace(costs, copy_in=NOTHING, copy_out=NOTHING), "")
        )
    found.append(usual.changed("links of twice the bandwidth", replace(costs, collective=cost.with_bandwidth(2.0)), ""))
    links = "links like those within this host" if hosts == 1 else f"links like those between these {hosts} hosts"
    algorithms = _GLOO if costs.lanes > 1 else _NCCL
    for times in (2, 4):
        ranks = times * cost.world_size
        ways = [
            usual.changed(
                f"{ranks} ranks instead of {cost.world_size}",
                replace(costs, collective=cost.extrapolated(ranks, algorithm)),
                f"{algorithm} all-reduce over {links}, with the same work per rank",
            )
            for algorithm in algorithms
        ]
        found.append(min(ways, key=lambda way: way.step_ns))
    return tuple(found)


class _Best:
    """The best size of some."""

    def __init__(self, plans: Sequence[UniformPlan], table: PlanTable, work: Work, costs: Costs) -> None:
        self._plans, self._table, self._work = plans, table, work
        self.step_ns, self.cap_mb = self._best(costs)

    def _best(self, costs: Costs) -> tuple[float, float | None]:
        step_ns = replay(self._table, self._work, costs).cycle_ns[:, 0]
        best = int(np.argmin(step_ns))
        plan = self._plans[best]
        return float(step_ns[best]), None if plan.is_default else plan.cap_mb

    def changed(self, change: str, costs: Costs, assumption: str) -> WhatIf:
        step_ns, cap_mb = self._best(costs)
        return WhatIf(
            change=change, step_ns=step_ns, gain=1 - step_ns / self.step_ns, cap_mb=cap_mb, assumption=assumption
        )


def of_half_the_bytes(cost: CollectiveCost) -> CollectiveCost:
    """The cost of gradients that are sent in half of their bytes, as by an fp16 compression hook."""
    line = Line(alpha_ns=cost.line.alpha_ns, beta_ns=cost.line.beta_ns / 2)
    return replace(cost, sizes_bytes=2 * cost.sizes_bytes, line=line)
