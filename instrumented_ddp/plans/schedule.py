"""Schedules that change the bucket plan while a model trains.

Between two backward passes a reducer may switch to another plan: gradients stay where they are, or move to the new
buckets with their values if they are views. Nothing is communicated, so all ranks must switch at the same time. What
they have in common is how many backward passes have been reduced: a rank may run forward more often than others, but
not reduce more often.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch.distributed as dist

from instrumented_ddp.bucket_plan import BucketPlan, plan_buckets
from instrumented_ddp.collectives.roles import CollectiveRole, collective_context
from instrumented_ddp.reduction.agreement import PlanRequest, agree_on_plan, check_same_parameters
from instrumented_ddp.reduction.reducer import Reducer


@dataclass(frozen=True, kw_only=True)
class PlanChange:
    """A new plan, and why it is adopted."""

    plan: BucketPlan
    reason: str
    """Reason for the recording, as in ``Reducer.adopt``."""


class PlanSchedule(Protocol):
    """A schedule of bucket plans. Ranks agree on it before it is followed."""

    @property
    def is_over(self) -> bool:
        """Return whether the schedule will not change the plan again."""

    def change_after(self, reductions: int) -> PlanChange | None:
        """Return the plan to adopt now; None to keep the current one.

        Called at the beginning of a forward that is to be reduced, once after each reduction, on all ranks after the
        same ones. Not called under ``join()``, so numbers may be left out.

        Args:
            reductions: number of backward passes reduced so far.
        """


class RequestedSchedule(PlanSchedule, Protocol):
    """A schedule that was requested on a process, and is followed once all ranks have agreed on it."""

    @property
    def is_possible(self) -> bool:
        """Return whether nothing prevents it so far."""

    def agree(
        self, own: BucketPlan, order: Sequence[int], group: dist.ProcessGroup, *, after: int, all_ranks_agree: bool
    ) -> None:
        """Agree on the schedule. Called at the same time on all ranks that requested one.

        Args:
            own: the plan to begin with.
            order: order in which gradients are expected.
            after: number of reductions after which it begins.
            all_ranks_agree: whether all ranks requested the same.
        """

    def give_up(self, why: str) -> None:
        """Give up, and note the reason in the recording."""


# Control of a reducer's bucket plans between reductions: the first plan, the rebuilt one, and those of a schedule.
#
# As in torch, buckets are rebuilt once, after the first reduced backward, in the order in which rank 0 saw its
# gradients; unless gradients may come in another order each time.


class PlanController:
    """Controller of the bucket plans of one reducer.

    Args:
        reducer: the reducer that uses the plans.
        model: its number in the recording.
        limits_bytes: limits of the buckets of the rebuilt plan.
        given: the rebuilt plan, if it is known already.
        plan_request: requested handling of bucket plans.
        requested_schedule: the schedule for that request.
        order: see ``Strategy.order``.
        has_rebuilt: True if the first plan has to stay, as parameters are stored as it lays them out.
    """

    def __init__(
        self,
        reducer: Reducer,
        model: int,
        *,
        limits_bytes: Sequence[int],
        given: BucketPlan | None,
        plan_request: PlanRequest,
        requested_schedule: RequestedSchedule | None,
        order: Callable[[Sequence[int]], Sequence[int]] | None = None,
        has_rebuilt: bool = False,
    ) -> None:
        self._reducer = reducer
        self._purpose = CollectiveRole(role="plan", model=model)
        self._limits_bytes = limits_bytes
        self._given = given
        self._order = order
        self._plan_request = plan_request
        self.requested_schedule = requested_schedule
        """Requested schedule, to be followed as soon as ranks agree on it."""
        self.schedule: PlanSchedule | None = None
        """Active schedule; None if there is none, or it is over."""
        self._reductions_when_asked = -1
        self.has_rebuilt = has_rebuilt

    @property
    def should_rebuild(self) -> bool:
        """Return whether buckets are still to be rebuilt."""
        return not self.has_rebuilt and not self._reducer.order_may_change

    def rebuild(self) -> bool:
        """Rebuild the buckets, if it is time. Called at the beginning of each forward, on all ranks.

        Returns:
            True if they were rebuilt.

        Raises:
            RuntimeError: the previous backward was not completed.
        """
        reducer = self._reducer
        reducer.ensure_prior_reduction_finished()
        order = reducer.observed_order
        if not self.should_rebuild or not order:
            return False
        if self._order is not None:
            order = list(self._order(order))
        with collective_context(self._purpose):
            group, device = reducer.averaging.group, reducer.parameters[0].device
            # Construction may have left it out (init_sync=False), and a plan is rank 0's numbers of parameters.
            is_possible = self.requested_schedule is not None and self.requested_schedule.is_possible
            plan_request = self._plan_request if is_possible else PlanRequest.NONE
            is_same = check_same_parameters(reducer.plan.parameters, group, device, plan_request=plan_request)
            reducer.adopt(agree_on_plan(self._given or self._plan_in_order(order), group, device), "rebuild")
            self.begin_schedule(order, all_ranks_agree=is_same and is_possible)
        self.has_rebuilt = True
        return True

    def begin_schedule(self, order: Sequence[int], *, all_ranks_agree: bool) -> None:
        """Agree on the schedule of plans, on ranks that requested one, if all did. Called on all ranks.

        Args:
            order: order of the gradients, as far as it is known; rank 0's counts.
            all_ranks_agree: whether all ranks requested the same.
        """
        if self.requested_schedule is None:
            return
        reducer = self._reducer
        with collective_context(self._purpose):
            self.requested_schedule.agree(
                reducer.plan, order, reducer.averaging.group, after=reducer.reductions, all_ranks_agree=all_ranks_agree
            )
        self.schedule = self.requested_schedule

    def follow_schedule(self) -> None:
        """Use another plan if it is time. Called at the beginning of a forward that is to be reduced."""
        schedule, reducer = self.schedule, self._reducer
        if schedule is None or reducer.reductions == self._reductions_when_asked:
            return
        self._reductions_when_asked = reducer.reductions
        reducer.ensure_prior_reduction_finished()
        change = schedule.change_after(reducer.reductions)
        if change is not None and (change.plan.buckets, change.reason) != (reducer.plan.buckets, reducer.plan_reason):
            reducer.adopt(change.plan, change.reason)
            for bucket in reducer.buckets:
                bucket.prefault()
        if schedule.is_over:
            self.schedule = None

    def keep_plan(self, why: str) -> None:
        """Keep the active plan from now on.

        Args:
            why: reason, for the recording.
        """
        if self.requested_schedule is not None:
            self.requested_schedule.give_up(why)

    def discard(self) -> None:
        """Reset for another group, whose ranks have agreed on nothing yet."""
        self.has_rebuilt = False
        self.schedule = None

    def _plan_in_order(self, order: Sequence[int]) -> BucketPlan:
        specs = self._reducer.plan.parameters
        if os.environ.get("DDP_SET_LAST_BUCKET_CAP") != "1":
            return plan_buckets(specs, order, self._limits_bytes)
        # The small limit is for the last bucket: fill from the end.
        plan = plan_buckets(specs, order[::-1], self._limits_bytes)
        return BucketPlan(plan.parameters, plan.buckets[::-1])
