"""Averaging of buckets over a process group: by a strategy or a communication hook, and with which divisor."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import BuiltinCommHookType  # type: ignore[attr-defined]
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

from instrumented_ddp.recording.events import ReductionEvents
from instrumented_ddp.recording.records import BucketCollective, BucketRecords
from instrumented_ddp.reduction.bucket import Bucket
from instrumented_ddp.reduction.communicator import Communicator, communicator_of
from instrumented_ddp.reduction.strategy import PARTS, ReductionStrategy, duplicate_group
from instrumented_ddp.reduction.unused_parameters import UsageMap

Hook = Callable[["GradBucket"], "torch._C.Future[Any]"]
"""A communication hook, bound to its state: it returns a future of the tensor that replaces the bucket's buffer."""


class GradBucket:
    """A bucket as passed to a hook. Each reduction has a new one, because a hook may replace its buffer.

    It has the methods of ``torch.distributed.GradBucket``, so that hooks written for torch run unchanged.
    """

    __slots__ = ("_buffer", "_is_last", "bucket")

    def __init__(self, bucket: Bucket, buffer: torch.Tensor, *, is_last: bool) -> None:
        self.bucket = bucket
        self._buffer = buffer
        self._is_last = is_last

    def index(self) -> int:
        """Return the index of the bucket in launch order."""
        return self.bucket.number

    def buffer(self) -> torch.Tensor:
        """Return the flat tensor that holds all gradients of the bucket, not yet divided."""
        return self._buffer

    def set_buffer(self, buffer: torch.Tensor) -> None:
        """Replace the buffer by another tensor."""
        self._buffer = buffer

    def gradients(self) -> list[torch.Tensor]:
        """Return a view of the buffer for each parameter, in its shape."""
        gradients, offset = [], 0
        for parameter in self.bucket.parameters:
            elements = parameter.numel()
            gradients.append(self._buffer[offset : offset + elements].view(parameter.shape))
            offset += elements
        return gradients

    def parameters(self) -> list[torch.Tensor]:
        """Return the parameters, in the order of their gradients in the buffer."""
        return list(self.bucket.parameters)

    def is_last(self) -> bool:
        """Return whether this is the last bucket to be launched."""
        return self._is_last


def python_hook(state: object, hook: Callable[[Any, Any], Any]) -> Hook:
    """Wrap a user's hook, which must return a future."""

    def run(bucket: GradBucket) -> torch._C.Future[Any]:
        future = hook(state, bucket)
        if not isinstance(future, torch._C.Future):  # the base class of torch.futures.Future
            kind = type(future)
            raise RuntimeError(
                "DDP communication hook's callback must return a torch.futures.Future object, but got "
                f"{kind.__module__}.{kind.__qualname__}"
            )
        return future

    return run


def builtin_hook(kind: BuiltinCommHookType, group: dist.ProcessGroup) -> Hook:
    """Return a hook that torch implements in C++."""
    hooks: dict[BuiltinCommHookType, Callable[[Any, Any], Any]] = {
        BuiltinCommHookType.ALLREDUCE: default_hooks.allreduce_hook,
        BuiltinCommHookType.FP16_COMPRESS: default_hooks.fp16_compress_hook,
    }
    return python_hook(group, hooks[kind])


def result_of(future: torch._C.Future[Any]) -> torch.Tensor:
    """Return the tensor that a completed hook returned in place of the buffer.

    Raises:
        RuntimeError: the result is not a tensor.
    """
    result = future.value()
    if isinstance(result, list) and len(result) == 1:  # as in the future of a collective
        result = result[0]
    if not isinstance(result, torch.Tensor):
        raise RuntimeError(
            f"DDP communication hook's future must hold one tensor, but holds a {type(result).__qualname__}."
        )
    return result


