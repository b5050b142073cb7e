"""Execution of sums that take more than one collective: beside the backward, one after the other."""

from __future__ import annotations

import atexit
import queue
import threading
import weakref
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Final, Protocol

import torch
import torch.distributed as dist

from instrumented_ddp.collectives.dispatch import get_backend_name
from instrumented_ddp.collectives.roles import CollectiveRole, set_group_role
from instrumented_ddp.recording.bucket_sum import BucketSumRecorder
from instrumented_ddp.strategies.priority import SliceQueue
from instrumented_ddp.strategies.strategy import Strategy
from instrumented_ddp.strategies.wire import Wire
from overlapscope.errors import OverlapScopeError

_MAX_TASK_S: Final = 5.0
"""Maximum time in seconds that a task of the worker thread may take at exit, when deferred sums may be left. A thread
that returns from a wait in C++ while Python shuts down ends the process with SIGABRT.
"""


class HookBucket(Protocol):
    """A bucket as passed to a communication hook."""

    def index(self) -> int:
        """Return its index."""

    def buffer(self) -> torch.Tensor:
        """Return the flat tensor of all its gradients."""


def check_can_send(strategy: Strategy, group: dist.ProcessGroup, devices: Iterable[torch.device]) -> None:
    """Check that the backend can send tensors from these devices, if the strategy uses sends and receives.

    gloo accepts tensors on a device for its own collectives, but can't send them: the address is not in host memory,
    and the process ends with ``writev: Bad address``.

    Raises:
        OverlapScopeError: the backend can't.
    """
    if strategy.all_reduce is None and strategy.then is None:
        return
    for device in devices:
        if device.type != "cpu" and get_backend_name(group, device) == "gloo":
            raise OverlapScopeError(
                f"strategy={strategy.name!r} sends parts of buckets from rank to rank, which gloo can't from {device}: "
                "train over nccl, or with a strategy that leaves sums to the backend, such as 'bucketed'"
            )


class SumExecutor:
    """Sums buckets over a group, one after the other, so that ranks launch all collectives in the same order.

    On the host this is done by a thread, because each round has to be waited for. On a device it is done by a stream,
    which waits for what the current one was given.

    Args:
        strategy: the strategy to sum with.
        group: the process group to sum over.
    """

    def __init__(self, strategy: Strategy, group: dist.ProcessGroup) -> None:
        self._parts = strategy.all_reduce, strategy.then
        self._slices = None if strategy.slice_bytes is None else SliceQueue(strategy.slice_bytes)
        self._group = group
        self._hook: Callable[[Any], Any] | None = None
        if strategy.hook is not None:
            # Collectives are matched by their order in a group: the thread needs one where nobody else launches any.
            self._group = duplicate_group(group)
            set_group_role(self._group, CollectiveRole(role="segment", strategy=strategy.name))
            state, hook = strategy.hook(self._group)
            self._hook = partial(hook, state)
        self._worker: _Worker | None = None
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    def launch(self, bucket: HookBucket, recorded_sum: BucketSumRecorder, part: int = 0) -> torch.futures.Future[Any]:
        """Launch the sum of a bucket.

        Args:
            told: recorder of the rounds of the sum.
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


def duplicate_group(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """Create another group of the same ranks. Called on all of them."""
    return dist.new_group(dist.get_process_group_ranks(group), use_local_synchronization=True)


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
