"""State of the process that wrote a log, according to /proc."""

from __future__ import annotations

import socket
import time
from collections.abc import Sequence
from pathlib import Path
from signal import SIGKILL
from typing import Any, Final

from overlapscope.diagnosis.evidence import Liveness
from overlapscope.trace import host

_STATE: Final = 0
_FLAGS: Final = 6
_START_TICKS: Final = 19
_PENDING_SIGNALS: Final = 28
"""Indices of fields in ``/proc/PID/stat``, counted from the state (man 5 proc)."""
_EXITING: Final = 0x4
"""``PF_EXITING`` (include/linux/sched.h)."""
_KILLED: Final = 1 << (SIGKILL - 1)
_TICK_NS: Final = 10_000_000
"""Duration of a clock tick of /proc: 100 a second on all of Linux."""
_TOLERANCE_NS: Final = 1_000_000_000
_STATES: Final[dict[str, Liveness]] = {"R": "running", "T": "stopped", "t": "stopped"}


def is_on_this_host(where: dict[str, Any]) -> bool:
    """Return True if the rank with such a ``rank.json`` runs, or ran, on this host and since it was booted."""
    return where.get("host") == socket.gethostname() and where.get("boot_id") == host.get_boot_id() is not None


def read_liveness(where: dict[str, Any]) -> Liveness:
    """Return the state of the process of a ``rank.json``; only for a process on this host."""
    try:
        text = Path(f"/proc/{int(where['pid'])}/stat").read_text()
    except (OSError, KeyError, TypeError, ValueError):
        return "gone"
    fields = text.rpartition(")")[2].split()  # the name of the program may contain any character
    if has_process_ended(fields) or _is_of_a_later_process(int(fields[_START_TICKS]), where):
        return "gone"
    return _STATES.get(fields[_STATE], "sleeping")


def has_process_ended(fields: Sequence[str]) -> bool:
    """Return True if a process will never run again: only its exit code is left, or the kernel is taking it down.

    Args:
        fields: fields of its ``/proc/PID/stat``, from the state on.
    """
    is_exiting = bool(int(fields[_FLAGS]) & _EXITING or int(fields[_PENDING_SIGNALS]) & _KILLED)
    return is_exiting or fields[_STATE] in ("Z", "X", "x")


def read_process_start_ns() -> int | None:
    """Return when this process started, on the clock of its host, to a hundredth of a second; None if unknown."""
    try:
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        return _on_clock_ns(int(fields[_START_TICKS]))
    except (OSError, IndexError, ValueError):
        return None


def _is_of_a_later_process(start_ticks: int, where: dict[str, Any]) -> bool:
    """Return True if the PID now belongs to another process, started after this one wrote ``rank.json``."""
    begun_ns = parse_written_ns(where)
    return begun_ns is not None and _on_clock_ns(start_ticks) > begun_ns + _TOLERANCE_NS


def _on_clock_ns(start_ticks: int) -> int:
    asleep_ns = time.clock_gettime_ns(time.CLOCK_BOOTTIME) - time.clock_gettime_ns(time.CLOCK_MONOTONIC)
    return start_ticks * _TICK_NS - asleep_ns


def parse_written_ns(where: dict[str, Any]) -> int | None:
    """Return when a ``rank.json`` or ``joining.json`` was written, on the clock of its host; None if unknown."""
    try:
        return int(where["time_ns"] if "time_ns" in where else where["clock_samples"][0]["monotonic_ns"])
    except (KeyError, IndexError, TypeError, ValueError):
        return None