class Averaging:
    """Launches the sums of one model's buckets, and waits for them.

    Args:
        group: the ranks whose gradients are averaged.
        devices: devices of the model.
        events: notified of what happens.
        strategy: sums the buckets, unless a communication hook does.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        devices: Iterable[torch.device],
        events: ReductionEvents,
        strategy: ReductionStrategy,
    ) -> None:
        self.group = group
        self._events = events
        self._groups = [group, *(duplicate_group(group) for _ in range(1, strategy.groups))]
        self._strategy = strategy
        strategy.check(group, devices)
        self._sums = strategy.make_sums(group)
        self._communicators = self._communicators_on(devices)
        self.comm_hook: Hook | None = None
        """Communication hook that reduces the buckets, if the user has registered one."""
        self.count_participants: Callable[[], int] = group.size
        """Returns the number of ranks whose gradients are summed in this backward."""
        self._participants: int | None = None

    def reduce_over(self, group: dist.ProcessGroup) -> None:
        """Average over another group from now on."""
        self.group = group
        self._groups = [group, *(duplicate_group(group) for _ in self._groups[1:])]
        self._sums = self._strategy.make_sums(group)
        self.count_participants = group.size
        self._communicators = self._communicators_on(self._communicators)

    def set_listener(self, events: ReductionEvents) -> None:
        """Notify another listener from now on."""
        self._events = events
        self._communicators = self._communicators_on(self._communicators)

    def launch(self, bucket: Bucket, buffer: torch.Tensor, *, is_last: bool) -> BucketCollective:
        """Launch the sum over all ranks of a bucket's buffer, or another one, or call the communication hook."""
        communicator, records = self._communicator_of(bucket), self._events.records_of(bucket.number)
        hook = self.comm_hook
        uses_backend = self._sums is None or (bucket.is_sparse and not self._strategy.sums_sparse)
        if hook is None and uses_backend:
            return communicator.all_reduce(buffer, records)
        seen_by_hook = GradBucket(bucket, buffer, is_last=is_last)
        if hook is None:
            return self._launch_part(0, seen_by_hook)
        return communicator.run_hook(lambda: hook(seen_by_hook), records)

    def launch_rest(self, buckets: Sequence[Bucket]) -> None:
        """Launch what strategies defer until the backward is over, the last bucket first."""
        if not self._strategy.has_two_parts:
            return
        for bucket in reversed(buckets):
            if bucket.collective is not None:
                bucket.collective = self.launch_second_part(bucket, bucket.buffer, bucket.collective)

    def launch_second_part(self, bucket: Bucket, buffer: torch.Tensor, first: BucketCollective) -> BucketCollective:
        """Launch the second part of a bucket's sum, or of another buffer in its place, if there is one.

        Returns:
            What is to be waited for: the second part, or the first and only one.
        """
        is_over = not self._strategy.has_two_parts or self._strategy.pads_to is not None
        if is_over or self.comm_hook is not None or bucket.is_sparse:
            return first
        second = self._launch_part(1, GradBucket(bucket, buffer, is_last=False))
        self._communicator_of(bucket).superseded(first)
        return second

    def gather(self, bucket: Bucket, parameters: torch.Tensor) -> BucketCollective:
        """Launch the all-gather of a bucket's parameters, where the optimizer is sharded."""
        records = self._events.get_gather_records(bucket.number)
        return self._run_part(1, GradBucket(bucket, parameters, is_last=False), records)

    def _launch_part(self, part: int, seen: GradBucket) -> BucketCollective:
        records = self._events.records_of(seen.bucket.number)
        if records is not None and self._strategy.has_two_parts:
            records = records.for_operation(PARTS[part])
        return self._run_part(part, seen, records)

    def _run_part(self, part: int, seen: GradBucket, records: BucketRecords | None) -> BucketCollective:
        assert self._sums is not None
        bucket_sum = self._sums.prepare(seen, part, records, self._events.sink)
        collective = self._communicator_of(seen.bucket).run_hook(bucket_sum.launch, records)
        if bucket_sum.marks[1] is not None:  # time span of the sum, rather than of the launch and the wait
            collective.start, collective.end = bucket_sum.marks
        return collective

    def wait(self, bucket: Bucket, collective: BucketCollective) -> None:
        """Make the current stream (on CPU, the host) wait for a bucket."""
        self._communicator_of(bucket).wait(collective)

    def copy_to_grads(
        self, buckets: Sequence[Bucket], is_used_anywhere: Callable[[int], bool] | None, *, copies: bool
    ) -> None:
        """Wait for some buckets in order and copy the averages to the parameters' gradients.

        Args:
            buckets: usually all.
            is_used_anywhere: see ``Bucket.copy_out``.
            copies: False if an optimizer has used the gradients already.
        """
        for bucket in buckets:
            if bucket.collective is None:  # it was skipped, because no rank has used it
                continue
            result = self._sum_of(bucket, bucket.collective)
            if copies:
                self._events.on_copy_out_start(bucket.device)
                bucket.copy_out(result, is_used_anywhere)
                self._events.on_copy_out_end(bucket.number, bucket.device)

    def _sum_of(self, bucket: Bucket, collective: BucketCollective) -> torch.Tensor:
        """Wait for a bucket, and return its buffer, or the tensor that a communication hook has returned instead."""
        self.wait(bucket, collective)
        return result_of(collective.work) if isinstance(collective.work, torch._C.Future) else bucket.buffer

    def divisor(self) -> int | None:
        """Return the divisor of gradients in this backward; None if a communication hook divides, or nothing does."""
        if self.comm_hook is not None:
            return None
        if self._participants is None:
            if self._strategy.averages_itself:
                return None
            self._participants = self.count_participants()
        return self._participants

    def reset_divisor(self) -> None:
        """Reset the divisor, as another backward may have other participants."""
        self._participants = None

    def usage_map(self, parameters: int, device: torch.device) -> UsageMap:
        """Return a bitmap of used parameters that is summed over the same ranks."""
        return UsageMap(parameters, device, self._communicators[device][0], self._events.bitmap_records)

    def _communicator_of(self, bucket: Bucket) -> Communicator:
        in_turn = self._communicators[bucket.device]
        return in_turn[bucket.number % len(in_turn)]

    def _communicators_on(self, devices: Iterable[torch.device]) -> dict[torch.device, list[Communicator]]:
        sink = self._events.sink
        return {device: [communicator_of(device, group, sink) for group in self._groups] for device in devices}
