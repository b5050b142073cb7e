"""The bucket plan file: ``DistributedDataParallel(bucket_plan="plan.json")`` reads what a search has written.

Parameters are named, not numbered, and stored with their shapes and dtypes, so that a plan for another model is
recognized.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

from overlapscope.bucket_model.partition import Buckets
from overlapscope.errors import OverlapScopeError
from overlapscope.trace.json_files import from_dict, parse_json_text, replace_text
from overlapscope.trace.regular_file import read_regular_file

_FORMAT: Final = "overlapscope bucket plan"
_VERSION: Final = 1


@dataclass(frozen=True, kw_only=True)
class PlannedParameter:
    """One parameter of the model that a plan is for."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    """Name of the dtype, such as ``float32``."""
    bytes: int
    """Bytes of the parameter's gradient."""


@dataclass(frozen=True, kw_only=True)
class PlanFile:
    """Content of a bucket plan file."""

    parameters: tuple[PlannedParameter, ...]
    buckets: tuple[tuple[str, ...], ...]
    """Parameter names, buckets in the order of launch, parameters in the order of gradients."""
    bucket_cap_mb_list: tuple[float, ...] | None = None
    """The same plan for torch's own DDP, if ``bucket_cap_mb_list`` can express it."""
    predicted: dict[str, Any] = field(default_factory=dict)
    """Predictions for the plan, for readers of the file."""

    def numbered(self, parameters: Sequence[PlannedParameter]) -> Buckets:
        """Translate the plan to parameter indices of a model.

        Raises:
            OverlapScopeError: The plan is for another model.
        """
        planned = {parameter.name: parameter for parameter in self.parameters}
        numbers = {parameter.name: number for number, parameter in enumerate(parameters)}
        for parameter in parameters:
            other = planned.get(parameter.name)
            if other is None:
                raise OverlapScopeError(f"the bucket plan lacks {parameter.name}: make a plan for this model")
            if (other.shape, other.dtype) != (parameter.shape, parameter.dtype):
                raise OverlapScopeError(
                    f"the bucket plan is for {parameter.name} of {_describe_shape(other)}, but here it is "
                    f"{_describe_shape(parameter)}: make a plan for this model"
                )
        if unknown := next((name for name in planned if name not in numbers), None):
            raise OverlapScopeError(
                f"the bucket plan has {unknown}, which is not trained here: make a plan for this model"
            )
        return tuple(tuple(numbers[name] for name in bucket) for bucket in self.buckets)


def write_plan(path: Path, plan: PlanFile) -> None:
    """Write a plan atomically: a reader sees the old file or the new one.

    Raises:
        OverlapScopeError: The file can't be written.
    """
    content = {"format": _FORMAT, "version": _VERSION}
    content |= {name: value for name, value in asdict(plan).items() if value}
    try:
        replace_text(path, json.dumps(content, indent=1) + "\n")
    except OSError as error:
        raise OverlapScopeError(f"{path}: can't write the bucket plan: {error.strerror}") from None


def read_plan(path: Path) -> PlanFile:
    """Read a plan.

    Raises:
        OverlapScopeError: The file does not exist or is damaged.
    """
    try:
        content = parse_json_text(read_regular_file(path))
    except OSError as error:
        raise OverlapScopeError(f"{path}: can't read the bucket plan: {error.strerror}") from None
    except ValueError as error:
        raise OverlapScopeError(f"{path}: not a bucket plan: {error}") from None
    if not isinstance(content, dict) or content.get("format") != _FORMAT:
        raise OverlapScopeError(f"{path}: not a bucket plan: write one with overlapscope recommend")
    if content.get("version") != _VERSION:
        raise OverlapScopeError(
            f"{path}: version {content.get('version')!r} of the bucket plan is unknown here, only {_VERSION} is "
            f"known: write it again with this version of overlapscope"
        )
    try:
        plan = from_dict(PlanFile, content)
        _check(path, plan)
    except (AttributeError, TypeError, ValueError):
        raise OverlapScopeError(f"{path}: damaged bucket plan: write it again") from None
    return plan


def _check(path: Path, plan: PlanFile) -> None:
    """Check that each parameter is in exactly one bucket, with others of its dtype."""
    dtypes = {parameter.name: parameter.dtype for parameter in plan.parameters}
    bucket_of: dict[str, int] = {}
    for number, bucket in enumerate(plan.buckets):
        if not bucket:
            raise OverlapScopeError(f"{path}: bucket {number} of the plan is empty: leave it out")
        for name in bucket:
            if name not in dtypes:
                raise OverlapScopeError(f"{path}: bucket {number} has {name}, which the plan's parameters lack")
            if name in bucket_of:
                raise OverlapScopeError(
                    f"{path}: {name} is in bucket {bucket_of[name]} and in bucket {number}: it can only be in one"
                )
            if dtypes[name] != dtypes[bucket[0]]:
                raise OverlapScopeError(
                    f"{path}: bucket {number} mixes {bucket[0]} ({dtypes[bucket[0]]}) and {name} ({dtypes[name]}): "
                    "give each type buckets of its own"
                )
            bucket_of[name] = number
    if missing := next((name for name in dtypes if name not in bucket_of), None):
        raise OverlapScopeError(f"{path}: {missing} is in no bucket of the plan: add it to one")


def _describe_shape(parameter: PlannedParameter) -> str:
    return f"{'×'.join(str(length) for length in parameter.shape) or 'scalar'} {parameter.dtype}"
