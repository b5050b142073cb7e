"""Changing the bucket plan while a model trains.

Between two backward passes a reducer may take another plan: gradients stay where they are, or move to the new buckets
with their values if they are views. Nothing is communicated, so all ranks must take it at the same time. What they
have in common is how many backward passes have been reduced: a rank may run forward more often than others, but not
reduce more often.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from instrumented_ddp.bucket_plan import BucketPlan


@dataclass(frozen=True, kw_only=True)
class PlanChange:
    """Another plan, and why it is taken."""

    plan: BucketPlan
    reason: str
    """For the recording, as in ``Reducer.adopt``."""


class PlanSchedule(Protocol):
    """Which plan to take when. Ranks agree on it before it is followed."""

    @property
    def is_over(self) -> bool:
        """It will not change the plan again."""

    def change_after(self, reductions: int) -> PlanChange | None:
        """The plan to take now; None to keep the one in force.

        Asked at the beginning of a forward that is to be reduced, once after each reduction, on all ranks after the
        same ones. Not asked under ``join()``, so numbers may be left out.

        Args:
            reductions: how many backward passes have been reduced.
        """
