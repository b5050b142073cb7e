"""The kernel's view of a process on this host: whether it is there and runs, what it has used, how much it may use."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from overlapscope.diagnosis.process import has_ended

GONE: Final = "gone"
STOPPED: Final = ("T", "t")
"""States of a process stopped by a signal or a debugger."""

_TICK_NS: Final = 1_000_000_000 // os.sysconf("SC_CLK_TCK")
_PAGE_BYTES: Final = os.sysconf("SC_PAGE_SIZE")
_NO_LIMIT_BYTES: Final = 2**60
_STATE, _USER_TICKS, _SYSTEM_TICKS, _START_TICKS, _RESIDENT_PAGES = 0, 11, 12, 19, 21
"""Places in ``/proc/PID/stat``, counted from the state (man 5 proc)."""


@dataclass(frozen=True, kw_only=True)
class ProcessState:
    """One look at a process."""

    state: str
    """R, S, D, T, t as in ps; ``gone`` if there is none, or what is left of one that has ended."""
    start_ticks: int = 0
    """Start time, which distinguishes it from a later process with the same pid."""
    cpu_ns: int = 0
    resident_bytes: int = 0


def look_at(pid: int, start_ticks: int | None = None) -> ProcessState:
    """The state of a process.

    Args:
        start_ticks: of the process that is meant; a different one means that it is gone.
    """
    try:
        with open(f"/proc/{pid}/stat", "rb", buffering=0) as file:
            stat = file.read()
    except OSError:
        return ProcessState(state=GONE)
    fields = stat.rpartition(b")")[2].decode().split()  # the name of the program may hold anything
    started = int(fields[_START_TICKS])
    if has_ended(fields) or (start_ticks is not None and started != start_ticks):
        return ProcessState(state=GONE)
    return ProcessState(
        state=fields[_STATE],
        start_ticks=started,
        cpu_ns=(int(fields[_USER_TICKS]) + int(fields[_SYSTEM_TICKS])) * _TICK_NS,
        resident_bytes=int(fields[_RESIDENT_PAGES]) * _PAGE_BYTES,
    )


def cpu_ns_of_children(pid: int) -> int:
    """CPU time of all descendants of a process, such as data loader workers."""
    total_ns = 0
    with suppress(OSError):  # gone, or a kernel that does not list children
        for thread in os.listdir(f"/proc/{pid}/task"):
            for child in Path(f"/proc/{pid}/task/{thread}/children").read_text().split():
                total_ns += look_at(int(child)).cpu_ns + cpu_ns_of_children(int(child))
    return total_ns


def queued_ns(pid: int) -> int:
    """How long a process's main thread has been ready to run without a core to run on; 0 if unknown."""
    with suppress(OSError, ValueError, IndexError):
        return int(Path(f"/proc/{pid}/schedstat").read_text().split()[1])
    return 0


def bytes_read_and_written(pid: int) -> int:
    """Bytes that a process read and wrote, through files, pipes and sockets; 0 if unknown."""
    with suppress(OSError, ValueError):
        lines = Path(f"/proc/{pid}/io").read_text().splitlines()
        return sum(int(line.split()[1]) for line in lines if line.startswith(("rchar", "wchar")))
    return 0


def can_be_signalled(pid: int, process: ProcessState) -> bool:
    """Whether a signal with a handler would do no harm: it may end a sleep, or a wait for a file, early."""
    if process.state == "R":
        return True
    with suppress(OSError):
        return "futex" in Path(f"/proc/{pid}/wchan").read_text()
    return False


def memory_limit_bytes() -> int:
    """Memory limit of this process's control group, else the machine's memory; 0 if unknown."""
    limits = [*_limits_of_control_group(), _memory_of_machine()]
    return min((limit for limit in limits if 0 < limit < _NO_LIMIT_BYTES), default=0)


def _limits_of_control_group() -> list[int]:
    limits = []
    with suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if not controllers:  # version 2
                limits += _limits_above(Path("/sys/fs/cgroup"), path, "memory.max")
            elif "memory" in controllers.split(","):
                limits += _limits_above(Path("/sys/fs/cgroup/memory"), path, "memory.limit_in_bytes")
    return limits


def _limits_above(root: Path, path: str, name: str) -> list[int]:
    """Limits of a group and its parents; in a container only the root may be visible."""
    limits = []
    group = root / path.lstrip("/")
    for folder in (group, *group.parents):
        with suppress(OSError, ValueError):
            limits.append(int((folder / name).read_text()))
        if folder == root:
            break
    return limits


def _memory_of_machine() -> int:
    with suppress(OSError, ValueError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemTotal:"):
                return int(line.split()[1]) * 1024
    return 0
