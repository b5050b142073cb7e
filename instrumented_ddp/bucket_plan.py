"""Bucket plans computed from parameter specs. Pure functions: no tensors are allocated, nothing is communicated.

A plan is the order in which every rank launches its all-reduces, so it must be the same on all ranks; ranks compare
its hash. See section 3.2.1 (gradient bucketing) of Li et al., "PyTorch Distributed: Experiences on Accelerating Data
Parallel Training", VLDB 2020.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch

from overlapscope.bucket_model.partition import NO_LIMIT as NO_LIMIT
from overlapscope.bucket_model.partition import SPARSE_KIND, fill_buckets

_Kind = tuple[torch.dtype, torch.device]
"""Dtype and device; tensors with equal ones can share a bucket."""


@dataclass(frozen=True, kw_only=True)
class ParameterSpec:
    """Properties of one parameter that all ranks must agree on."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    elements: int
    is_sparse: bool = False
    """True if its gradient is sparse. A sparse gradient is reduced alone."""
    module: str = ""
    """Class of the module that holds it, for messages."""

    @property
    def bytes(self) -> int:
        """Return the size of the gradient in bytes."""
        return self.elements * self.dtype.itemsize

    @property
    def signature(self) -> tuple[str, tuple[int, ...], str]:
        """Return the part that is compared across ranks; devices may differ."""
        return self.name, self.shape, dtype_name(self.dtype)


class Traffic(NamedTuple):
    """Operation, dtype and size of one collective of a bucket."""

    op: str
    """One of ``overlapscope.trace.schema.OPS``."""
    dtype: torch.dtype
    elements: int
    """Number of elements of the whole buffer."""


@dataclass(frozen=True)
class BucketPlan:
    """An ordered list of buckets, each an ordered list of parameter indices."""

    parameters: tuple[ParameterSpec, ...]
    buckets: tuple[tuple[int, ...], ...]

    @cached_property
    def hash(self) -> str:
        """Return the SHA-256 over names, shapes and dtypes in reduction order."""
        return hash_json([[self.parameters[index].signature for index in bucket] for bucket in self.buckets])

    def reduced(self, number: int) -> Traffic:
        """Return the traffic of a bucket's gradients."""
        bucket = [self.parameters[index] for index in self.buckets[number]]
        return Traffic("all_reduce", bucket[0].dtype, sum(parameter.elements for parameter in bucket))

    def gathered(self, number: int) -> Traffic | None:  # noqa: ARG002
        """Return the traffic of a bucket's parameters if each rank updates only its shard of them, else None."""
        return None


@dataclass(frozen=True, kw_only=True)
class ObservedPlan(BucketPlan):
    """Plan of buckets that others make, whose traffic is not always that of their parameters."""

    reduces: tuple[Traffic, ...]
    gathers: tuple[Traffic | None, ...] = ()
    """Empty if no parameters are gathered."""

    def reduced(self, number: int) -> Traffic:
        """Return the traffic of a bucket's gradients."""
        return self.reduces[number]

    def gathered(self, number: int) -> Traffic | None:
        """Return the traffic of a bucket's parameters."""
        return self.gathers[number] if self.gathers else None


def describe_parameters(
    module: torch.nn.Module, parameters: Sequence[torch.nn.Parameter], is_sparse: Sequence[bool]
) -> tuple[ParameterSpec, ...]:
    """Return the specs of some of a module's parameters, in the given order.

    Args:
        is_sparse: for each parameter, whether its gradient is sparse.
    """
    names = {parameter: name for name, parameter in module.named_parameters()}
    classes = {name: type(part).__name__ for name, part in module.named_modules()}
    return tuple(
        ParameterSpec(
            name=name,
            shape=tuple(parameter.shape),
            dtype=parameter.dtype,
            device=parameter.device,
            elements=parameter.numel(),
            is_sparse=sparse,
            module=classes.get(name.rpartition(".")[0], ""),
        )
        for name, parameter, sparse in zip(map(names.__getitem__, parameters), parameters, is_sparse, strict=True)
    )


def plan_buckets(parameters: Sequence[ParameterSpec], order: Sequence[int], limits_bytes: Sequence[int]) -> BucketPlan:
    """Fill buckets with parameters of one dtype and device, in the order in which gradients are expected.

    The rule is that of ``overlapscope.bucket_model.partition``; sparse gradients get a bucket each.

    Args:
        order: parameter indices, first gradient first.
        limits_bytes: size limits of the first bucket of each dtype and device, of the second and so on; the last limit
            applies to all further buckets.
    """
    sizes_bytes = [spec.bytes for spec in parameters]
    return BucketPlan(tuple(parameters), fill_buckets(sizes_bytes, number_kinds(parameters), order, limits_bytes))


def number_kinds(parameters: Sequence[ParameterSpec]) -> list[int]:
    """Return the kind of each parameter: equal kinds can share a bucket; sparse ones are ``SPARSE_KIND``."""
    numbers: dict[_Kind, int] = {}
    return [
        SPARSE_KIND if spec.is_sparse else numbers.setdefault((spec.dtype, spec.device), len(numbers))
        for spec in parameters
    ]


def plan_in_module_order(parameters: Sequence[ParameterSpec], limits_bytes: Sequence[int]) -> BucketPlan:
    """Return the plan of the first backward, before the gradient order is known.

    As in torch, buckets are filled in the order of the module's parameters and launched in reverse. For example,
    four float32 parameters of 2 elements (8 bytes) and a limit of 16 bytes give the buckets ``(2, 3)`` and ``(0, 1)``,
    launched in this order.
    """
    plan = plan_buckets(parameters, range(len(parameters)), limits_bytes)
    by_first_parameter = sorted(plan.buckets, key=min, reverse=True)
    return BucketPlan(plan.parameters, tuple(by_first_parameter))


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype, ``float32`` for ``torch.float32``."""
    return str(dtype).removeprefix("torch.")


def hash_json(content: object) -> str:
    """Return the SHA-256, in hex, of anything that can be serialized as JSON."""
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()
