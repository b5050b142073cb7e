"""Memory layout of parameters in contiguous buffers, buckets and shards. Pure, without tensors or communication.

The rules are Megatron's (``_compute_per_buffer_param_layout`` in ``megatron/core/optimizer/distrib_optimizer.py``, with
the paddings of ``param_layout.py``): a buffer for each dtype, parameters in the reverse of the module's order, each
beginning at a multiple of 64 elements; a bucket is closed by the parameter that fills it, and ends at a multiple of
the number of ranks and of 128 elements, so that it can be cut into a shard for each rank; a shared embedding has a
bucket of its own.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import nn

from instrumented_ddp.bucket_plan import BucketPlan, ParameterSpec, Traffic
from instrumented_ddp.plans.initial_plan import Caps
from overlapscope.errors import OverlapScopeError

START_ELEMENTS: Final = 64
"""Number of elements of which parameters begin at a multiple."""
_MIN_BUCKET_ELEMENTS: Final = 40_000_000
_MIN_BUCKET_ELEMENTS_PER_RANK: Final = 1_000_000
_HALF: Final = (torch.float16, torch.bfloat16)


@dataclass(frozen=True, kw_only=True)
class Fragment:
    """The part of a parameter that lies in one shard. Elements are counted in memory order."""

    parameter: int
    bucket: int
    begin: int
    end: int
    """End of the range of elements in the parameter."""
    location: int
    """Offset of its first element in the bucket."""


@dataclass(frozen=True)
class Layout(BucketPlan):
    """A bucket plan with memory offsets, and a shard of each bucket for each rank.

    Args:
        parameters: parameters of the module.
        buckets: as in any plan.
        ranks: number of ranks among which buckets are divided.
        pads_to: a bucket's size is a multiple of this, and of ``ranks``.
    """

    ranks: int
    pads_to: int

    def starts(self, number: int) -> tuple[int, ...]:
        """Return the offsets of a bucket's parameters, in elements."""
        return _starts(self._sizes(number))

    def elements(self, number: int) -> int:
        """Return the number of elements of a bucket, padding included."""
        starts, sizes = self.starts(number), self._sizes(number)
        return _round_up(starts[-1] + sizes[-1], math.lcm(self.ranks, self.pads_to))

    def dtype(self, number: int) -> torch.dtype:
        """Return the dtype of a bucket's parameters."""
        return self.parameters[self.buckets[number][0]].dtype

    @property
    def buffers(self) -> tuple[tuple[int, ...], ...]:
        """Return the buckets of each contiguous buffer, in memory order."""
        found: dict[torch.dtype, list[int]] = {}
        for number in range(len(self.buckets)):
            found.setdefault(self.dtype(number), []).append(number)
        return tuple(map(tuple, found.values()))

    def shard(self, number: int, rank: int) -> slice:
        """Return the elements of a bucket that belong to a rank."""
        elements = self.elements(number) // self.ranks
        return slice(rank * elements, (rank + 1) * elements)

    def fragments(self, rank: int) -> Iterator[Fragment]:
        """Generate the parts of parameters that a rank owns, bucket by bucket.

        A bucket of parameters of 150 and 60 elements, which start at 0 and 192, has 256 elements. Of 2 ranks, rank 0
        owns elements 0 to 127 of the first parameter; rank 1 owns elements 128 to 149 of the first and all of the
        second.
        """
        for number, bucket in enumerate(self.buckets):
            shard = self.shard(number, rank)
            for index, start in zip(bucket, self.starts(number), strict=True):
                location, end = max(start, shard.start), min(start + self.parameters[index].elements, shard.stop)
                if location < end:
                    yield Fragment(
                        parameter=index, bucket=number, begin=location - start, end=end - start, location=location
                    )

    def reduced(self, number: int) -> Traffic:
        """Return the communication of a bucket's gradients."""
        return Traffic("reduce_scatter", gradient_dtype(self.dtype(number)), self.elements(number))

    def gathered(self, number: int) -> Traffic:
        """Return the communication of a bucket's parameters."""
        return Traffic("all_gather", self.dtype(number), self.elements(number))

    def _sizes(self, number: int) -> list[int]:
        return [self.parameters[index].elements for index in self.buckets[number]]


