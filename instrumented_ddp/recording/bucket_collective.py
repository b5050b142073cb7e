"""Collective of one bucket, from its launch to its record."""

from __future__ import annotations

import threading
from typing import Any, Final

import torch
import torch.distributed as dist

from instrumented_ddp.collective_log.completion import NO_TIMEOUT
from instrumented_ddp.recording.records import BucketRecords
from instrumented_ddp.recording.timing import Mark, RecordLog

_MAX_UNCERTAINTY_NS: Final = 0xFFFFFFFF


class BucketCollective:
    """One in-flight collective of a bucket.

    Args:
        records: its packed records; None writes nothing.
        step: step that it belongs to.
        log: receives its record when the host sees it end; None if a device timer writes it.
    """

    __slots__ = (
        "_is_written",
        "_log",
        "end",
        "is_watched",
        "launch_ns",
        "records",
        "running_ns",
        "start",
        "step",
        "work",
    )

    def __init__(self, records: BucketRecords | None, step: int, log: RecordLog | None = None) -> None:
        self.records = records
        self.step = step
        self.work: dist.Work | torch._C.Future[Any] | None = None
        """Work or future that the process group or the communication hook has returned."""
        self.is_watched = False
        """True if its end is reported by the interception on torch's dispatcher."""
        self.launch_ns = 0
        self.running_ns = 0
        """Time at which it was last seen running, on the host clock."""
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

    @property
    def is_over(self) -> bool:
        """Return whether it has ended, as seen from the host."""
        if self.work is None:
            return False
        return self.work.done() if isinstance(self.work, torch._C.Future) else self.work.is_completed()

    def ended(self, now_ns: int, failed: bool) -> None:
        """Write its record when its end is first reported; later reports are ignored."""
        if failed or self.records is None or self._log is None or not self._is_written.acquire(blocking=False):
            return
        uncertainty_ns = min(max(now_ns - self.running_ns, 0), _MAX_UNCERTAINTY_NS)
        self._log.append(self.records.collective_bounds, self.step, self.launch_ns, now_ns, uncertainty_ns)
