"""Priority scheduling: buckets are summed in slices, first those that the next forward needs first.

Gradients come in the order of the backward, which is the wrong one for the next forward. So buckets are cut into
slices, and whenever a slice is summed, rank 0 chooses the most urgent one that is ready and broadcasts the choice,
because all have to sum the same at the same time. Peng et al., "A generic communication scheduler for distributed DNN
training acceleration" (ByteScheduler), 2019; Jayarajan et al., "Priority-based parameter propagation" (P3), 2019
(arXiv 1905.03960). It pays if updates are deferred, see ``DistributedDataParallel.defer``.
"""

from __future__ import annotations

import threading
from collections import deque
from contextlib import nullcontext
from typing import Any, Final

import torch

from instrumented_ddp.recording.bucket_sum import BucketSumRecorder
from instrumented_ddp.strategies import ring
from instrumented_ddp.strategies.strategy import Strategy
from instrumented_ddp.strategies.wire import Wire

_LEADER: Final = 0


class SliceQueue:
    """Queue of buckets that are not summed yet. Each turn sums a slice of one of them, the same on all ranks.

    Args:
        slice_bytes: size of slices.
    """

    def __init__(self, slice_bytes: int) -> None:
        self._slice_bytes = slice_bytes
        self._waiting: dict[int, _PendingSum] = {}
        self._changed = threading.Condition()
        self._count = 0

    def put(
        self, buffer: torch.Tensor, wire: Wire, recorded_sum: BucketSumRecorder
    ) -> tuple[torch.futures.Future[Any], int]:
        """Enqueue a bucket to be summed; called on all ranks in the same order.

        Returns:
            A future of the buffer when it holds the sum, and the number of turns that this takes.
        """
        one = _PendingSum(buffer, wire, recorded_sum, max(1, self._slice_bytes // buffer.element_size()))
        slice_count = len(one.slices)
        with self._changed:
            self._waiting[self._count] = one
            self._count += 1
            self._changed.notify()
        return one.future, slice_count

    def sum_one_slice(self) -> None:
        """Sum one slice. Errors are set on the futures of the buckets."""
        try:
            with self._changed:
                number = min(self._waiting, key=lambda number: (-self._waiting[number].wire.bucket, number))
                wire = self._waiting[number].wire
            number = _broadcast_choice(number, wire)
            with self._changed:
                self._changed.wait_for(lambda: number in self._waiting)  # this rank may not have enqueued it yet
                one = self._waiting[number]
            with one.recorded_sum.running() if len(one.slices) == 1 else nullcontext():
                ring.all_reduce(one.slices.popleft(), one.wire)
            if not one.slices:
                with self._changed:
                    del self._waiting[number]
                one.future.set_result(one.buffer)
        except Exception as error:
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        with self._changed:
            waiting, self._waiting = self._waiting, {}
        for one in waiting.values():
            one.future.set_exception(error)


class _PendingSum:
    """The remaining slices of one bucket."""

    def __init__(self, buffer: torch.Tensor, wire: Wire, recorded_sum: BucketSumRecorder, elements: int) -> None:
        self.buffer = buffer
        self.wire = wire
        self.recorded_sum = recorded_sum
        self.slices = deque(buffer.split(elements))
        self.future: torch.futures.Future[Any] = torch.futures.Future()


def _broadcast_choice(number: int, wire: Wire) -> int:
    """Return the leader's choice."""
    chosen = torch.tensor([number])
    with wire.phase("choice of the next slice", rounds=1):
        if wire.rank == _LEADER:
            wire.exchange(sends=[(chosen, rank) for rank in range(wire.size) if rank != _LEADER])
        else:
            wire.exchange(receives=[(chosen, _LEADER)])
    return int(chosen.item())


STRATEGY = Strategy(name="priority", all_reduce=ring.all_reduce, slice_bytes=1 << 20)
