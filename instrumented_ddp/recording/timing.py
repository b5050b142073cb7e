"""Timers for work on the host and on CUDA devices. Marks are taken where the work runs; times are host nanoseconds.

On a CPU a mark is the host clock and known at once. On CUDA a mark is an event recorded on a stream: its time is known
once the device has passed it, so records wait in a queue until then. Nothing here waits for the device after
construction.

``native.EventTimer`` does this through the driver of the device, with a thread in C. Without a compiler or a known
driver, its twin ``CudaTimer`` does it through torch, on the training thread.
"""

from __future__ import annotations

import logging
import os
from collections import deque
from functools import partial
from typing import Any, Final, Protocol

import torch

from instrumented_ddp import native
from instrumented_ddp.collectives.device_events import Stream, find_driver, index_of, is_capturing, warn_of_capture
from overlapscope.trace.clocks import host_now_ns
from overlapscope.trace.schema import Flag


class RecordLog(Protocol):
    """Destination of records: an ``EventLogWriter``, or memory."""

    def append(self, body: bytes, step: int, start_ns: int, end_ns: int, end_uncertainty_ns: int = 0) -> None:
        """Store one record."""


Mark = Any
"""A point in time of a device: an int (host nanoseconds) or a device event; None where nothing could be marked."""


class DeviceTimer(Protocol):
    """Marks points in time, and writes records once the times of their marks are known."""

    flags: Flag
    """Flags for the precision and the clock of its times."""

    def mark(self, stream: Stream | None = None, /) -> Mark:
        """Return a mark of the current point of a stream, by default the device's current stream."""

    def write(self, body: bytes, step: int, start: Mark, end: Mark, /) -> None:
        """Write a record now or, at the latest, when its times are known. A mark may be used in many records."""

    def on_step_start(self) -> None:
        """Do what can wait until a step is over. Called between steps."""

    def close(self) -> None:
        """Write what can still be written."""


class HostTimer:
    """Timer of work that runs on the host."""

    flags = Flag.NONE
    mark: Any = staticmethod(host_now_ns)
    """Function that returns the mark of the current time; there are no streams on a host."""

    def __init__(self, log: RecordLog) -> None:
        self.write = log.append

    def on_step_start(self) -> None:
        """Do nothing: marks are host times and need no anchor."""

    def close(self) -> None:
        """Do nothing: no record is ever pending."""