def gradient_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which gradients are summed and the optimizer computes: at least single precision."""
    return torch.float32 if dtype in _HALF else dtype


def default_bucket_elements(ranks: int) -> int:
    """Return the default bucket size in elements: larger with more ranks, as each shard should be worth a message."""
    return max(_MIN_BUCKET_ELEMENTS, _MIN_BUCKET_ELEMENTS_PER_RANK * ranks)


def fill_buckets(
    parameters: Sequence[ParameterSpec], bucket_elements: int, alone: Collection[int] = ()
) -> tuple[tuple[int, ...], ...]:
    """Fill buckets with parameters, in the order in which their gradients are expected.

    Parameters of 10, 20 and 30 elements with ``bucket_elements=50`` give the buckets (2, 1) and (0,): parameter 2 ends
    at 30, and parameter 1, which begins at 64, ends at 84 and fills the bucket.

    Args:
        bucket_elements: size at which a bucket is full, padding before parameters included.
        alone: parameters that have a bucket of their own.
    """
    by_dtype: dict[torch.dtype, list[int]] = {}
    for index in reversed(range(len(parameters))):
        by_dtype.setdefault(parameters[index].dtype, []).append(index)
    buckets: list[tuple[int, ...]] = []
    for indices in by_dtype.values():
        bucket: list[int] = []
        end = 0
        for index in indices:
            if index in alone and bucket:
                buckets.append(tuple(bucket))
                bucket, end = [], 0
            bucket.append(index)
            end = _round_up(end, START_ELEMENTS) + parameters[index].elements
            if index in alone or end >= bucket_elements:
                buckets.append(tuple(bucket))
                bucket, end = [], 0
        if bucket:
            buckets.append(tuple(bucket))
    return tuple(sorted(buckets, key=min, reverse=True))


def _starts(sizes: Sequence[int]) -> tuple[int, ...]:
    starts, end = [], 0
    for size in sizes:
        starts.append(_round_up(end, START_ELEMENTS))
        end = starts[-1] + size
    return tuple(starts)


def _round_up(elements: int, multiple: int) -> int:
    return -(-elements // multiple) * multiple


def sharded_buckets(
    module: nn.Module, parameters: Sequence[nn.Parameter], specs: Sequence[ParameterSpec], caps: Caps, ranks: int
) -> tuple[tuple[int, ...], ...]:
    """Return the buckets of a module whose optimizer is sharded.

    Args:
        caps: size limits. A given one counts gradients in single precision; the default is as large as Megatron's.

    Raises:
        OverlapScopeError: sparse gradients, several devices, or two parameters in the same memory.
    """
    check_can_be_sharded(parameters, specs)
    elements = default_bucket_elements(ranks) if caps.is_default else caps.cap_bytes // torch.float32.itemsize
    return fill_buckets(specs, elements, shared_embeddings(module, parameters))


def check_can_be_sharded(parameters: Sequence[nn.Parameter], specs: Sequence[ParameterSpec]) -> None:
    """Check that parameters fit into contiguous buffers.

    Raises:
        OverlapScopeError: a sparse gradient, several devices, or two parameters in the same memory.
    """
    why_not = ""
    if len({spec.device for spec in specs}) > 1:
        why_not = "its parameters are on several devices"
    seen: dict[int, str] = {}
    for parameter, spec in zip(parameters, specs, strict=True):
        if spec.is_sparse:
            why_not = f"gradients of {spec.name} are sparse"
        if spec.elements and (other := seen.setdefault(parameter.data_ptr(), spec.name)) != spec.name:
            why_not = f"{other} and {spec.name} share memory, but are two parameters: make them one nn.Parameter"
    if why_not:
        raise OverlapScopeError(f"strategy='sharded' can't have this module: {why_not}")


def shared_embeddings(module: nn.Module, parameters: Sequence[nn.Parameter]) -> set[int]:
    """Return the indices of embedding weights that other modules use too, or that are marked as in Megatron."""
    users: dict[nn.Parameter, int] = {}
    for part in module.modules():
        for parameter in part.parameters(recurse=False):
            users[parameter] = users.get(parameter, 0) + 1
    embeddings = {part.weight for part in module.modules() if isinstance(part, nn.Embedding)}
    return {
        index
        for index, parameter in enumerate(parameters)
        if getattr(parameter, "shared_embedding", False) or (parameter in embeddings and users[parameter] > 1)
    }
