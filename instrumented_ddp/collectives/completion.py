"""Detection of the end of collectives, for the event log's buckets and all entries of the collective log.

Buckets that run on the host's threads, as with gloo, are waited for by two threads in launch order (gloo runs two
collectives of a group at a time). They need the GIL for the timestamp alone, and autograd leaves the GIL free nearly
all the time: the timestamp is 0.03 ms late at the median and 0.1 ms at p90, against 1.7 ms and 5 ms for polling from
gradient hooks (``benchmarks/collective_ends.py``). A callback on the work's future would be as accurate, but runs on
gloo's thread and would delay the next collective whenever Python is busy. A timestamp is late, never early, so it is
recorded as an upper bound, together with the time at which the collective was last seen running.

A thread that is woken twice takes about 25 us of CPU time, more than all the rest of a small bucket. So short buckets
of light steps are polled where the training passes by: when the next one is launched, and at the end of the backward.

Other collectives are not waited for: waking a thread for each would make a loop of small ones take half as long again,
and nobody needs their ends to the microsecond. They are polled when the next one is announced, and periodically by the
background scheduler, of which this is a task.

Collectives on a device are polled by a thread of ``device_completion``, the other back end of ``CompletionWatch``.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from queue import SimpleQueue
from typing import Any, Final

import torch
import torch.distributed as dist

from instrumented_ddp.collectives.device_completion import DeviceCompletionPoller, OnReachedChange, has_failed
from instrumented_ddp.collectives.device_events import DeviceEvent
from instrumented_ddp.collectives.roles import HostBucket, OnEnd
from overlapscope.trace.clocks import host_now_ns

NO_TIMEOUT: Final = timedelta(0)
"""Timeout argument that selects the timeout of the process group."""

_THREADS: Final = 2
_POLL_INTERVAL_S: Final = 0.2
_FINAL_POLL_S: Final = 0.2
_FINAL_POLL_INTERVAL_S: Final = 0.005
_JOIN_S: Final = 2.0
"""Time limit for joining threads, which end immediately unless the machine is busy."""


class HostCollective:
    """A collective on the host's threads."""

    __slots__ = ("bucket", "future", "on_end", "work")

    def __init__(
        self,
        work: dist.Work | torch._C.Future[Any],
        on_end: tuple[OnEnd, ...],
        bucket: HostBucket | None = None,
    ) -> None:
        self.on_end = on_end
        self.bucket = bucket
        self.work: dist.Work | None = None
        """Work that must not be waited for twice: a wait for gloo's sends and receives consumes their completion."""
        self.future: torch._C.Future[Any] | None = None
        """Future, which any number of threads may wait for. Preferred because it is completed first."""
        if isinstance(work, torch._C.Future):
            self.future = work
        else:
            try:
                self.future = work.get_future()
            except Exception:  # sends and receives have none, nor have all works written in Python
                self.work = work

    def poll(self) -> bool | None:
        """Return None while it runs, then whether it has failed. Never blocks."""
        try:
            if self.future is not None:
                return has_failed(self.future) if self.future.done() else None
            assert self.work is not None
            return False if self.work.is_completed() else None
        except Exception:  # from the backend: it has ended
            return True


