"""Whether a process that wrote a log still exists, according to /proc."""

from __future__ import annotations

import socket
import time
from pathlib import Path
from typing import Any, Final

from overlapscope.diagnosis.evidence import Liveness
from overlapscope.trace import host

_STATE: Final = 0
_START_TICKS: Final = 19
_TICK_NS: Final = 10_000_000
"""Clock ticks of /proc: 100 a second on all of Linux."""
_TOLERANCE_NS: Final = 1_000_000_000
_STATES: Final[dict[str, Liveness]] = {"R": "running", "T": "stopped", "t": "stopped", "Z": "gone", "X": "gone"}


def is_here(where: dict[str, Any]) -> bool:
    """The rank with such a ``rank.json`` runs, or ran, on this host and since it was booted."""
    return where.get("host") == socket.gethostname() and where.get("boot_id") == host.boot_identity() is not None


def liveness_of(where: dict[str, Any]) -> Liveness:
    """The state of the process of a ``rank.json``; only for a process on this host."""
    try:
        text = Path(f"/proc/{int(where['pid'])}/stat").read_text()
    except (OSError, KeyError, TypeError, ValueError):
        return "gone"
    fields = text.rpartition(")")[2].split()  # the name of the program may hold anything
    if _is_of_a_later_process(int(fields[_START_TICKS]), where):
        return "gone"
    return _STATES.get(fields[_STATE], "sleeping")


def began_ns() -> int | None:
    """When this process began, on the clock of its host, to a hundredth of a second; None if that is not known."""
    try:
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        return _on_clock_ns(int(fields[_START_TICKS]))
    except (OSError, IndexError, ValueError):
        return None


def _is_of_a_later_process(start_ticks: int, where: dict[str, Any]) -> bool:
    """Whether the pid now belongs to another process, started after this one wrote ``rank.json``."""
    begun_ns = written_ns(where)
    return begun_ns is not None and _on_clock_ns(start_ticks) > begun_ns + _TOLERANCE_NS


def _on_clock_ns(start_ticks: int) -> int:
    asleep_ns = time.clock_gettime_ns(time.CLOCK_BOOTTIME) - time.clock_gettime_ns(time.CLOCK_MONOTONIC)
    return start_ticks * _TICK_NS - asleep_ns


def written_ns(where: dict[str, Any]) -> int | None:
    """When a ``rank.json`` or ``joining.json`` was written, on the clock of its host; None if it does not say."""
    try:
        return int(where["time_ns"] if "time_ns" in where else where["clock_samples"][0]["monotonic_ns"])
    except (KeyError, IndexError, TypeError, ValueError):
        return None
