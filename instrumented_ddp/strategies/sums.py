"""Where the sums of buckets run that are made of sends and receives: beside the backward, one after the other."""

from __future__ import annotations

import atexit
import queue
import threading
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Final

import torch
import torch.distributed as dist

from instrumented_ddp.strategies.strategy import AllReduce
from instrumented_ddp.strategies.wire import Wire

_JOIN_S: Final = 2.0
"""A thread that comes back from a wait in C++ when Python shuts down ends the process with SIGABRT."""


class Sums:
    """Sums buckets over a group, in the order in which they are launched.

    On the host a thread does it, because each round has to be waited for; it starts with the first bucket. On a device
    a stream does, which waits for what the current one was given.

    Args:
        all_reduce: how.
    """

    def __init__(self, all_reduce: AllReduce) -> None:
        self._all_reduce = all_reduce
        self._thread: _Worker | None = None
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    def launch(
        self,
        bucket: int,
        buffer: torch.Tensor,
        group: dist.ProcessGroup,
        says_why: Callable[[], AbstractContextManager[None]],
    ) -> torch.futures.Future[torch.Tensor]:
        """Launch the sum of a bucket.

        Args:
            bucket: its number.
            buffer: its gradients.
            says_why: around each round, see ``Wire``.

        Returns:
            A future of the buffer, when it holds the sum.
        """
        wire = Wire(group, range(group.size()), says_why, bucket)
        if buffer.device.type == "cuda":
            return self._launch_on_stream(buffer, wire)
        if self._thread is None:
            self._thread = _Worker()
            weakref.finalize(self, self._thread.close)
        return self._thread.submit(lambda: self._all_reduce(buffer, wire), buffer)

    def _launch_on_stream(self, buffer: torch.Tensor, wire: Wire) -> torch.futures.Future[torch.Tensor]:
        stream = self._streams.setdefault(buffer.device, torch.cuda.Stream(buffer.device))
        stream.wait_stream(torch.cuda.current_stream(buffer.device))
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future(devices=[buffer.device])
        with torch.cuda.stream(stream):
            self._all_reduce(buffer, wire)
            future.set_result(buffer)  # who waits for it has his stream wait for this one
        return future


class _Worker:
    def __init__(self) -> None:
        self._tasks: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="overlapscope-sums", daemon=True)
        self._thread.start()
        atexit.register(self.close)

    def submit(self, run: Callable[[], None], result: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()

        def task() -> None:
            try:
                with torch.no_grad():
                    run()
            except Exception as error:
                future.set_exception(error)  # type: ignore[arg-type] # of torch's stub
            else:
                future.set_result(result)

        self._tasks.put(task)
        return future

    def close(self) -> None:
        atexit.unregister(self.close)
        self._tasks.put(None)
        if threading.current_thread() is not self._thread:
            self._thread.join(_JOIN_S)

    def _run(self) -> None:
        while (task := self._tasks.get()) is not None:
            task()
