"""Changing the bucket plan while a model trains.

Between two backward passes a reducer may take another plan: gradients stay where they are, or move to the new buckets
with their values if they are views. Nothing is communicated, so all ranks must take it at the same time. What they
have in common is how many backward passes have been reduced: a rank may run forward more often than others, but not
reduce more often.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Protocol

import torch.distributed as dist

from instrumented_ddp.bucket_plan import BucketPlan


class Wish(IntEnum):
    """What a process was asked to do with its bucket plans. It is done if all ranks were asked for the same."""

    NONE = 0
    PROBE = 1
    """``record --probe-buckets``"""
    AUTO = 2
    """``bucket_cap_mb="auto"``"""


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


class WishedSchedule(PlanSchedule, Protocol):
    """One that a process was asked for. It is followed once all ranks have agreed on it."""

    @property
    def is_possible(self) -> bool:
        """Nothing is in its way yet."""

    def agree(
        self, own: BucketPlan, order: Sequence[int], group: dist.ProcessGroup, *, after: int, everybody_would: bool
    ) -> None:
        """Agree on it. Called at the same time on all ranks that were asked for one.

        Args:
            own: the plan to begin with.
            order: in which gradients are expected.
            after: so many reductions.
            everybody_would: whether all ranks were asked for the same.
        """

    def is_impossible(self, why: str) -> None:
        """Leave it, and say so in the recording."""
