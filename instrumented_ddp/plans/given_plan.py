"""Arguments of the wrapper about buckets: ``bucket_plan=``, a plan made elsewhere, and ``bucket_cap_mb="auto"``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from instrumented_ddp.bucket_plan import BucketPlan, ParameterSpec, dtype_name
from overlapscope.errors import OverlapScopeError
from overlapscope.model.plan_file import PlanFile, PlannedParameter, read_plan

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
