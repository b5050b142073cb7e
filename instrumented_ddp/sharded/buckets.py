"""Buckets of a module's parameters for a sharded optimizer."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from instrumented_ddp.bucket_plan import ParameterSpec
from instrumented_ddp.plans.first_plan import Caps
from instrumented_ddp.sharded.layout import default_bucket_elements, fill_buckets
from overlapscope.errors import OverlapScopeError


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
