"""Execution of sums that take more than one collective: beside the backward, one after the other."""

from __future__ import annotations

import atexit
import queue
import threading
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import torch
import torch.distributed as dist

from instrumented_ddp.collectives.roles import CollectiveRole, set_group_role
from instrumented_ddp.recording.events import EventSink
from instrumented_ddp.recording.records import BucketRecords
from instrumented_ddp.recording.timing import Mark
from instrumented_ddp.reduction.strategy import PARTS, HookBucket, duplicate_group
from instrumented_ddp.strategies.bucket_sum import BucketSumRecorder
from instrumented_ddp.strategies.wire import Wire

_MAX_TASK_S: Final = 5.0
"""Maximum time in seconds that a task of the worker thread may take at exit, when deferred sums may be left. A thread
that returns from a wait in C++ while Python shuts down ends the process with SIGABRT.
"""


AllReduce = Callable[[torch.Tensor, Wire], None]
"""Function that replaces a flat buffer by its sum over the ranks of a wire, with the same bits on all of them:
otherwise replicas would drift apart.
"""


_LEADER: Final = 0
"""Rank that chooses the next slice."""


class SumExecutor:
    """Sums buckets over a group, one after the other, so that ranks launch all collectives in the same order.

    On the host this is done by a thread, because each round has to be waited for. On a device it is done by a stream,
    which waits for what the current one was given.

    Args:
        name: name of the strategy in the recording.
        parts: the function that sums a bucket, or the two that scatter and gather it.
        group: the process group to sum over.
        slice_bytes: size of slices of buckets, the most urgent first; None for no slices.
        make_hook: returns state and communication hook that sum the buckets instead.
    """

    def __init__(
        self,
        name: str,
        parts: tuple[AllReduce | None, AllReduce | None],
        group: dist.ProcessGroup,
        *,
        slice_bytes: int | None = None,
        make_hook: Callable[[dist.ProcessGroup], tuple[object, Callable[..., Any]]] | None = None,
    ) -> None:
        self._name = name
        self._parts = parts
        self._slices = SliceQueue(slice_bytes, parts[0]) if slice_bytes is not None and parts[0] is not None else None
        self._group = group
        self._hook: Callable[[Any], Any] | None = None
        if make_hook is not None:
            # Collectives are matched by their order in a group: the thread needs one where nobody else launches any.
            self._group = duplicate_group(group)
            set_group_role(self._group, CollectiveRole(role="segment", strategy=name))
            state, hook = make_hook(self._group)
            self._hook = partial(hook, state)
        self._worker: _Worker | None = None
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    def prepare(
        self, bucket: HookBucket, part: int, records: BucketRecords | None, sink: EventSink | None
    ) -> PreparedSum:
        """Return the sum of a bucket, or one part of it, to be launched."""
        op = "all_reduce" if self._parts[1] is None else PARTS[part]
        return PreparedSum(self, bucket, part, BucketSumRecorder(self._name, records, sink, op))

    def launch(self, bucket: HookBucket, recorded_sum: BucketSumRecorder, part: int = 0) -> torch.futures.Future[Any]:
        """Launch the sum of a bucket.

        Args:
            recorded_sum: recorder of the rounds of the sum.
            part: index of the strategy's part.

        Returns:
            A future of its buffer when that holds the sum, or of the tensor that a hook has returned instead.
        """
        device = bucket.buffer().device
        if self._parts[part] is not None:
            recorded_sum.launched(self._group, bucket.buffer())
        if device.type == "cuda":
            return self._launch_on_stream(bucket, recorded_sum, device, part)
        if self._worker is None:
            self._worker = _worker_of(self._group)
        if self._slices is not None:
            future, slice_count = self._slices.put(bucket.buffer(), self._wire(bucket, recorded_sum), recorded_sum)
            for _ in range(slice_count):
                self._worker.submit(self._slices.sum_one_slice)
            return future
        return self._worker.submit(lambda: self._run(bucket, recorded_sum, part))

    def _run(self, bucket: HookBucket, recorded_sum: BucketSumRecorder, part: int) -> Any:
        if self._hook is not None:
            # What it launches when an earlier part is over has to be over before the next bucket: on gloo the order of
            # these launches would differ between ranks.
            return self._hook(bucket).wait()
        run, buffer = self._parts[part], bucket.buffer()
        assert run is not None
        with recorded_sum.running():
            run(buffer, self._wire(bucket, recorded_sum))
        return buffer

    def _wire(self, bucket: HookBucket, recorded_sum: BucketSumRecorder) -> Wire:
        return Wire(self._group, range(self._group.size()), recorded_sum, bucket.index())

    def _launch_on_stream(
        self, bucket: HookBucket, recorded_sum: BucketSumRecorder, device: torch.device, part: int
    ) -> torch.futures.Future[Any]:
        stream = self._streams.setdefault(device, torch.cuda.Stream(device))
        stream.wait_stream(torch.cuda.current_stream(device))
        future: torch.futures.Future[Any] = torch.futures.Future(devices=[device])
        with torch.cuda.stream(stream), recorded_sum.on_device(device):
            future.set_result(
                self._run(bucket, recorded_sum, part)
            )  # whoever waits for it has their stream wait for this one
        return future


