"""Records packed ahead of time: everything but the times is known once a plan is."""

from __future__ import annotations

import threading
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, TextIO

import torch
import torch.distributed as dist

from instrumented_ddp.bucket_plan import BucketPlan, Traffic, dtype_name
from instrumented_ddp.collectives.completion import NO_TIMEOUT, HostCollective
from instrumented_ddp.collectives.roles import CollectiveRole
from instrumented_ddp.recording.timing import Mark, RecordLog
from overlapscope.trace.schema import NO_CALL_SITE, NO_INDEX, SEGMENTS_FILE, Flag, Kind, Phase, Segment, pack_body


class PlanRecords:
    """Packed records of one bucket plan."""

    def __init__(self, timer_flags: Flag, model: int, epoch: int, plan: BucketPlan) -> None:
        self.devices = [parameter.device for parameter in plan.parameters]
        """Device of each parameter."""
        self._common: dict[str, Any] = {"model": model, "plan_epoch": epoch, "plan_hash": int(plan.hash[:8], 16)}
        all_elements = sum(parameter.elements for parameter in plan.parameters)
        self.plan = pack_body(Kind.PLAN, elements=all_elements, **self._common)
        numbers = range(len(plan.buckets))
        purposes = [
            CollectiveRole(role="bucket", model=model, plan_epoch=epoch, plan_hash=plan.hash, bucket=number)
            for number in numbers
        ]

        def records_of(number: int, traffic: Traffic) -> BucketRecords:
            what = {"dtype": dtype_name(traffic.dtype), "elements": traffic.elements, **self._common}
            return BucketRecords(timer_flags, purposes[number], traffic.op, index=number, **what)

        self.buckets = [records_of(number, plan.reduced(number)) for number in numbers]
        self.gathers = [
            None if (traffic := plan.gathered(number)) is None else records_of(number, traffic) for number in numbers
        ]
        """Records of the all-gather of each bucket's parameters; None if there is none."""
        self.gradient_ready = [
            pack_body(
                Kind.GRADIENT_READY,
                flags=timer_flags,
                index=index,
                dtype=dtype_name(parameter.dtype),
                elements=parameter.elements,
                **self._common,
            )
            for index, parameter in enumerate(plan.parameters)
        ]


class BucketRecords:
    """Packed records of one bucket, or of the buffers, which are broadcast like one."""

    def __init__(self, timer_flags: Flag, purpose: CollectiveRole, op: str = "all_reduce", **what: Any) -> None:
        self.purpose = purpose
        self.segments: dict[Segment, tuple[CollectiveRole, bytes]] = {}
        """Rounds of its sum seen so far: the purpose of their messages, and their records."""
        self.ready = pack_body(Kind.BUCKET_READY, flags=timer_flags, **what)
        self.copy_in = pack_body(Kind.COPY_IN, flags=timer_flags, **what)
        self.copy_out = pack_body(Kind.COPY_OUT, flags=timer_flags, **what)
        self.collective = pack_body(Kind.COLLECTIVE, op=op, flags=timer_flags, **what)
        bounds = timer_flags | Flag.START_IS_LOWER_BOUND | Flag.END_IS_UPPER_BOUND
        self.collective_bounds = pack_body(Kind.COLLECTIVE, op=op, flags=bounds, **what)
        self.collective_polled = pack_body(Kind.COLLECTIVE, op=op, flags=bounds | Flag.END_IS_POLLED, **what)
        self.is_long = False
        """True if a thread that waits for its end costs next to nothing compared with the latest one."""
        self._flags, self._fields = timer_flags, {"op": op, **what}
        self._by_operation: dict[str, BucketRecords] = {}
        self._launch = {NO_CALL_SITE: pack_body(Kind.LAUNCH, **self._fields)}

    def for_operation(self, op: str, elements: int | None = None) -> BucketRecords:
        """Return the records of one of several operations that this bucket's sum consists of; packed once.

        Args:
            elements: number of elements of its buffer; None uses that of the bucket.
        """
        if op not in self._by_operation:
            what = self._fields | {"op": op} | ({} if elements is None else {"elements": elements})
            self._by_operation[op] = BucketRecords(self._flags, self.purpose, **what)
        return self._by_operation[op]

    def launch(self, call_site: int) -> bytes:
        """Return the launch record for a line of user code; packed once per line."""
        body = self._launch.get(call_site)
        if body is None:
            body = self._launch[call_site] = pack_body(Kind.LAUNCH, call_site=call_site, **self._fields)
        return body

    def segment(self, number: int) -> bytes:
        """Return the record of a round of the sum, by the number of its line in ``segments.jsonl``."""
        known = {name: self._fields[name] for name in ("model", "plan_epoch", "plan_hash")}
        return pack_body(Kind.SEGMENT, flags=self._flags, index=number, **known)


