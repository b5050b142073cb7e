"""The time line of a device. Marks are taken where the work happens; times are always host nanoseconds.

On a CPU a mark is the host clock and known at once. On CUDA a mark is an event recorded on a stream: its time is
known when the device has passed it, so records wait in a queue until then. Nothing here waits for the device
after construction.
"""

from __future__ import annotations

import logging
import os
from collections import deque
from typing import Any, Final, Protocol

import torch

from instrumented_ddp.collective_log.device_completion import is_capturing
from overlapscope.trace.format import Flag
from overlapscope.trace.host import host_now_ns


class RecordLog(Protocol):
    """Where records go: an ``EventLog``, or memory."""

    def append(self, body: bytes, step: int, start_ns: int, end_ns: int, end_uncertainty_ns: int = 0) -> None:
        """Store one record."""


Mark = Any
"""A point on a device's time line: an int (host nanoseconds) or a device event; None where nothing could be marked."""


class DeviceTimer(Protocol):
    """Marks points in time, and writes records once the times of their marks are known."""

    flags: Flag
    """What the times it gives are worth."""

    def mark(self, stream: torch.cuda.Stream | None = None) -> Mark:
        """The current point of a stream of the device, the current one if none is given."""

    def write(self, body: bytes, step: int, start: Mark, end: Mark) -> None:
        """Write a record now or, at the latest, when its times are known. A mark may be used in many records."""

    def step_begins(self) -> None:
        """Called between steps: anchor the clock, write what has become known."""

    def close(self) -> None:
        """Write what can still be written."""


class HostTimer:
    """The time line of work that the host does itself."""

    flags = Flag.NONE
    mark: Any = staticmethod(host_now_ns)
    """There are no streams on a host."""

    def __init__(self, log: RecordLog) -> None:
        self.write = log.append

    def step_begins(self) -> None:
        """Nothing to anchor: marks are host times."""

    def close(self) -> None:
        """Nothing is ever pending."""


