"""Control of a reducer's bucket plans between reductions: the first plan, the rebuilt one, and those of a schedule.

As in torch, buckets are rebuilt once, after the first reduced backward, in the order in which rank 0 saw its
gradients; unless gradients may come in another order each time.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

from instrumented_ddp.bucket_plan import BucketPlan, plan_buckets
from instrumented_ddp.collective_log.purposes import Purpose, launched_for
from instrumented_ddp.plans.schedule import PlanSchedule, WishedSchedule
from instrumented_ddp.reduction.agreement import Wish, agree_on_plan, check_same_parameters
from instrumented_ddp.reduction.reducer import Reducer


class PlanController:
    """Controller of the bucket plans of one reducer.

    Args:
        reducer: the reducer that uses the plans.
        model: its number in the recording.
        limits_bytes: limits of the buckets of the rebuilt plan.
        given: the rebuilt plan, if it is known already.
        wish: requested handling of bucket plans.
        wished: the schedule for that request.
        order: see ``Strategy.order``.
    """

    def __init__(
        self,
        reducer: Reducer,
        model: int,
        *,
        limits_bytes: Sequence[int],
        given: BucketPlan | None,
        wish: Wish,
        wished: WishedSchedule | None,
        order: Callable[[Sequence[int]], Sequence[int]] | None = None,
    ) -> None:
        self._reducer = reducer
        self._purpose = Purpose(role="plan", model=model)
        self._limits_bytes = limits_bytes
        self._given = given
        self._order = order
        self._wish = wish
        self.wished = wished
        """Requested schedule, to be followed as soon as ranks agree on it."""
        self.schedule: PlanSchedule | None = None
        """Active schedule; None if there is none, or it is over."""
        self._reductions_when_asked = -1
        self.has_rebuilt = False

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
        with launched_for(self._purpose):
            group, device = reducer.averaging.group, reducer.parameters[0].device
            # Construction may have left it out (init_sync=False), and a plan is rank 0's numbers of parameters.
            is_possible = self.wished is not None and self.wished.is_possible
            wish = self._wish if is_possible else Wish.NONE
            is_same = check_same_parameters(reducer.plan.parameters, group, device, wish=wish)
            reducer.adopt(agree_on_plan(self._given or self._plan_in(order), group, device), "rebuild")
            self.begin_schedule(order, everybody_would=is_same and is_possible)
        self.has_rebuilt = True
        return True

    def begin_schedule(self, order: Sequence[int], *, everybody_would: bool) -> None:
        """Agree on the schedule of plans, on ranks that requested one, if all did. Called on all ranks.

        Args:
            order: order of the gradients, as far as it is known; rank 0's counts.
            everybody_would: whether all ranks requested the same.
        """
        if self.wished is None:
            return
        reducer = self._reducer
        with launched_for(self._purpose):
            self.wished.agree(
                reducer.plan, order, reducer.averaging.group, after=reducer.reductions, everybody_would=everybody_would
            )
        self.schedule = self.wished

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
                bucket.touch()
        if schedule.is_over:
            self.schedule = None

    def keep_plan(self, why: str) -> None:
        """Keep the active plan from now on.

        Args:
            why: reason, for the recording.
        """
        if self.wished is not None:
            self.wished.is_impossible(why)

    def forget(self) -> None:
        """Reset for another group, whose ranks have agreed on nothing yet."""
        self.has_rebuilt = False
        self.schedule = None

    def _plan_in(self, order: Sequence[int]) -> BucketPlan:
        specs = self._reducer.plan.parameters
        if os.environ.get("DDP_SET_LAST_BUCKET_CAP") != "1":
            return plan_buckets(specs, order, self._limits_bytes)
        # The small limit is for the last bucket: fill from the end.
        plan = plan_buckets(specs, order[::-1], self._limits_bytes)
        return BucketPlan(plan.parameters, plan.buckets[::-1])
