"""The plan of the first backward, and the bucket size limits from which the next one is made."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist

from instrumented_ddp.bucket_plan import NO_LIMIT, BucketPlan, ParameterSpec, dtype_name, plan_in_module_order
from instrumented_ddp.reduction.agreement import agree_on_plan
from overlapscope.bucket_model.plan_file import PlanFile, PlannedParameter, read_plan
from overlapscope.errors import OverlapScopeError

# Arguments of the wrapper about buckets: ``bucket_plan=``, a plan made elsewhere, and ``bucket_cap_mb="auto"``.

AUTO: Final = "auto"
"""Value of ``bucket_cap_mb`` that selects automatic tuning."""


def is_auto(arguments: Mapping[str, Any]) -> bool:
    """Return whether bucket sizes are to be tuned while the model trains.

    Raises:
        OverlapScopeError: sizes are given as well, or ``bucket_cap_mb`` is another string.
    """
    cap_mb = arguments.get("bucket_cap_mb")
    if not isinstance(cap_mb, str):
        return False
    if cap_mb != AUTO:
        raise OverlapScopeError(f'bucket_cap_mb={cap_mb!r}: give a number of MB, None or "{AUTO}"')
    if arguments.get("bucket_cap_mb_list") is not None:
        raise OverlapScopeError(f'bucket_cap_mb="{AUTO}" and bucket_cap_mb_list both set the bucket sizes')
    return True


def reject_conflicting_caps(what: str, arguments: Mapping[str, Any]) -> None:
    """Refuse arguments that set bucket sizes in addition to another one that does, which is named ``what``.

    Raises:
        OverlapScopeError: one of them is given.
    """
    for name in ("bucket_plan", "bucket_cap_mb", "bucket_cap_mb_list"):
        if arguments.get(name) is not None:
            raise OverlapScopeError(f"{what} and {name} both set the bucket sizes; leave one of them out")


def plan_for(parameters: Sequence[ParameterSpec], plan: str | Path | PlanFile) -> BucketPlan:
    """Return a plan, from its file or already read, checked against a module's parameters.

    Args:
        parameters: parameters of the module that require a gradient, in its order.

    Raises:
        OverlapScopeError: the file can't be read, or is for another module: names the first parameter that differs.
    """
    source = "bucket_plan" if isinstance(plan, PlanFile) else str(plan)
    content = plan if isinstance(plan, PlanFile) else read_plan(Path(plan))
    try:
        buckets = content.numbered([_as_planned(parameter) for parameter in parameters])
    except OverlapScopeError as error:
        raise OverlapScopeError(f"{source}: {error}") from None
    for bucket_index, bucket in enumerate(buckets):
        _check_bucket(f"{source}: bucket {bucket_index}", [parameters[number] for number in bucket])
    return BucketPlan(tuple(parameters), buckets)


def _as_planned(parameter: ParameterSpec) -> PlannedParameter:
    return PlannedParameter(
        name=parameter.name, shape=parameter.shape, dtype=dtype_name(parameter.dtype), bytes=parameter.bytes
    )


def _check_bucket(where: str, bucket: Sequence[ParameterSpec]) -> None:
    first = bucket[0]
    for other in bucket[1:]:
        if (other.dtype, other.device) != (first.dtype, first.device) or first.is_sparse or other.is_sparse:
            raise OverlapScopeError(
                f"{where} holds {_describe(first)} and {_describe(other)}, which can't share a bucket: gradients of "
                "different dtypes or devices can't, and sparse ones are reduced alone"
            )


def _describe(parameter: ParameterSpec) -> str:
    return f"{parameter.name} ({dtype_name(parameter.dtype)}{list(parameter.shape)})"


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