class CompletionWatch:
    """Reporter of the ends of collectives. Its threads start with the first bucket, and the first one on a device.

    Args:
        on_error: called with an error raised by a callback.
    """

    name = "the completion check"

    def __init__(self, on_error: Callable[[Exception], None]) -> None:
        self._on_error = on_error
        self._launched: SimpleQueue[HostCollective | None] = SimpleQueue()
        self._in_flight: dict[int, HostCollective] = {}
        """Collectives by identity. The thread that removes one reports its end."""
        self._buckets: dict[int, HostCollective] = {}
        """Those of them that are buckets."""
        self._non_buckets: deque[HostCollective] = deque()
        self._threads: list[threading.Thread] = []
        self._starting = threading.Lock()
        self._on_devices: DeviceCompletionPoller | None = None
        self._closed = False

    def add(
        self,
        work: dist.Work | torch._C.Future[Any] | None,
        device: torch.device,
        *on_end: OnEnd,
        before: DeviceEvent | None = None,
        on_reached_change: OnReachedChange | None = None,
    ) -> None:
        """Watch a collective that has just been launched.

        Args:
            work: its work or future; None for a synchronous collective on a device.
            device: device on which it runs.
            on_end: callbacks for its end, called on a watching thread or on one that polls.
            before: return value of ``mark_before``.
            on_reached_change: if its end on a device is slow to come, called with whether the device has reached it,
                when that has changed.
        """
        if self._closed:
            return
        if device.type != "cpu":
            assert not isinstance(work, torch._C.Future)
            self._get_poller(device).add(work, device, on_end, before, on_reached_change)
            return
        assert work is not None
        one = HostCollective(work, on_end)
        self._in_flight[id(one)] = one
        self._non_buckets.append(one)

    def add_bucket(self, work: dist.Work | torch._C.Future[Any], bucket: HostBucket, *on_end: OnEnd) -> None:
        """Watch the collective of a bucket on the host that has just been launched.

        Args:
            work: its work or future.
            bucket: notified of its end.
            on_end: further callbacks for its end.
        """
        if self._closed:
            return
        one = bucket.watched = HostCollective(work, (bucket.ended, *on_end), bucket)
        self._in_flight[id(one)] = self._buckets[id(one)] = one
        if bucket.is_waited_for:
            self._wait_in_thread(one)

    def _wait_in_thread(self, one: HostCollective) -> None:
        if not self._threads:
            self._start()
        self._launched.put(one)

    def poll_buckets(self, *, waits: bool = False) -> None:
        """Report the buckets that have ended by now, and note that the others run.

        Args:
            waits: whether threads wait for those that run, from now on at the latest.
        """
        if not self._buckets:
            return
        # Read the clock first: a collective that ends between the two must not be recorded as running longer.
        now_ns = host_now_ns()
        for one in list(self._buckets.values()):
            if self._poll_one(one) is None and (bucket := one.bucket) is not None:
                bucket.running_ns = now_ns
                if waits and not bucket.is_waited_for:
                    bucket.is_waited_for = True
                    self._wait_in_thread(one)

    def waited(self, bucket: HostBucket) -> None:
        """Report that the training has waited for a bucket, if its end is not known yet."""
        if isinstance(bucket.watched, HostCollective):
            self._ended(bucket.watched, failed=False)

    def mark_before(self, device: torch.device) -> DeviceEvent | None:
        """Mark the device's stream before a collective is launched, see ``DeviceCompletionPoller.mark_before``."""
        return None if device.type == "cpu" or self._closed else self._get_poller(device).mark_before(device)

    def _get_poller(self, device: torch.device) -> DeviceCompletionPoller:
        with self._starting:
            if self._on_devices is None:
                self._on_devices = DeviceCompletionPoller(device, self._report, self._on_error)
        return self._on_devices

    def poll(self) -> None:
        """Report everything on the host that has ended by now. Never blocks."""
        for one in list(self._in_flight.values()):
            self._poll_one(one)
        with suppress(IndexError):  # release those that were reported, as a future keeps the result's memory
            for _ in range(len(self._non_buckets)):
                one = self._non_buckets.popleft()
                if id(one) in self._in_flight:
                    self._non_buckets.append(one)

    def poll_oldest(self) -> None:
        """Report ended collectives that are not buckets, up to the first that runs: fast even with many in flight."""
        no_buckets = self._non_buckets
        with suppress(IndexError):  # another thread removes them as well
            while no_buckets:
                one = no_buckets.popleft()
                if id(one) in self._in_flight and self._poll_one(one) is None:
                    no_buckets.appendleft(one)
                    return

    def run(self) -> float:
        """Poll, as a task of the background scheduler, and return the seconds until the next poll."""
        self.poll()
        return _POLL_INTERVAL_S

    def end(self) -> None:
        """Do nothing: ``close`` polls for the last time."""

    def _poll_one(self, one: HostCollective) -> bool | None:
        """Report a collective's end if it has ended; the result is that of its ``poll``."""
        failed = one.poll()
        if failed is not None:
            self._ended(one, failed=failed)
        return failed

    def close(self) -> None:
        """Report what has ended, without waiting for collectives that hang. May be called twice."""
        if self._closed:
            return
        self._closed = True
        self.poll()
        deadline = time.monotonic() + _FINAL_POLL_S
        while self._in_flight and time.monotonic() < deadline:
            time.sleep(_FINAL_POLL_INTERVAL_S)
            self.poll()
        longest_s = 0.0 if self._in_flight else _JOIN_S
        self._in_flight.clear()  # logs are closed after this, and a thread that wakes later must not write
        for _ in self._threads:
            self._launched.put(None)
        deadline = time.monotonic() + longest_s
        for thread in self._threads:
            # A thread that returns from a wait in C++ while Python shuts down ends the process with SIGABRT.
            if thread is not threading.current_thread():
                thread.join(max(0.0, deadline - time.monotonic()))
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
            one = self._launched.get()
            if one is None:
                return
            self._wait_for(one)

    def _wait_for(self, one: HostCollective) -> None:
        if one.future is None or id(one) not in self._in_flight:  # nothing to wait for, or its end was found by polling
            return
        try:
            one.future.wait()
        except Exception:  # it, or a hook's callback, failed: the training thread gets the same error
            self._ended(one, failed=True)
        else:
            self._ended(one, failed=False)

    def _ended(self, one: HostCollective, *, failed: bool) -> None:
        now_ns = host_now_ns()
        if self._in_flight.pop(id(one), None) is not None:
            self._buckets.pop(id(one), None)
            on_end, one.on_end, one.bucket = one.on_end, (), None  # which refer to it
            self._report(on_end, now_ns, failed)

    def _report(self, on_end: tuple[OnEnd, ...], now_ns: int, failed: bool) -> None:
        for tell in on_end:
            try:
                tell(now_ns, failed)
            except Exception as error:
                if not self._closed:  # otherwise its log was closed a moment ago
                    self._on_error(error)