class CudaTimer:
    """The time line of a CUDA device.

    Events give durations between each other as float32 milliseconds, 1 us apart at 10 s, so an event is timed
    against an anchor event of its own step, or nearer. The first anchor is tied to the host clock by waiting for it
    at construction; each later one by its distance to the anchor before. That chain would drift with the device's
    clock, so it is held within what causality allows: no event happens before the host recorded it, and none
    after the host saw it complete. Anchors have a stream of their own, where no work is ahead of them, and the host
    looks a few times whether they have completed: else they could be off by as much as the device lags behind.

    Nothing is marked while a CUDA graph is captured: an event that was recorded into a graph can't be asked for, and
    asking for any other invalidates the capture. Nor after the device has failed, when every call raises: what was
    marked until then is written, and the training meets the error by itself.

    Args:
        log: where records go.
        device: the CUDA device whose current stream is marked.
    """

    flags = Flag.DEVICE_CLOCK

    def __init__(self, log: RecordLog, device: torch.device) -> None:
        self._log = log
        self._device = device
        self._anchor_stream = torch.cuda.Stream(device)
        self._pool: list[torch.cuda.Event] = []
        self._marks: deque[_Mark | _Anchor] = deque()
        """In the order in which they were recorded; their times are not known yet."""
        self._records: deque[tuple[bytes, int, _Mark, _Mark]] = deque()
        self._marks_since_anchor = 0
        self._has_failed = False
        self._anchor = self._first_anchor()

    def mark(self, stream: torch.cuda.Stream | None = None) -> _Mark | None:
        """Record an event on a stream, the device's current one if none is given; None if nothing can be marked."""
        if self._has_failed:
            return None
        try:
            if is_capturing():
                return None
            mark = _Mark(self._record_event(stream))
            self._marks.append(mark)
            self._marks_since_anchor += 1
            if self._marks_since_anchor >= _MARKS_AN_ANCHOR:  # an evaluation may be long, and is within one step
                self._flush()
        except RuntimeError as error:
            self._give_up(error)
            return None
        return mark

    def write(self, body: bytes, step: int, start: _Mark | None, end: _Mark | None) -> None:
        """Queue a record until both of its events have completed. One without a mark is left out."""
        if start is not None and end is not None:
            self._records.append((body, step, start, end))

    def step_begins(self) -> None:
        """Start a new anchor, and write the records of all events that have completed by now."""
        if self._has_failed:
            return
        try:
            if not is_capturing():
                self._flush()
        except RuntimeError as error:
            self._give_up(error)

    def close(self) -> None:
        """Write what has completed. What has not is left out: a process that ends must not wait for its device."""
        try:
            if not self._has_failed:
                self._see_completed()
        except RuntimeError as error:
            self._give_up(error)
        self._write_timed()

    def _flush(self) -> None:
        self._marks.append(self._next_anchor())
        self._marks_since_anchor = 0
        self._see_completed()
        self._write_timed()

    def _give_up(self, error: RuntimeError) -> None:
        self._has_failed = True
        _log.warning("%s has failed; nothing on it is timed from now on: %s", self._device, str(error).split("\n")[0])

    def _record_event(self, stream: torch.cuda.Stream | None = None) -> torch.cuda.Event:
        event = self._pool.pop() if self._pool else torch.cuda.Event(enable_timing=True)
        event.record(stream or torch.cuda.current_stream(self._device))
        return event

    def _next_anchor(self) -> _Anchor:
        anchor = _Anchor(recorded_ns=host_now_ns(), event=self._record_event(self._anchor_stream))
        for _ in range(_LOOKS):
            if anchor.has_completed():
                break
        return anchor

    def _first_anchor(self) -> _Anchor:
        torch.cuda.synchronize(self._device)
        return min((self._tied_anchor() for _ in range(_FIRST_ANCHORS)), key=lambda one: one.seen_ns - one.recorded_ns)

    def _tied_anchor(self) -> _Anchor:
        """One that the host waits for; it is off by half of that time at most."""
        event = torch.cuda.Event(enable_timing=True)
        before_ns = host_now_ns()
        event.record(self._anchor_stream)
        event.synchronize()
        after_ns = host_now_ns()
        return _Anchor(recorded_ns=before_ns, event=event, time_ns=(before_ns + after_ns) // 2, seen_ns=after_ns)

    def _see_completed(self) -> None:
        """Time all marks up to the first that the device has not come to; their events are free again."""
        marks = self._marks
        while marks:
            mark = marks[0]
            if isinstance(mark, _Anchor):
                if not mark.has_completed():
                    break
                by_distance_ns = self._anchor.time_ns + _distance_ns(self._anchor.event, mark.event)
                mark.time_ns = min(max(by_distance_ns, mark.recorded_ns), mark.seen_ns)
                self._pool.append(self._anchor.event)
                self._anchor = mark
            elif mark.event is not None:
                if not mark.event.query():
                    break
                mark.time_ns = self._anchor.time_ns + _distance_ns(self._anchor.event, mark.event)
                self._pool.append(mark.event)
                mark.event = None
            marks.popleft()

    def _write_timed(self) -> None:
        records = self._records
        while records:
            body, step, start, end = records[0]
            if start.event is not None or end.event is not None:
                break
            self._log.append(body, step, start.time_ns, end.time_ns)
            records.popleft()


class PhasesOnly:
    """Marks nothing, on a device where marks at buckets would change what they measure. Phases are marked elsewhere.

    Args:
        timer: of the phases.
    """

    def __init__(self, timer: DeviceTimer) -> None:
        self.flags = timer.flags
        self.step_begins = timer.step_begins
        self.close = timer.close

    def mark(self, stream: torch.cuda.Stream | None = None) -> None:
        """Nothing is marked."""

    def write(self, body: bytes, step: int, start: Mark, end: Mark) -> None:
        """Nothing is written without a mark."""


class _Mark:
    """An event whose time is not known, or a time whose event is no longer needed."""

    __slots__ = ("event", "time_ns")

    def __init__(self, event: torch.cuda.Event) -> None:
        self.event: torch.cuda.Event | None = event
        self.time_ns = 0


class _Anchor:
    """An event whose host time is known once it has completed."""

    __slots__ = ("event", "recorded_ns", "seen_ns", "time_ns")

    def __init__(self, *, recorded_ns: int, event: torch.cuda.Event, time_ns: int = 0, seen_ns: int = 0) -> None:
        self.recorded_ns = recorded_ns
        self.seen_ns = seen_ns
        """When the host first saw it complete; 0 before."""
        self.event = event
        self.time_ns = time_ns

    def has_completed(self) -> bool:
        """Look, unless that is known."""
        if not self.seen_ns and self.event.query():
            self.seen_ns = host_now_ns()
        return self.seen_ns > 0


_log: Final = logging.getLogger(__name__)
_NS_PER_MS: Final = 1e6
_FIRST_ANCHORS: Final = 10
"""The one that the host waits for least is tied best: the first of all is slow, and where several processes share a
device most of a wait may be another one's turn, 2 ms long."""
_LOOKS: Final = 30
"""At an anchor that has just been recorded: some 50 us at most, where the device lets no stream overtake another."""
_MARKS_AN_ANCHOR: Final = 512
"""In an evaluation with two marks a second, times are 16 us apart at the end of such a stretch, and not ever more."""


def _distance_ns(start: torch.cuda.Event, end: torch.cuda.Event) -> int:
    return round(start.elapsed_time(end) * _NS_PER_MS)


def marks_phases_only(device: torch.device) -> bool:
    """Whether buckets go unmarked on a device.

    With one hardware queue (``CUDA_DEVICE_MAX_CONNECTIONS=1``, as Megatron wants it) a timing event behind a collective
    holds up the compute that was launched after it, so recording would destroy the overlap that it measures
    (pytorch #143890).
    """
    return device.type == "cuda" and os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1"


def bucket_timer_of(device: torch.device, timer: DeviceTimer) -> DeviceTimer:
    """The time line for buckets on a device whose phases are timed by ``timer``."""
    if not marks_phases_only(device):
        return timer
    _log.warning(
        "CUDA_DEVICE_MAX_CONNECTIONS=1: timing events at buckets would destroy the overlap, so only phases are timed; "
        "unset it to record collectives too"
    )
    return PhasesOnly(timer)


def timer_of(device: torch.device, log: RecordLog) -> DeviceTimer:
    """The time line on which a device's work is timed."""
    return CudaTimer(log, device) if device.type == "cuda" else HostTimer(log)
