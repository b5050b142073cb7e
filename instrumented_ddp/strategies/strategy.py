"""The ``Strategy`` class: how and when a model's buckets are reduced."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
import torch.distributed as dist

from instrumented_ddp.strategies.wire import Wire

AllReduce = Callable[[torch.Tensor, Wire], None]
"""Function that replaces a flat buffer by its sum over the ranks of a wire, with the same bits on all of them:
otherwise replicas would drift apart.
"""

PARTS: Final = ("reduce_scatter", "all_gather")
"""Operations that the two parts of a sum are recorded as."""


@dataclass(frozen=True, kw_only=True)
class Strategy:
    """A way to reduce gradients. Users create an instance for a strategy of their own."""

    name: str
    """Name in the recording."""
    all_reduce: AllReduce | None = None
    """Function that sums a bucket; None for the all-reduce of the backend, which also sums sparse gradients."""
    then: AllReduce | None = None
    """Second part of the sum, deferred until after the backward, if ``all_reduce`` only scatters it: the all-gather, in
    the order in which the next forward needs the buckets. See ``PARTS``.
    """
    slice_bytes: int | None = None
    """Size of slices in which buckets are summed, the most urgent for the next forward first; None for no slices."""
    pads_to: int | None = None
    """Set if the optimizer is sharded (``instrumented_ddp.sharded``): buckets are padded to a multiple of this number
    of elements, and ``then`` gathers not gradients, but the parameters of which each rank has updated its part.
    """
    hook: Callable[[dist.ProcessGroup], tuple[object, Callable[..., Any]]] | None = None
    """Returns state and communication hook, as for ``register_comm_hook``, that average the buckets instead."""
    keeps_state: bool = False
    """True if it keeps state of each bucket for the next step, so that buckets should not change."""
    overlaps: bool = True
    """True if buckets are launched while autograd computes; False if they are launched when it is done."""
    bucket_cap_mb: float | None = None
    """Size limit of buckets; 0 is a bucket for each parameter. None for the limit that the user sets."""
    order: Callable[[Sequence[int]], Sequence[int]] | None = None
    """Converts the observed order of gradients, by parameter index, to the order for buckets."""
    averages_parameters: bool = False
    """True if gradients are left unchanged, and parameters are averaged after each step of their optimizer."""
    groups: int = 1
    """Number of process groups of all ranks that take turns with the buckets."""