@dataclass(frozen=True)
class PreparedSum:
    """A sum that is to be launched once."""

    sums: SumExecutor
    bucket: HookBucket
    part: int
    recorded_sum: BucketSumRecorder

    @property
    def marks(self) -> tuple[Mark, Mark]:
        """Return the marks of its start and its end on a device."""
        return self.recorded_sum.marks

    def launch(self) -> torch.futures.Future[Any]:
        """Launch it, and return a future of the buffer when that holds the sum."""
        return self.sums.launch(self.bucket, self.recorded_sum, self.part)


class SliceQueue:
    """Queue of buckets that are not summed yet. Each turn sums a slice of one of them, the same on all ranks.

    Args:
        slice_bytes: size of slices.
        all_reduce: sums a slice.
    """

    def __init__(self, slice_bytes: int, all_reduce: AllReduce) -> None:
        self._slice_bytes = slice_bytes
        self._all_reduce = all_reduce
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
                self._all_reduce(one.slices.popleft(), one.wire)
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


class _Worker:
    """A thread that runs one task after the other, until this object is gone."""

    def __init__(self) -> None:
        self._tasks = _TaskQueue()
        thread = threading.Thread(target=self._tasks.do, name="overlapscope-sums", daemon=True)
        thread.start()
        # What is registered last is called first: the recording, which knows of no more sums, is closed after this.
        end = weakref.finalize(self, _end, thread, self._tasks)
        end.atexit = False
        atexit.register(end)

    def submit(self, run: Callable[[], Any]) -> torch.futures.Future[Any]:
        """Submit a task. Return a future of its result."""
        future: torch.futures.Future[Any] = torch.futures.Future()

        def task() -> None:
            try:
                with torch.no_grad():
                    result = run()
            except Exception as error:
                future.set_exception(error)
            else:
                future.set_result(result)

        self._tasks.put(task)
        return future


class _TaskQueue:
    """Task queue of a thread, and the number of tasks done."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self.put = self._queue.put
        self.done = 0

    def do(self) -> None:
        """Run the tasks one after the other; None is the end."""
        while (task := self._queue.get()) is not None:
            task()
            del task  # it holds a bucket
            self.done += 1


_workers: Final[weakref.WeakValueDictionary[str, _Worker]] = weakref.WeakValueDictionary()


def _worker_of(group: dist.ProcessGroup) -> _Worker:
    """Return the worker for all models of a group, so that their messages can't be mistaken for each other's."""
    worker = _workers.get(group.group_name)
    if worker is None:
        worker = _workers[group.group_name] = _Worker()
    return worker


def _end(thread: threading.Thread, tasks: _TaskQueue) -> None:
    tasks.put(None)
    done = -1
    while threading.current_thread() is not thread and thread.is_alive() and tasks.done > done:
        done = tasks.done
        thread.join(_MAX_TASK_S)