def make_buffer_records(timer_flags: Flag, model: int, elements: int, dtype: str) -> BucketRecords:
    """Return the records of a broadcast of buffers."""
    purpose = CollectiveRole(role="buffers", model=model)
    return BucketRecords(
        timer_flags, purpose, op="broadcast", index=NO_INDEX, model=model, elements=elements, dtype=dtype
    )


def make_bitmap_records(timer_flags: Flag, model: int, elements: int, dtype: str) -> BucketRecords:
    """Return the records of the all-reduce of the bitmap of used parameters."""
    purpose = CollectiveRole(role="bitmap", model=model)
    return BucketRecords(timer_flags, purpose, index=NO_INDEX, model=model, elements=elements, dtype=dtype)


ENTER_RECORDS: Final = tuple(pack_body(Kind.PHASE_BEGIN, index=phase) for phase in Phase)
"""Records of the start of each phase, indexed by phase."""


def make_phase_records(timer_flags: Flag, *, no_sync: bool) -> tuple[bytes, ...]:
    """Return the records of the end of each phase, indexed by phase, for a pass with or without ``no_sync()``."""
    flags = timer_flags | (Flag.NO_SYNC if no_sync else Flag.NONE)
    return tuple(pack_body(Kind.PHASE, index=phase, flags=flags) for phase in Phase)


_MAX_UNCERTAINTY_NS: Final = 0xFFFFFFFF
_LONG_NS: Final = 5_000_000
"""Duration of a collective of which a thread that waits for it takes half a percent."""


class BucketCollective:
    """One collective of a bucket, from its launch to its record.

    Args:
        records: its packed records; None writes nothing.
        step: step that it belongs to.
        log: receives its record when the host sees it end; None if a device timer writes it.
        is_full: whether its step is recorded in full.
    """

    __slots__ = (
        "_is_written",
        "_log",
        "end",
        "is_over",
        "is_waited_for",
        "launch_ns",
        "records",
        "running_ns",
        "start",
        "step",
        "watched",
        "work",
    )

    def __init__(
        self, records: BucketRecords | None, step: int, log: RecordLog | None = None, *, is_full: bool = True
    ) -> None:
        self.records = records
        self.step = step
        self.work: dist.Work | torch._C.Future[Any] | None = None
        """Work or future that the process group or the communication hook has returned."""
        self.watched: HostCollective | None = None
        """What ``CompletionWatch`` knows it by; None if its end is not reported."""
        self.is_waited_for = is_full or (records is not None and records.is_long)
        """True if a thread waits for its end on the host, false if the training sees it in passing."""
        self.launch_ns = 0
        self.running_ns = 0
        """Time at which it was last seen running, on the host clock."""
        self.is_over = False
        """True once its end is recorded."""
        self.start: Mark = None
        self.end: Mark = None
        self._log = log
        self._is_written = threading.Lock()  # acquired once, by the first thread (maybe the training's) to see the end

    def wait(self) -> None:
        """Make the current stream wait for it; on CPU, block the host."""
        if isinstance(self.work, torch._C.Future):
            self.work.wait()
        elif self.work is not None:
            self.work.wait(NO_TIMEOUT)  # a process group written in Python may require the argument

    def ended(self, now_ns: int, failed: bool) -> None:
        """Write its record when its end is first reported; later reports are ignored."""
        records = self.records
        if failed or records is None or self._log is None or not self._is_written.acquire(blocking=False):
            return
        self.is_over = True
        uncertainty_ns = min(max(now_ns - self.running_ns, 0), _MAX_UNCERTAINTY_NS)
        records.is_long = now_ns - self.launch_ns >= _LONG_NS
        body = records.collective_bounds if self.is_waited_for else records.collective_polled
        self._log.append(body, self.step, self.launch_ns, now_ns, uncertainty_ns)


_MAX_SEGMENTS: Final = 100_000
"""Limit for a strategy whose rounds are never equal; rounds beyond it get number 0, and belong to no bucket."""


class SegmentTable:
    """Table of the distinct rounds of bucket sums: a number for each, and a line in ``segments.jsonl``.

    Args:
        folder: folder of this rank; the file is created with the first round.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / SEGMENTS_FILE
        self._file: TextIO | None = None
        self._numbers: dict[Segment, int] = {}
        self._lock = threading.Lock()

    def number_of(self, segment: Segment) -> int:
        """Return the number of a round's line; 0 if the table is full."""
        number = self._numbers.get(segment)
        if number is not None:
            return number
        with self._lock:
            if segment in self._numbers or len(self._numbers) >= _MAX_SEGMENTS:
                return self._numbers.get(segment, 0)
            number = self._numbers[segment] = len(self._numbers) + 1
            with suppress(OSError, ValueError):  # a full disk, or closed a moment ago
                if self._file is None:
                    self._file = self._path.open("x", encoding="utf-8")
                self._file.write(segment.to_json(number))
                self._file.flush()
        return number

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
