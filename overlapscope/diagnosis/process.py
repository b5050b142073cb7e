"""Whether a process that has written a log is still there, as /proc says."""

from __future__ import annotations

import socket
import time
from pathlib import Path
from typing import Any, Final

from overlapscope.diagnosis.evidence import Liveness

_STATE: Final = 0
_START_TICKS: Final = 19
_TICK_NS: Final = 10_000_000
"""Of /proc: 100 a second, on all of Linux."""
_TOLERANCE_NS: Final = 1_000_000_000
_STATES: Final[dict[str, Liveness]] = {"R": "running", "T": "stopped", "t": "stopped", "Z": "gone", "X": "gone"}
_INITIAL_TIME_NAMESPACE: Final = "time:[4026531834]"


def boot_identity() -> str | None:
    """As in ``rank.json``: equal for processes that share a clock."""
    try:
        boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return None
    try:
        namespace = str(Path("/proc/self/ns/time").readlink())
    except OSError:
        return boot_id
    return boot_id if namespace == _INITIAL_TIME_NAMESPACE else f"{boot_id} {namespace}"


def is_here(where: dict[str, Any]) -> bool:
    """The rank with such a ``rank.json`` runs, or ran, on this host and since it was booted."""
    return where.get("host") == socket.gethostname() and where.get("boot_id") == boot_identity() is not None


def liveness_of(where: dict[str, Any]) -> Liveness:
    """What has become of the process of a ``rank.json``; only of one that is here."""
    try:
        text = Path(f"/proc/{int(where['pid'])}/stat").read_text()
    except (OSError, KeyError, TypeError, ValueError):
        return "gone"
    fields = text.rpartition(")")[2].split()  # the name of the program may hold anything
    if _is_of_a_later_process(int(fields[_START_TICKS]), where):
        return "gone"
    return _STATES.get(fields[_STATE], "sleeping")


def _is_of_a_later_process(start_ticks: int, where: dict[str, Any]) -> bool:
    """The number was given to another process, which began after this one had written ``rank.json``."""
    try:
        written_ns = int(where["clock_samples"][0]["monotonic_ns"])
    except (KeyError, IndexError, TypeError, ValueError):
        return False
    asleep_ns = time.clock_gettime_ns(time.CLOCK_BOOTTIME) - time.clock_gettime_ns(time.CLOCK_MONOTONIC)
    return start_ticks * _TICK_NS > written_ns + asleep_ns + _TOLERANCE_NS
