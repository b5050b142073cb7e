"""What a strategy says of the reduction of a model's buckets."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
import torch.distributed as dist

from instrumented_ddp.strategies.wire import Wire

AllReduce = Callable[[torch.Tensor, Wire], None]
"""Replaces a flat buffer by its sum over the ranks of a wire, in the same bits on all of them: else replicas would
drift apart."""

PARTS: Final = ("reduce_scatter", "all_gather")
"""What the two parts of a sum are recorded as."""


@dataclass(frozen=True, kw_only=True)
class Strategy:
    """A way to reduce gradients. Whoever has one of his own makes an instance."""

    name: str
    """As it is recorded."""
    all_reduce: AllReduce | None = None
    """How a bucket is summed; None: by the all-reduce of the backend, which also sums sparse gradients."""
    then: AllReduce | None = None
    """What of the sum is left for the time after the backward, if ``all_reduce`` only scatters it: the all-gather, in
    the order in which the next forward needs the buckets. See ``PARTS``."""
    slice_bytes: int | None = None
    """Buckets are summed in slices of so many bytes, those first that the next forward needs first."""
    pads_to: int | None = None
    """Set if the optimizer is sharded (``instrumented_ddp.sharded``): buckets are padded to a multiple of so many
    elements, and ``then`` is not for gradients, but for the parameters that each rank has updated its part of."""
    hook: Callable[[dist.ProcessGroup], tuple[object, Callable[..., Any]]] | None = None
    """Makes state and communication hook, as of ``register_comm_hook``, that average the buckets instead."""
    keeps_state: bool = False
    """Whether it keeps something of each bucket for the next step, so that buckets should not change."""
    overlaps: bool = True
    """Whether buckets are launched while autograd computes; if not, when it is done."""
    bucket_cap_mb: float | None = None
    """How large buckets are; 0 is a bucket for each parameter. None: as whoever uses it says."""
    order: Callable[[Sequence[int]], Sequence[int]] | None = None
    """From the order in which gradients were seen to come, by the number of their parameters, that of the buckets."""
    averages_parameters: bool = False
    """Gradients are left as they are: parameters are averaged after each step of their optimizer."""
    groups: int = 1
    """So many process groups of all ranks take turns with the buckets."""
