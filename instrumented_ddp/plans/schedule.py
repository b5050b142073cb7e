"""Changing the bucket plan while a model trains.

Between two backward passes a reducer may take another plan: gradients stay where they are, or move to the new buckets
with their values if they are views. Nothing is communicated, so all ranks must take it at the same time. What they
have in common is how many backward passes have been reduced: a rank may run forward more often than others, but not
reduce more often.
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
    """Which plan to take when. Ranks agree on it before it is followed."""

    @property
    def is_over(self) -> bool:
        """Whether the schedule will not change the plan again."""

    def change_after(self, reductions: int) -> PlanChange | None:
        """The plan to adopt now; None to keep the current one.

        Asked at the beginning of a forward that is to be reduced, once after each reduction, on all ranks after the
        same ones. Not asked under ``join()``, so numbers may be left out.

        Args:
            reductions: how many backward passes have been reduced.
        """


class WishedSchedule(PlanSchedule, Protocol):
    """A schedule that a process was asked for, followed once all ranks have agreed on it."""

    @property
    def is_possible(self) -> bool:
        """Whether nothing prevents it so far."""

    def agree(
        self, own: BucketPlan, order: Sequence[int], group: dist.ProcessGroup, *, after: int, everybody_would: bool
    ) -> None:
        """Agree on the schedule. Called at the same time on all ranks that were asked for one.

        Args:
            own: the plan to begin with.
            order: in which gradients are expected.
            after: number of reductions after which it begins.
            everybody_would: whether all ranks were asked for the same.
        """

    def is_impossible(self, why: str) -> None:
        """Give up, and say so in the recording."""