class CudaTimer:
    """Timer of work on a CUDA device.

    Events give durations between each other as float32 milliseconds, 1 us apart at 10 s, so an event is timed
    against an anchor event of its own step, or nearer. The first anchor is tied to the host clock by waiting for it
    at construction; each later one by its distance to the previous anchor. That chain would drift with the device's
    clock, so it is clamped to what causality allows: no event happens before the host recorded it, and none
    after the host saw it complete. Anchors have a separate stream, where no work is ahead of them, and the host
    polls a few times whether they have completed: otherwise they could be off by as much as the device lags behind.

    For example, if the previous anchor was at 1000 ns, a new one was recorded at 5000 ns and seen complete at 5200 ns,
    and the events are 4300 ns apart, the new anchor is at 5200 ns: 1000 + 4300 = 5300 is clamped to 5000-5200.

    A stream that hangs, such as that of a collective for which a rank is missing, holds up only its own marks and the
    records that need them.

    Nothing is marked while a CUDA graph is captured: an event that was recorded into a graph can't be queried, and
    querying any other invalidates the capture. Nor after the device has failed, when every call raises: what was
    marked until then is written, and the training gets the error from its own calls.

    Args:
        log: receives the records.
        device: the CUDA device whose current stream is marked.
    """

    flags = Flag.DEVICE_CLOCK

    def __init__(self, log: RecordLog, device: torch.device) -> None:
        self._log = log
        self._device = device
        self._anchor_stream = torch.cuda.Stream(device)
        self._pool: list[torch.cuda.Event] = []
        self._marks: deque[_Mark | _Anchor] = deque()
        """Marks in the order in which they were recorded; their times are not known yet."""
        self._records: deque[tuple[bytes, int, _Mark, _Mark]] = deque()
        self._marks_since_anchor = 0
        self._has_failed = False
        self._anchor = self._first_anchor()

    def mark(self, stream: Stream | None = None, /) -> _Mark | None:
        """Record an event on a stream, by default the device's current stream; None if nothing can be marked."""
        if self._has_failed:
            return None
        try:
            if is_capturing():
                return None
            stream = stream or torch.cuda.current_stream(self._device)
            mark = _Mark(self._record_event(stream), stream.cuda_stream)
            self._marks.append(mark)
            self._marks_since_anchor += 1
            if self._marks_since_anchor >= _MAX_MARKS_PER_ANCHOR:  # an evaluation may be long, and is within one step
                self._flush()
        except RuntimeError as error:
            self._disable(error)
            return None
        return mark

    def write(self, body: bytes, step: int, start: _Mark | None, end: _Mark | None, /) -> None:
        """Queue a record until both of its events have completed. A record without a mark is discarded."""
        if start is not None and end is not None:
            self._records.append((body, step, start, end))

    def on_step_start(self) -> None:
        """Start a new anchor, and write the records of all events that have completed by now."""
        if self._has_failed:
            return
        try:
            if not is_capturing():
                self._flush()
        except RuntimeError as error:
            self._disable(error)

    def close(self) -> None:
        """Write what has completed, and discard the rest: a process that ends must not wait for its device."""
        try:
            if not self._has_failed:
                self._time_completed()
        except RuntimeError as error:
            self._disable(error)
        self._write_timed()

    def _flush(self) -> None:
        self._marks.append(self._next_anchor())
        self._marks_since_anchor = 0
        self._time_completed()
        self._write_timed()

    def _disable(self, error: RuntimeError) -> None:
        self._has_failed = True
        _warn_of_failure(self._device, str(error).split("\n")[0])

    def _record_event(self, stream: Any) -> torch.cuda.Event:
        event = self._pool.pop() if self._pool else torch.cuda.Event(enable_timing=True)
        event.record(stream)
        return event

    def _next_anchor(self) -> _Anchor:
        anchor = _Anchor(recorded_ns=host_now_ns(), event=self._record_event(self._anchor_stream))
        for _ in range(_ANCHOR_POLLS):
            if anchor.has_completed():
                break
        return anchor

    def _first_anchor(self) -> _Anchor:
        torch.cuda.synchronize(self._device)
        return min(
            (self._synchronized_anchor() for _ in range(_FIRST_ANCHORS)), key=lambda one: one.seen_ns - one.recorded_ns
        )

    def _synchronized_anchor(self) -> _Anchor:
        """Return an anchor that the host waits for; its error is at most half of the wait."""
        event = torch.cuda.Event(enable_timing=True)
        before_ns = host_now_ns()
        event.record(self._anchor_stream)
        event.synchronize()
        after_ns = host_now_ns()
        return _Anchor(recorded_ns=before_ns, event=event, time_ns=(before_ns + after_ns) // 2, seen_ns=after_ns)

    def _time_completed(self) -> None:
        """Time all marks of each stream up to the first that it has not reached, and recycle their events."""
        blocked: set[int] = set()
        for _ in range(len(self._marks)):
            mark = self._marks.popleft()
            if mark.stream in blocked or not (self._adopt(mark) if isinstance(mark, _Anchor) else self._time(mark)):
                blocked.add(mark.stream)
                self._marks.append(mark)

    def _adopt(self, anchor: _Anchor) -> bool:
        """Use an anchor from now on, if it has completed."""
        if not anchor.has_completed():
            return False
        by_distance_ns = self._anchor.time_ns + _elapsed_ns(self._anchor.event, anchor.event)
        anchor.time_ns = min(max(by_distance_ns, anchor.recorded_ns), anchor.seen_ns)
        self._pool.append(self._anchor.event)
        self._anchor = anchor
        return True

    def _time(self, mark: _Mark) -> bool:
        """Time a mark, if the device has passed it."""
        event = mark.event
        assert event is not None
        if not event.query():
            return False
        mark.time_ns = self._anchor.time_ns + _elapsed_ns(self._anchor.event, event)
        self._pool.append(event)
        mark.event = None
        return True

    def _write_timed(self) -> None:
        """Write all records whose marks are timed."""
        for _ in range(len(self._records)):
            record = body, step, start, end = self._records.popleft()
            if start.event is None and end.event is None:
                self._log.append(body, step, start.time_ns, end.time_ns)
            else:
                self._records.append(record)


class NullTimer:
    """Timer that marks nothing, for buckets on a device where marks would distort them. Phases use another timer.

    Args:
        timer: timer of the phases.
    """

    def __init__(self, timer: DeviceTimer) -> None:
        self.flags = timer.flags
        self.on_step_start = timer.on_step_start
        self.close = timer.close

    def mark(self, stream: Stream | None = None, /) -> None:
        """Do nothing."""

    def write(self, body: bytes, step: int, start: Mark, end: Mark, /) -> None:
        """Do nothing, since there are no marks."""


class _Mark:
    """An event whose time is not known, or a time whose event is no longer needed."""

    __slots__ = ("event", "stream", "time_ns")

    def __init__(self, event: torch.cuda.Event, stream: int) -> None:
        self.event: torch.cuda.Event | None = event
        self.stream = stream
        self.time_ns = 0


class _Anchor:
    """An event whose host time is known once it has completed."""

    __slots__ = ("event", "recorded_ns", "seen_ns", "time_ns")
    stream: Final = -1
    """Its own, which no other mark is on."""

    def __init__(self, *, recorded_ns: int, event: torch.cuda.Event, time_ns: int = 0, seen_ns: int = 0) -> None:
        self.recorded_ns = recorded_ns
        self.seen_ns = seen_ns
        """Time at which the host first saw it complete; 0 before."""
        self.event = event
        self.time_ns = time_ns

    def has_completed(self) -> bool:
        """Return whether the event has completed, querying it only until it has."""
        if not self.seen_ns and self.event.query():
            self.seen_ns = host_now_ns()
        return self.seen_ns > 0


_log: Final = logging.getLogger(__name__)
_NS_PER_MS: Final = 1e6
_FIRST_ANCHORS: Final = 10
"""Number of first anchors, of which the one with the shortest wait is used: the very first is slow, and if processes
share a device, most of a wait may be another process's time slice, 2 ms long."""
_ANCHOR_POLLS: Final = 30
"""Polls of a new anchor: about 50 us at most, on devices where no stream overtakes another."""
_MAX_MARKS_PER_ANCHOR: Final = 512
"""Maximum number of marks per anchor, which bounds the timing error in long evaluations: with two marks a second,
times are 16 us apart by then."""


def _warn_of_failure(device: torch.device, error: str) -> None:
    _log.warning("%s has failed; nothing on it is timed from now on: %s", device, error)


def _elapsed_ns(start: torch.cuda.Event, end: torch.cuda.Event) -> int:
    return round(start.elapsed_time(end) * _NS_PER_MS)


def should_mark_phases_only(device: torch.device) -> bool:
    """Return whether buckets are not marked on a device.

    With one hardware queue (``CUDA_DEVICE_MAX_CONNECTIONS=1``, as Megatron requires it) a timing event behind a
    collective delays the compute that was launched after it, so recording would destroy the overlap that it measures
    (pytorch #143890).
    """
    return device.type == "cuda" and os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1"


def make_bucket_timer(device: torch.device, timer: DeviceTimer) -> DeviceTimer:
    """Return the timer for buckets on a device whose phases are timed by ``timer``."""
    if not should_mark_phases_only(device):
        return timer
    _log.warning(
        "CUDA_DEVICE_MAX_CONNECTIONS=1: timing events at buckets would destroy the overlap, so only phases are timed; "
        "unset it to record collectives too"
    )
    return NullTimer(timer)


def make_timer(device: torch.device, log: RecordLog) -> DeviceTimer:
    """Return a new timer for work on a device. For a CUDA device this waits until the device is idle."""
    if device.type != "cuda":
        return HostTimer(log)
    store = getattr(log, "store", None)
    if native.IS_NATIVE and isinstance(store, native.RecordStore):  # a log in memory is no file
        try:
            timer = _make_event_timer(device, store)
            timer.start()
            return timer
        except (AttributeError, OSError, RuntimeError) as error:
            _log.info("%s is timed through torch, which costs more: %s", device, error)
    return CudaTimer(log, device)


def _make_event_timer(device: torch.device, store: native.RecordStore) -> native.EventTimer:
    torch.cuda.synchronize(device)
    anchor_stream = torch.cuda.Stream(device)  # of torch's pool, which lasts as long as the process
    return native.EventTimer(
        store,
        find_driver(),
        index_of(device),
        anchor_stream.cuda_stream,
        torch._C._cuda_getCurrentRawStream,
        warn_of_capture,
        partial(_warn_of_failure, device),
        Flag.DEVICE_CLOCK,
    )
