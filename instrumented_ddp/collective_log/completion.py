"""Notices when collectives end: for the event log's buckets and for all entries of the collective log.

What runs on the host's threads, as gloo does, is waited for by two threads in the order of its launch (gloo runs two
collectives of a group at a time). They need the GIL for the stamp alone, which autograd leaves free nearly all the
time: the stamp is 0.03 ms late at the median and 0.1 ms at p90, against 1.7 ms and 5 ms for a look from gradient hooks
(``benchmarks/collective_ends.py``). A callback on the work's future would be as punctual, but runs on gloo's own
thread and would hold up the next collective whenever Python is busy. A stamp is late, never early, so it is recorded
as an upper bound, together with the time at which the collective was last seen running.

A collective may hang, and a thread that waits for it waits with it. So only one of the threads waits for what is no
bucket, and what nobody waits for is looked at, by ``look``.

What runs on a device is ``device_completion``'s.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from datetime import timedelta
from queue import Empty, SimpleQueue
from typing import Any, Final

import torch
import torch.distributed as dist

from instrumented_ddp.collective_log.device_completion import DeviceCompletionWatch, OnEnd, has_failed
from overlapscope.trace.host import host_now_ns

_log: Final = logging.getLogger(__name__)

NO_TIMEOUT: Final = timedelta(0)
"""That of the process group, that is."""

_THREADS: Final = 2
_LOOK_EVERY_S: Final = 0.1
"""Of a thread that has nobody to wait for, while something is in flight."""
_LAST_LOOKS_S: Final = 0.2
_BETWEEN_LAST_LOOKS_S: Final = 0.005


class _InFlight:
    """A collective on the host's threads."""

    __slots__ = ("future", "is_bucket", "on_end", "work")

    def __init__(self, work: dist.Work | torch._C.Future[Any], on_end: tuple[OnEnd, ...], *, is_bucket: bool) -> None:
        self.on_end = on_end
        self.is_bucket = is_bucket
        self.work: dist.Work | None = None
        """What can't be waited for twice: the wait for gloo's sends and receives takes their completion away."""
        self.future: torch._C.Future[Any] | None = None
        """Any number of threads may wait for it. It is preferred as it is the first to know."""
        if isinstance(work, torch._C.Future):
            self.future = work
        else:
            try:
                self.future = work.get_future()
            except Exception:  # sends and receives have none, nor have all works written in Python
                self.work = work

    @property
    def is_over(self) -> bool:
        """Never blocks."""
        if self.future is not None:
            return self.future.done()
        assert self.work is not None
        return self.work.is_completed()


class CompletionWatch:
    """Tells when collectives end. Its threads start with the first collective."""

    def __init__(self) -> None:
        self._launched: SimpleQueue[_InFlight | None] = SimpleQueue()
        self._in_flight: dict[int, _InFlight] = {}
        """By identity. Who takes one out tells of its end."""
        self._no_buckets: deque[_InFlight] = deque()
        self._waits_for_no_bucket = threading.Lock()
        self._threads: list[threading.Thread] = []
        self._starting = threading.Lock()
        self._on_devices: DeviceCompletionWatch | None = None
        self._closed = False
        self._has_complained = False

    def add(self, work: dist.Work | torch._C.Future[Any], *on_end: OnEnd, is_bucket: bool) -> None:
        """Watch a collective on the host's threads that has just been launched.

        Args:
            on_end: all are told of its end, on a thread of their own or on that which looks.
            is_bucket: its end is wanted to the tenth of a millisecond.
        """
        if self._closed:
            return
        if not self._threads:
            self._start()
        one = _InFlight(work, on_end, is_bucket=is_bucket)
        self._in_flight[id(one)] = one
        self._launched.put(one)

    def add_on_device(self, work: dist.Work | None, device: torch.device, *on_end: OnEnd) -> None:
        """Watch a collective on a device, see ``DeviceCompletionWatch.add``."""
        if self._closed:
            return
        with self._starting:
            if self._on_devices is None:
                self._on_devices = DeviceCompletionWatch(device)
        self._on_devices.add(work, device, *on_end)

    def look(self) -> None:
        """Tell of everything on the host that has ended by now. Never blocks."""
        for one in list(self._in_flight.values()):
            try:
                if one.is_over:
                    self._ended(one, failed=one.future is not None and has_failed(one.future))
            except Exception:  # of the backend: it is over
                self._ended(one, failed=True)

    def close(self) -> None:
        """Tell of what has ended. What hangs is not waited for: it did not complete. May be called twice."""
        if self._closed:
            return
        self._closed = True
        self.look()
        deadline = time.monotonic() + _LAST_LOOKS_S
        while self._in_flight and time.monotonic() < deadline:
            time.sleep(_BETWEEN_LAST_LOOKS_S)
            self.look()
        self._in_flight.clear()  # logs are closed after this, and nobody writes who wakes later
        for _ in self._threads:
            self._launched.put(None)
        if self._on_devices is not None:
            self._on_devices.close()

    def _start(self) -> None:
        with self._starting:
            if self._threads:
                return
            self._threads = [
                threading.Thread(target=self._watch, name=f"overlapscope-completion-{number}", daemon=True)
                for number in range(_THREADS)
            ]
            for thread in self._threads:
                thread.start()

    def _watch(self) -> None:
        while True:
            try:
                one = self._launched.get(timeout=_LOOK_EVERY_S if self._in_flight else None)
            except Empty:
                self.look()
                continue
            if one is None:
                return
            if one.is_bucket:
                self._wait_for(one)
            else:
                self._no_buckets.append(one)
                self._wait_for_no_buckets()

    def _wait_for_no_buckets(self) -> None:
        """Unless the other thread does, which then comes to these as well."""
        while self._no_buckets and self._waits_for_no_bucket.acquire(blocking=False):
            try:
                while self._no_buckets:
                    self._wait_for(self._no_buckets.popleft())
            finally:
                self._waits_for_no_bucket.release()

    def _wait_for(self, one: _InFlight) -> None:
        if one.future is None or id(one) not in self._in_flight:  # nothing to wait for, or seen by a look
            return
        try:
            one.future.wait()
        except Exception:  # it, or a hook's callback, failed: the training thread meets the same error
            self._ended(one, failed=True)
        else:
            self._ended(one, failed=False)

    def _ended(self, one: _InFlight, *, failed: bool) -> None:
        now_ns = host_now_ns()
        if self._in_flight.pop(id(one), None) is not None:
            for tell in one.on_end:
                try:
                    tell(now_ns, failed)
                except Exception as error:
                    self._complain_once(error)

    def _complain_once(self, error: Exception) -> None:
        if not (self._closed or self._has_complained):  # else its log was closed a moment ago
            self._has_complained = True
            _log.warning("the end of a collective could not be written down: %r", error)
