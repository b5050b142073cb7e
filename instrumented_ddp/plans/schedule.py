"""Schedules that change the bucket plan while a model trains.

Between two backward passes a reducer may switch to another plan: gradients stay where they are, or move to the new
buckets with their values if they are views. Nothing is communicated, so all ranks must switch at the same time. What
they have in common is how many backward passes have been reduced: a rank may run forward more often than others, but
not reduce more often.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch.distributed as dist

from instrumented_ddp.bucket_plan import BucketPlan


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
            everybody_would: whether all ranks requested the same.
        """

    def give_up(self, why: str) -> None:
        """Give up, and note the reason in the recording."""
