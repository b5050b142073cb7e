"""Observation of a process on this host from outside: /proc, its memory limit, and stacks that faulthandler dumps."""

from __future__ import annotations

import faulthandler
import os
import signal
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TextIO

from overlapscope.diagnosis.process_state import has_process_ended

GONE: Final = "gone"
STOPPED: Final = ("T", "t")
"""States of a process stopped by a signal or a debugger."""

_TICK_NS: Final = 1_000_000_000 // os.sysconf("SC_CLK_TCK")
_PAGE_BYTES: Final = os.sysconf("SC_PAGE_SIZE")
_NO_LIMIT_BYTES: Final = 2**60
_STATE, _USER_TICKS, _SYSTEM_TICKS, _START_TICKS, _RESIDENT_PAGES = 0, 11, 12, 19, 21
"""Indices of fields in ``/proc/PID/stat``, counted from the state (man 5 proc)."""
STACKS_SIGNAL: Final = signal.SIGRTMAX - 3
"""Signal that makes faulthandler dump stacks, chosen such that nothing else uses it."""

STACKS_FILE: Final = "stacks_0.txt"

_kept_open: Final[list[TextIO]] = []
"""Files that faulthandler writes to at a crash. It is never disabled, as the user may have enabled it since."""


@dataclass(frozen=True, kw_only=True)
class ProcessState:
    """State and resource usage of a process at one time."""

    state: str
    """State R, S, D, T or t as in ps; ``gone`` if the process does not exist or is a zombie."""
    start_ticks: int = 0
    """Start time in clock ticks, which distinguishes the process from a later one with the same pid."""
    cpu_ns: int = 0
    resident_bytes: int = 0


def read_process_state(pid: int, start_ticks: int | None = None) -> ProcessState:
    """Return the state of a process.

    Args:
        start_ticks: start time of the process that is meant; another one means that it is gone.
    """
    try:
        with open(f"/proc/{pid}/stat", "rb", buffering=0) as file:
            stat = file.read()
    except OSError:
        return ProcessState(state=GONE)
    fields = stat.rpartition(b")")[2].decode().split()  # the program name may contain any character
    started = int(fields[_START_TICKS])
    if has_process_ended(fields) or (start_ticks is not None and started != start_ticks):
        return ProcessState(state=GONE)
    return ProcessState(
        state=fields[_STATE],
        start_ticks=started,
        cpu_ns=(int(fields[_USER_TICKS]) + int(fields[_SYSTEM_TICKS])) * _TICK_NS,
        resident_bytes=int(fields[_RESIDENT_PAGES]) * _PAGE_BYTES,
    )


def cpu_ns_of_children(pid: int) -> int:
    """Return the CPU time of all descendants of a process, such as data loader workers."""
    total_ns = 0
    with suppress(OSError):  # gone, or a kernel that does not list children
        for thread in os.listdir(f"/proc/{pid}/task"):
            for child in Path(f"/proc/{pid}/task/{thread}/children").read_text().split():
                total_ns += read_process_state(int(child)).cpu_ns + cpu_ns_of_children(int(child))
    return total_ns


def queued_ns(pid: int) -> int:
    """Return how long a process's main thread was runnable without a core to run on; 0 if unknown."""
    with suppress(OSError, ValueError, IndexError):
        return int(Path(f"/proc/{pid}/schedstat").read_text().split()[1])
    return 0


def bytes_read_and_written(pid: int) -> int:
    """Return the bytes that a process read and wrote through files, pipes and sockets; 0 if unknown."""
    with suppress(OSError, ValueError):
        lines = Path(f"/proc/{pid}/io").read_text().splitlines()
        return sum(int(line.split()[1]) for line in lines if line.startswith(("rchar", "wchar")))
    return 0


def can_be_signaled(pid: int, process: ProcessState) -> bool:
    """Return whether a signal with a handler would do no harm: it may end a sleep, or a wait for a file, early."""
    if process.state == "R":
        return True
    with suppress(OSError):
        return "futex" in Path(f"/proc/{pid}/wchan").read_text()
    return False


def memory_limit_bytes() -> int:
    """Return the memory limit of this process's control group, else the machine's memory; 0 if unknown."""
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
    """Return the limits of a group and its parents; in a container only the root may be visible."""
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


class FaulthandlerDump:
    """Registration of faulthandler, which dumps stacks at a crash or on a signal, even if no Python code runs.

    Args:
        folder: folder of the rank.

    Raises:
        OSError, RuntimeError, ValueError: faulthandler can't be registered, or the user handles the signal.
    """

    def __init__(self, folder: Path) -> None:
        if signal.getsignal(STACKS_SIGNAL) not in (signal.SIG_DFL, signal.SIG_IGN):
            raise RuntimeError(f"signal {STACKS_SIGNAL} is in use")
        self._file = (folder / STACKS_FILE).open("w")
        faulthandler.register(STACKS_SIGNAL, file=self._file, all_threads=True)
        if not faulthandler.is_enabled():
            faulthandler.enable(file=self._file)
            _kept_open.append(self._file)

    def close(self) -> None:
        """Stop dumping stacks on request, and remove the file if it is empty."""
        faulthandler.unregister(STACKS_SIGNAL)
        with suppress(ValueError):  # another rank may still send it, and by default the signal kills
            signal.signal(STACKS_SIGNAL, signal.SIG_IGN)
        if os.fstat(self._file.fileno()).st_size == 0:
            with suppress(OSError):
                Path(self._file.name).unlink()
        if self._file not in _kept_open:
            self._file.close()
