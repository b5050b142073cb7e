"""Parameters -> bucket plan. Pure functions: no tensors are made, nothing is communicated.

A plan is the order in which every rank launches its all-reduces, so it must be the same on all ranks; its hash
says whether it is. See section 3.2.1 (gradient bucketing) of Li et al., "PyTorch Distributed: Experiences on
Accelerating Data Parallel Training", VLDB 2020.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final

import torch

MB: Final = 1024 * 1024
"""Bytes of a megabyte as ``bucket_cap_mb`` counts them."""

DEFAULT_BUCKET_CAP_MB: Final = 25
DEFAULT_FIRST_BUCKET_BYTES: Final = 1 * MB
"""The first bucket is small when the cap is left at its default, so that the first all-reduce starts early."""


@dataclass(frozen=True, kw_only=True)
class ParameterSpec:
    """What the ranks must agree on about one parameter."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    elements: int

    @property
    def bytes(self) -> int:
        """Size of its gradient."""
        return self.elements * self.dtype.itemsize

    @property
    def signature(self) -> tuple[str, tuple[int, ...], str]:
        """What is compared across ranks; the device is each rank's own affair."""
        return self.name, self.shape, dtype_name(self.dtype)


@dataclass(frozen=True)
class BucketPlan:
    """An ordered list of buckets, each an ordered list of parameter numbers."""

    parameters: tuple[ParameterSpec, ...]
    buckets: tuple[tuple[int, ...], ...]

    @cached_property
    def hash(self) -> str:
        """SHA-256 over names, shapes and dtypes in the order in which they are reduced."""
        return fingerprint([[self.parameters[index].signature for index in bucket] for bucket in self.buckets])


def describe_parameters(named_parameters: Iterable[tuple[str, torch.nn.Parameter]]) -> tuple[ParameterSpec, ...]:
    """The specs of parameters, in their order."""
    return tuple(
        ParameterSpec(
            name=name,
            shape=tuple(parameter.shape),
            dtype=parameter.dtype,
            device=parameter.device,
            elements=parameter.numel(),
        )
        for name, parameter in named_parameters
    )


def plan_buckets(
    parameters: Sequence[ParameterSpec], order: Sequence[int], cap_bytes: int, first_cap_bytes: int
) -> BucketPlan:
    """Fill buckets with parameters of one dtype and device, in the order in which gradients are expected.

    A bucket is closed once it holds ``cap_bytes`` or more, so it may be larger than the cap by one parameter
    (the rule of ``compute_bucket_assignment_by_size`` in torch/csrc/distributed/c10d/reducer.cpp). Buckets are
    ordered by their last parameter: that is the order in which they become ready.

    Args:
        order: parameter numbers, first gradient first.
        cap_bytes: bytes at which a bucket is full.
        first_cap_bytes: the same for the first bucket of each dtype and device.
    """
    filling: dict[tuple[torch.dtype, torch.device], list[int]] = {}
    filled_bytes: dict[tuple[torch.dtype, torch.device], int] = {}
    caps = dict.fromkeys(((spec.dtype, spec.device) for spec in parameters), first_cap_bytes)
    buckets: list[list[int]] = []
    for index in order:
        spec = parameters[index]
        key = spec.dtype, spec.device
        filling.setdefault(key, []).append(index)
        filled_bytes[key] = filled_bytes.get(key, 0) + spec.bytes
        if filled_bytes[key] >= caps[key]:
            buckets.append(filling.pop(key))
            del filled_bytes[key]
            caps[key] = cap_bytes
    buckets += filling.values()
    position = {index: place for place, index in enumerate(order)}
    buckets.sort(key=lambda bucket: position[bucket[-1]])
    return BucketPlan(tuple(parameters), tuple(tuple(bucket) for bucket in buckets))


def caps_in_bytes(bucket_cap_mb: float | None) -> tuple[int, int]:
    """Cap and first-bucket cap. Only a cap that is left at its default has the small first bucket, as in torch."""
    if bucket_cap_mb is None:
        return DEFAULT_BUCKET_CAP_MB * MB, DEFAULT_FIRST_BUCKET_BYTES
    cap_bytes = int(bucket_cap_mb * MB)
    return cap_bytes, cap_bytes


def dtype_name(dtype: torch.dtype) -> str:
    """``float32`` for ``torch.float32``."""
    return str(dtype).removeprefix("torch.")


def fingerprint(content: object) -> str:
    """SHA-256, in hex, of anything that JSON can write."""
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()
