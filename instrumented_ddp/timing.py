"""The time line of a device. Marks are taken where the work happens; times are always host nanoseconds.

On a CPU a mark is the host clock and known at once. On CUDA a mark is an event recorded on a stream: its time is
known when the device has passed it, so records wait in a queue until then. Nothing here waits for the device
after construction.
"""

from __future__ import annotations

import time
from collections import deque
from typing import Any, Final, Protocol

import torch

from overlapscope.trace.format import Flag

host_now_ns = time.monotonic_ns
"""The clock of every time in a trace; on Linux all processes of one boot share it."""


class RecordLog(Protocol):
    """Where records go: an ``EventLog``, or memory."""

    def append(self, body: bytes, step: int, start_ns: int, end_ns: int, end_uncertainty_ns: int = 0) -> None:
        """Store one record."""


Mark = Any
"""A point on a device's time line: an int (host nanoseconds) or a device event."""


class Timeline(Protocol):
    """Marks points in time, and writes records once the times of their marks are known."""

    flags: Flag
    """What the times it gives are worth."""

    def mark(self) -> Mark:
        """The current point of the current stream."""

    def write(self, body: bytes, step: int, start: Mark, end: Mark) -> None:
        """Write a record now or, at the latest, when its times are known. A mark may be used in many records."""

    def step_begins(self) -> None:
        """Called between steps: anchor the clock, write what has become known."""

    def close(self) -> None:
        """Write what can still be written."""


class HostTimeline:
    """The time line of work that the host does itself."""

    flags = Flag.NONE
    mark = staticmethod(host_now_ns)

    def __init__(self, log: RecordLog) -> None:
        self.write = log.append

    def step_begins(self) -> None:
        """Nothing to anchor: marks are host times."""

    def close(self) -> None:
        """Nothing is ever pending."""


class CudaTimeline:
    """The time line of a CUDA device.

    Events give durations between each other as float32 milliseconds, 1 us apart at 10 s, so an event is timed
    against an anchor event of its own step. The first anchor is tied to the host clock by one synchronise at
    construction; each later one by its distance to the anchor before. That chain would drift with the device's
    clock, so it is held within what causality allows: no event happens before the host recorded it, and none
    after the host saw it complete. Anchors have a stream of their own, where no work is ahead of them, and the host
    looks a few times whether they have completed: else they could be off by as much as the device lags behind.

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
        self._lent: list[torch.cuda.Event] = []
        self._lent_in_step_before: list[torch.cuda.Event] = []
        self._pending: deque[tuple[bytes, int, torch.cuda.Event, torch.cuda.Event] | _Anchor | _Return] = deque()
        self._anchor = self._first_anchor()

    def mark(self) -> torch.cuda.Event:
        """Record an event on the device's current stream."""
        event = self._record_event()
        self._lent.append(event)
        return event

    def write(self, body: bytes, step: int, start: torch.cuda.Event, end: torch.cuda.Event) -> None:
        """Queue a record until both of its events have completed."""
        self._pending.append((body, step, start, end))

    def step_begins(self) -> None:
        """Start a new anchor, and write the records of all events that have completed by now."""
        # A step's last mark is the start of the next step, so events are taken back one step late.
        self._pending.append(_Return(self._lent_in_step_before))
        self._lent_in_step_before, self._lent = self._lent, []
        self._pending.append(self._next_anchor())
        self._write_completed()

    def close(self) -> None:
        """Write what has completed. What has not is left out: a process that ends must not wait for its device."""
        self._write_completed()

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
        before_ns = host_now_ns()
        event = self._record_event(self._anchor_stream)
        event.synchronize()
        return _Anchor(recorded_ns=before_ns, event=event, time_ns=(before_ns + host_now_ns()) // 2)

    def _write_completed(self) -> None:
        pending = self._pending
        returned: list[torch.cuda.Event] = []
        while pending:
            entry = pending[0]
            if isinstance(entry, _Return):
                returned += entry.events
            elif isinstance(entry, _Anchor):
                if not entry.has_completed():
                    break
                by_distance_ns = self._anchor.time_ns + _distance_ns(self._anchor.event, entry.event)
                entry.time_ns = min(max(by_distance_ns, entry.recorded_ns), entry.seen_ns)
                returned.append(self._anchor.event)
                self._anchor = entry
            else:
                body, step, start, end = entry
                if not (end.query() and start.query()):
                    break
                anchor = self._anchor
                start_ns = anchor.time_ns + _distance_ns(anchor.event, start)
                end_ns = start_ns if end is start else anchor.time_ns + _distance_ns(anchor.event, end)
                self._log.append(body, step, start_ns, end_ns)
            pending.popleft()
        self._pool += returned


class _Anchor:
    """An event whose host time is known once it has completed."""

    __slots__ = ("event", "recorded_ns", "seen_ns", "time_ns")

    def __init__(self, *, recorded_ns: int, event: torch.cuda.Event, time_ns: int = 0) -> None:
        self.recorded_ns = recorded_ns
        self.seen_ns = 0
        """When the host first saw it complete; 0 before."""
        self.event = event
        self.time_ns = time_ns

    def has_completed(self) -> bool:
        """Look, unless that is known."""
        if not self.seen_ns and self.event.query():
            self.seen_ns = host_now_ns()
        return self.seen_ns > 0


class _Return:
    """A place in the queue after which these events are no longer needed."""

    __slots__ = ("events",)

    def __init__(self, events: list[torch.cuda.Event]) -> None:
        self.events = events


_NS_PER_MS: Final = 1e6
_LOOKS: Final = 30
"""At an anchor that has just been recorded: some 50 us at most, where the device lets no stream overtake another."""


def _distance_ns(start: torch.cuda.Event, end: torch.cuda.Event) -> int:
    return round(start.elapsed_time(end) * _NS_PER_MS)


def timeline_of(device: torch.device, log: RecordLog) -> Timeline:
    """The time line on which a device's work is timed."""
    return CudaTimeline(log, device) if device.type == "cuda" else HostTimeline(log)
