"""Check that a recording fits into memory, so that a server survives whatever is put into its folder."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Final

from overlapscope.errors import OverlapScopeError
from overlapscope.trace.log import count_record_bytes
from overlapscope.units import format_bytes

_BYTES_PER_LOGGED: Final = 6
"""Bytes of memory per byte of event log: its tables, and what is computed from them (4.4 to 6.0 measured)."""
_MEMINFO: Final = Path("/proc/meminfo")
_CGROUP: Final = Path("/sys/fs/cgroup")


def require_memory(path: Path, logs: Iterable[Path], share: float = 1.0) -> None:
    """Reject a recording whose event logs are too large for this machine.

    Args:
        share: fraction of the recording that is to be read.

    Raises:
        OverlapScopeError: it needs more memory than is free.
    """
    needed = estimate_memory(logs) * share
    free = free_bytes()
    if free is not None and needed > free:
        raise OverlapScopeError(
            f"{path}: takes about {format_bytes(needed)} of memory, and {format_bytes(free)} are free; choose "
            f"{'some' if share == 1 else 'fewer'} of its steps, such as 100:200, or use a larger machine"
        )


def estimate_memory(logs: Iterable[Path]) -> int:
    """Estimate the memory that a recording with these event logs needs."""
    return _BYTES_PER_LOGGED * sum(map(count_record_bytes, logs))


def free_bytes() -> int | None:
    """Return the memory that is free for this process, in bytes; None if the system doesn't say."""
    try:
        lines = dict(line.split(":") for line in _MEMINFO.read_text().splitlines())
        free = int(lines["MemAvailable"].removesuffix("kB")) * 1024
    except (OSError, ValueError, KeyError):
        return None
    try:
        limit, used = (int((_CGROUP / name).read_text()) for name in ("memory.max", "memory.current"))
    except (OSError, ValueError):  # without a limit, the value is the word "max"
        return free
    return min(free, limit - used)
