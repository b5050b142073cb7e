"""The ``Strategy`` class: how and when a model's buckets are reduced. Users create an instance for one of their own."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from instrumented_ddp.collectives.backends import get_backend_name
from instrumented_ddp.reduction.strategy import BucketSums, ReductionStrategy
from instrumented_ddp.strategies.sums import AllReduce, SumExecutor
from overlapscope.errors import OverlapScopeError


@dataclass(frozen=True, kw_only=True)
class Strategy(ReductionStrategy):
    """A way to reduce gradients, with the settings of ``ReductionStrategy`` and at most one way to sum them."""

    all_reduce: AllReduce | None = None
    """Function that sums a bucket; None for the all-reduce of the backend, which also sums sparse gradients."""
    then: AllReduce | None = None
    """Second part of the sum, deferred until after the backward, if ``all_reduce`` only scatters it: the all-gather, in
    the order in which the next forward needs the buckets.
    """
    slice_bytes: int | None = None
    """Size of slices in which buckets are summed, the most urgent for the next forward first; None for no slices."""
    hook: Callable[[dist.ProcessGroup], tuple[object, Callable[..., Any]]] | None = None
    """Returns state and communication hook, as for ``register_comm_hook``, that average the buckets instead."""

    @property
    def averages_itself(self) -> bool:
        """Return whether the hook divides, or parameters are averaged in place of gradients."""
        return self.hook is not None or self.averages_parameters

    @property
    def sums_sparse(self) -> bool:
        """Return whether the hook is given sparse gradients as well."""
        return self.hook is not None

    @property
    def has_two_parts(self) -> bool:
        """Return whether there is a second part."""
        return self.then is not None

    def check(self, group: dist.ProcessGroup, devices: Iterable[torch.device]) -> None:
        """Check that the backend can send tensors from these devices, if the strategy uses sends and receives.

        gloo accepts tensors on a device for its own collectives, but can't send them: the address is not in host
        memory, and the process ends with ``writev: Bad address``.

        Raises:
            OverlapScopeError: the backend can't.
        """
        if self.all_reduce is None and self.then is None:
            return
        for device in devices:
            if device.type != "cpu" and get_backend_name(group, device) == "gloo":
                raise OverlapScopeError(
                    f"strategy={self.name!r} sends parts of buckets from rank to rank, which gloo can't from {device}: "
                    "train over nccl, or with a strategy that leaves sums to the backend, such as 'bucketed'"
                )

    def make_sums(self, group: dist.ProcessGroup) -> BucketSums | None:
        """Return what runs ``all_reduce``, its second part or the hook, beside the backward."""
        if self.all_reduce is None and self.hook is None:
            return None
        return SumExecutor(
            self.name, (self.all_reduce, self.then), group, slice_bytes=self.slice_bytes, make_hook=self.hook
        )
