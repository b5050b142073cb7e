"""What a strategy is to the reduction: its settings, the bucket sums that it makes, and the updates that it postpones.

Reducer, averaging and plans know of no message, round or slice: a strategy that does not leave sums to the backend
returns ``BucketSums``, which launch the sum of a bucket as one thing. ``strategies.strategy.Strategy`` is the
implementation for all strategies of this package, and for those that users write.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

import torch
import torch.distributed as dist

from instrumented_ddp.recording.events import EventSink
from instrumented_ddp.recording.records import BucketRecords
from instrumented_ddp.recording.timing import Mark

PARTS: Final = ("reduce_scatter", "all_gather")
"""Operations that the two parts of a sum are recorded as."""


class HookBucket(Protocol):
    """A bucket as passed to a communication hook."""

    def index(self) -> int:
        """Return its index."""

    def buffer(self) -> torch.Tensor:
        """Return the flat tensor of all its gradients."""


class BucketSum(Protocol):
    """The sum of one bucket, or a part of it."""

    @property
    def marks(self) -> tuple[Mark, Mark]:
        """Return the marks of its start and its end on a device, once it is launched."""

    def launch(self) -> torch.futures.Future[Any]:
        """Launch it. The future has the buffer when that holds the sum, or the tensor that replaces it."""


class BucketSums(Protocol):
    """Sums of a strategy over one group."""

    def prepare(
        self, bucket: HookBucket, part: int, records: BucketRecords | None, sink: EventSink | None
    ) -> BucketSum:
        """Return the sum of a bucket, to be launched.

        Args:
            part: index of the part, see ``PARTS``; 0 if there is only one.
            records: packed records of the part.
            sink: receives the records.
        """


class PendingUpdates:
    """What is postponed beyond the end of a backward, or of an update: nothing, unless a subclass says otherwise."""

    def defers_wait(self) -> bool:
        """Return whether ``Reducer.finish`` will be called later. Called when all of a backward is launched."""
        return False

    def before_bucket_reuse(self) -> None:
        """Finish what needs the buckets, which are about to be filled again or replaced."""

    @property
    def are_complete(self) -> bool:
        """Return whether gradients and parameters are up to date."""
        return True

    def finish(self) -> None:
        """Finish everything: wait until gradients and parameters are up to date."""


@dataclass(frozen=True, kw_only=True)
class ReductionStrategy:
    """How and when buckets are reduced. The sums are the backend's all-reduces, unless a subclass makes them."""

    name: str
    """Name in the recording."""
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
    pads_to: int | None = None
    """Set if the optimizer is sharded (``strategies.sharded``): buckets are padded to a multiple of this number of
    elements, and the second part gathers not gradients, but the parameters of which each rank has updated its part.
    """

    @property
    def averages_itself(self) -> bool:
        """Return whether gradients are not to be divided by the number of ranks before they are summed."""
        return self.averages_parameters

    @property
    def sums_sparse(self) -> bool:
        """Return whether ``make_sums`` also sums sparse gradients."""
        return False

    @property
    def has_two_parts(self) -> bool:
        """Return whether a sum is a reduce-scatter in the backward, and an all-gather later."""
        return False

    def check(self, group: dist.ProcessGroup, devices: Iterable[torch.device]) -> None:
        """Check that the group can sum tensors from these devices.

        Raises:
            OverlapScopeError: it can't.
        """

    def make_sums(self, group: dist.ProcessGroup) -> BucketSums | None:  # noqa: ARG002
        """Return what sums buckets over a group; None leaves them to the backend."""
        return None


def duplicate_group(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """Create another group of the same ranks. Called on all of them."""
    return dist.new_group(dist.get_process_group_ranks(group), use_local_synchronization=True)
