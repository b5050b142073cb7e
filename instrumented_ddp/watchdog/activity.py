"""Activity sampling of this process: CPU share, I/O and Python progress, used to tell working from waiting."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Final

from instrumented_ddp.watchdog.process_state import bytes_read_and_written, cpu_ns_of_children, queued_ns
from overlapscope.diagnosis.patience import BUSY_CPU_SHARE
from overlapscope.trace.host import host_now_ns

_FRAMES: Final = 12
_WINDOW_NS: Final = 1_500_000_000
_MIN_CODE_POSITIONS: Final = 3
"""Number of distinct Python code positions, sampled within about a second, that tell work from a polling loop."""
_MIN_IO_BYTES: Final = 1024**2


@dataclass(frozen=True)
class _Sample:
    time_ns: int
    cpu_ns: int
    queued_ns: int
    data_bytes: int
    code_position: tuple[int, ...]


class Activity:
    """Recent activity of a process, over a sliding window of about 1.5 seconds.

    Args:
        pid: process ID of the observed process, which is this one.
    """

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._samples: deque[_Sample] = deque(maxlen=32)

    def sample(self, frames: Sequence[FrameType]) -> None:
        """Record one sample of CPU time, run-queue time, I/O and code position.

        Args:
            frames: stack frames of the main thread, innermost first.
        """
        cpu_ns = time.process_time_ns() + cpu_ns_of_children(self._pid)
        code_position = tuple(part for frame in frames[:_FRAMES] for part in (id(frame.f_code), frame.f_lasti))
        data_bytes = bytes_read_and_written(self._pid)
        self._samples.append(_Sample(host_now_ns(), cpu_ns, queued_ns(self._pid), data_bytes, code_position))

    def cpu_share(self) -> float | None:
        """Return the CPU time used as a share of one core; None with fewer than two samples."""
        recent = self._recent()
        if len(recent) < 2 or recent[-1].time_ns == recent[0].time_ns:
            return None
        used_ns = max(0, recent[-1].cpu_ns - recent[0].cpu_ns)  # the CPU time of children vanishes when they exit
        return used_ns / (recent[-1].time_ns - recent[0].time_ns)

    def is_working(self) -> bool | None:
        """Return whether the process executes Python code, does I/O or queues for a core; None without samples."""
        recent = self._recent()
        if not recent:
            return None
        has_moved = len({sample.code_position for sample in recent}) >= _MIN_CODE_POSITIONS
        moves_data = recent[-1].data_bytes - recent[0].data_bytes >= _MIN_IO_BYTES
        return has_moved or moves_data or self._is_runnable(recent)

    def _is_runnable(self, recent: Sequence[_Sample]) -> bool:
        """Return whether the process computes or queues for a core: on a crowded host it gets little of one.

        A process that waits does not even queue.
        """
        first, last = recent[0], recent[-1]
        queued_share = (last.queued_ns - first.queued_ns) / max(1, last.time_ns - first.time_ns)
        return queued_share + (self.cpu_share() or 0.0) >= BUSY_CPU_SHARE

    def _recent(self) -> list[_Sample]:
        return [one for one in self._samples if self._samples[-1].time_ns - one.time_ns <= _WINDOW_NS]
