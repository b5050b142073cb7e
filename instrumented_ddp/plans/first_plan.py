"""The plan of the first backward, and the bucket size limits from which the next one is made."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from instrumented_ddp.bucket_plan import NO_LIMIT, BucketPlan, ParameterSpec, plan_in_module_order
from instrumented_ddp.plans.given_plan import plan_for
from instrumented_ddp.reduction.agreement import agree_on_plan
from overlapscope.errors import OverlapScopeError
from overlapscope.model.plan_file import PlanFile


@dataclass(frozen=True, kw_only=True)
class Caps:
    """Bucket size limits, as given to torch's wrapper.

    Args:
        cap_bytes: ``bucket_cap_mb``, or its default.
        is_default: True if ``bucket_cap_mb`` was not given.
        listed_bytes: ``bucket_cap_mb_list`` (torch 2.13): one limit for each bucket; empty if it was not given.
    """

    cap_bytes: int
    is_default: bool
    listed_bytes: tuple[int, ...]

    @property
    def rebuilt_bytes(self) -> list[int]:
        """Return the limits of buckets that follow the order of the gradients. The default has a small first one."""
        if self.listed_bytes:
            return list(self.listed_bytes)
        if not self.is_default:
            return [self.cap_bytes]
        return [dist._DEFAULT_FIRST_BUCKET_BYTES, self.cap_bytes]  # type: ignore[attr-defined]

    def first_bytes(self, *, is_final: bool) -> list[int]:
        """Return the limits of the first plan's buckets.

        Until the order of the gradients is known there is one bucket, unless it will never be known. Otherwise a user's
        own collective in the backward graph would meet our buckets in an order that differs between ranks.

        Args:
            is_final: buckets are never rebuilt.
        """
        return self.rebuilt_bytes if self.listed_bytes or is_final else [NO_LIMIT]


def first_plan(
    specs: Sequence[ParameterSpec],
    caps: Caps,
    given: str | Path | PlanFile | None,
    known: BucketPlan | None = None,
    *,
    buckets: tuple[tuple[int, ...], ...] | None = None,
    is_final: bool,
    has_to_agree: bool,
    group: dist.ProcessGroup,
    device: torch.device,
) -> tuple[BucketPlan, BucketPlan | None]:
    """Return the plan of the first backward, which is rank 0's on all ranks.

    Args:
        given: plan that replaces the limits, from the second plan on, or at once if the first is final.
        known: plan that was given to the wrapper from which this one was unpickled.
        buckets: buckets in place of those that the limits make.
        is_final: buckets are never rebuilt.
        has_to_agree: ranks compare their plans; then this is called on all of them.

    Returns:
        The first plan, and the given one as far as this rank needs it.

    Raises:
        OverlapScopeError: the given plan can't be read, or is for another module. On all ranks, with rank 0's message.
    """
    plan, planned, why_not = plan_in_module_order(specs, caps.first_bytes(is_final=is_final)), known, ""
    if buckets is not None:
        plan = BucketPlan(tuple(specs), buckets)
    if given is not None and group.rank() == 0:
        try:
            planned = plan_for(specs, given)
        except OverlapScopeError as error:
            why_not = str(error)
    if is_final and planned is not None:
        plan = BucketPlan(tuple(specs), planned.buckets)
    if has_to_agree:
        plan = agree_on_plan(plan, group, device, why_not=why_not)
    return plan, plan if is_final and given is not None else planned
