"""Parameters -> bucket plan. Pure functions: no tensors are made, nothing is communicated.

A plan is the order in which every rank launches its all-reduces, so it must be the same on all ranks; its hash
says whether it is. See section 3.2.1 (gradient bucketing) of Li et al., "PyTorch Distributed: Experiences on
Accelerating Data Parallel Training", VLDB 2020.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch

from overlapscope.model.partition import ALONE, fill_buckets
from overlapscope.model.partition import NO_LIMIT as NO_LIMIT

_Kind = tuple[torch.dtype, torch.device]
"""Dtype and device: tensors with the same ones can share a bucket."""


@dataclass(frozen=True, kw_only=True)
class ParameterSpec:
    """What the ranks must agree on about one parameter."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    elements: int
    is_sparse: bool = False
    """Whether its gradient is sparse. Such a gradient is reduced alone."""
    module: str = ""
    """The class of the module that holds it, for messages."""

    @property
    def bytes(self) -> int:
        """Size of the gradient in bytes."""
        return self.elements * self.dtype.itemsize

    @property
    def signature(self) -> tuple[str, tuple[int, ...], str]:
        """The part that is compared across ranks; devices may differ."""
        return self.name, self.shape, dtype_name(self.dtype)


class Traffic(NamedTuple):
    """What is communicated of a bucket."""

    op: str
    """As in ``overlapscope.trace.format.OPS``."""
    dtype: torch.dtype
    elements: int
    """Of the whole buffer."""


@dataclass(frozen=True)
class BucketPlan:
    """An ordered list of buckets, each an ordered list of parameter numbers."""

    parameters: tuple[ParameterSpec, ...]
    buckets: tuple[tuple[int, ...], ...]

    @cached_property
    def hash(self) -> str:
        """SHA-256 over names, shapes and dtypes in the order in which they are reduced."""
        return fingerprint([[self.parameters[index].signature for index in bucket] for bucket in self.buckets])

    def reduced(self, number: int) -> Traffic:
        """What is communicated of a bucket's gradients."""
        bucket = [self.parameters[index] for index in self.buckets[number]]
        return Traffic("all_reduce", bucket[0].dtype, sum(parameter.elements for parameter in bucket))

    def gathered(self, number: int) -> Traffic | None:  # noqa: ARG002
        """What is communicated of its parameters, after an update that each rank makes of its shard alone."""
        return None


def describe_parameters(
    module: torch.nn.Module, parameters: Sequence[torch.nn.Parameter], is_sparse: Sequence[bool]
) -> tuple[ParameterSpec, ...]:
    """The specs of some of a module's parameters, in their order.

    Args:
        is_sparse: whether each one's gradient is.
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

    The rule is that of ``overlapscope.model.partition``, sparse gradients alone.

    Args:
        order: parameter numbers, first gradient first.
        limits_bytes: of the first bucket of each dtype and device, of the second and so on; the last one stays.
    """
    sizes_bytes = [spec.bytes for spec in parameters]
    return BucketPlan(tuple(parameters), fill_buckets(sizes_bytes, kinds_of(parameters), order, limits_bytes))


def kinds_of(parameters: Sequence[ParameterSpec]) -> list[int]:
    """Parameters that can share a bucket have the same number; sparse ones have ``ALONE``."""
    numbers: dict[_Kind, int] = {}
    return [
        ALONE if spec.is_sparse else numbers.setdefault((spec.dtype, spec.device), len(numbers)) for spec in parameters
    ]


def plan_in_module_order(parameters: Sequence[ParameterSpec], limits_bytes: Sequence[int]) -> BucketPlan:
    """The plan of the first backward, before the order of the gradients is known.

    As in torch, buckets are filled in the order of the module's parameters and launched in the opposite one.
    """
    plan = plan_buckets(parameters, range(len(parameters)), limits_bytes)
    by_first_parameter = sorted(plan.buckets, key=min, reverse=True)
    return BucketPlan(plan.parameters, tuple(by_first_parameter))


def dtype_name(dtype: torch.dtype) -> str:
    """``float32`` for ``torch.float32``."""
    return str(dtype).removeprefix("torch.")


def fingerprint(content: object) -> str:
    """SHA-256, in hex, of anything that JSON can write."""
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()
