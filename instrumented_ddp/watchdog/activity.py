"""Whether this process does anything while it is asked whether it does: CPU, data, and where its Python code is."""

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
_LAST_NS: Final = 1_500_000_000
_MOVES: Final = 3
"""Places in Python's code, seen within a second or so, that tell work from waiting in a loop."""
_MUCH_DATA_BYTES: Final = 1024**2


@dataclass(frozen=True)
class _Sample:
    time_ns: int
    cpu_ns: int
    queued_ns: int
    data_bytes: int
    place: tuple[int, ...]


class Activity:
    """What a process has done in the last second or so.

    Args:
        pid: of this process.
    """

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._samples: deque[_Sample] = deque(maxlen=32)

    def sample(self, frames: Sequence[FrameType]) -> None:
        """Take a look.

        Args:
            frames: of its main thread, the innermost first.
        """
        cpu_ns = time.process_time_ns() + cpu_ns_of_children(self._pid)
        place = tuple(part for frame in frames[:_FRAMES] for part in (id(frame.f_code), frame.f_lasti))
        data_bytes = bytes_read_and_written(self._pid)
        self._samples.append(_Sample(host_now_ns(), cpu_ns, queued_ns(self._pid), data_bytes, place))

    def cpu_share(self) -> float | None:
        """Of one core; None if nobody has looked twice."""
        recent = self._recent()
        if len(recent) < 2 or recent[-1].time_ns == recent[0].time_ns:
            return None
        used_ns = max(0, recent[-1].cpu_ns - recent[0].cpu_ns)  # what children used is forgotten when they end
        return used_ns / (recent[-1].time_ns - recent[0].time_ns)

    def is_working(self) -> bool | None:
        """It moves through Python's code, reads and writes, or queues for a core; None if nobody has looked."""
        recent = self._recent()
        if not recent:
            return None
        has_moved = len({sample.place for sample in recent}) >= _MOVES
        moves_data = recent[-1].data_bytes - recent[0].data_bytes >= _MUCH_DATA_BYTES
        return has_moved or moves_data or self._wants_a_core(recent)

    def _wants_a_core(self, recent: Sequence[_Sample]) -> bool:
        """On a crowded host who computes gets little of a core; who waits does not even queue for one."""
        first, last = recent[0], recent[-1]
        queued_share = (last.queued_ns - first.queued_ns) / max(1, last.time_ns - first.time_ns)
        return queued_share + (self.cpu_share() or 0.0) >= BUSY_CPU_SHARE

    def _recent(self) -> list[_Sample]:
        return [one for one in self._samples if self._samples[-1].time_ns - one.time_ns <= _LAST_NS]
