"""Training with several bucket plans for a few steps each: ``record --plan_probe-buckets``, and the start of ``"auto"``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch.distributed as dist

from instrumented_ddp.bucket_plan import BucketPlan, number_kinds
from instrumented_ddp.plans.schedule import PlanChange
from instrumented_ddp.reduction.agreement import agree_on_numbers, agree_on_plan
from overlapscope.errors import OverlapScopeError
from overlapscope.model.partition import Gradients
from overlapscope.model.probe import plan_probe

WARM_UP_STEPS: Final = 3
"""Number of steps that are reduced with the active plan before others are run."""


@dataclass(frozen=True, kw_only=True)
class ProbedSteps:
    """Some plans, and which of them each step runs with."""

    plans: Sequence[BucketPlan]
    plan_of_step: Sequence[int]
    """Index of the plan, by step."""

    def changes(self) -> Iterator[PlanChange]:
        """Return the plan of each step."""
        for plan_index in self.plan_of_step:
            yield PlanChange(plan=self.plans[plan_index], reason="probe")


def warm_up(reductions: Callable[[], int], after: int) -> Iterator[None]:
    """Keep the active plan for the first steps.

    Args:
        reductions: returns the number of reductions so far; called at the beginning of each step.
        after: number of reductions before the first of these steps.
    """
    while reductions() < after + WARM_UP_STEPS:
        yield None


def agree_on_probe(
    own: BucketPlan, order: Sequence[int], group: dist.ProcessGroup, *, all_ranks_agree: bool
) -> ProbedSteps:
    """Broadcast rank 0's probe to all ranks. Called on all ranks.

    Args:
        own: the active plan.
        order: order in which gradients are expected.
        group: the ranks that reduce.
        everybody_would: whether all of them requested it.

    Raises:
        OverlapScopeError: on every rank, with the reason why nothing can be probed.
    """
    if not all_ranks_agree:
        raise OverlapScopeError("not all ranks were asked to, or ranks don't synchronise (init_sync=False)")
    if group.size() == 1:
        raise OverlapScopeError("all-reduce needs at least 2 ranks")
    device = own.parameters[0].device
    plans, plan_of_step, why_not = [own], [0], ""
    if group.rank() == 0:
        try:
            proposed = plan_probe(gradients_of(own, order))
            plan_of_step = proposed.plan_of_step.tolist()
            plans = [BucketPlan(own.parameters, buckets) for buckets in proposed.plans]
        except Exception as error:  # the others wait for an answer
            why_not = f"choosing bucket plans to measure failed on rank 0 ({type(error).__name__}: {error})"
    plan_of_step = agree_on_numbers(plan_of_step, group, device)
    if group.rank() != 0:
        plans = [own] * (max(plan_of_step) + 1)
    plans = [agree_on_plan(plan, group, device, why_not=why_not) for plan in plans]
    if len(plans) == 1:
        raise OverlapScopeError("the model is so small that every bucket size gives the same plan")
    return ProbedSteps(plans=plans, plan_of_step=plan_of_step)


def gradients_of(plan: BucketPlan, order: Sequence[int]) -> Gradients:
    """Convert a plan's parameters to the input of ``overlapscope.model``.

    Args:
        order: order of the gradients, as far as it is known.
    """
    parameters = plan.parameters
    known = set(order)
    rest = [index for index in range(len(parameters)) if index not in known]
    return Gradients(
        names=tuple(spec.name for spec in parameters),
        bytes=np.array([spec.bytes for spec in parameters], np.int64),
        kinds=np.array(number_kinds(parameters), np.int64),
        order=np.array([*order, *rest], np.int64),
    )
