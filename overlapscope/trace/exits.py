"""Exit records ``exits_*.jsonl``: how processes ended, according to their parent process.

A launcher knows what a rank can't record itself: the signal that killed it, its exit status, and whether the launcher
had signaled it to end before.
"""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from overlapscope.trace import host
from overlapscope.trace.checksum import dump_json_line
from overlapscope.trace.folders import read_lines
from overlapscope.trace.log import Problem

WATCHDOG_ABORT_STATUS: Final = 70
"""Exit status of a process that its watchdog ended because it did not react."""
EXITS_PATTERN: Final = "exits_*.jsonl"


@dataclass(frozen=True, kw_only=True)
class ProcessExit:
    """End of a process."""

    pid: int
    boot_id: str | None
    """Boot id of the host that it ran on."""
    status: int
    """Exit status; -N if signal N killed it."""
    time_ns: int
    """Time when the exit was noticed, on the host's clock."""
    signaled_at_ns: int | None = None
    """Time of the first signal from the parent process; None if it ended without one. For the recorded command: time of
    the first Ctrl-C or SIGTERM meant for it."""
    signal_received: int | None = None
    """Number of that signal; None also if it is unknown, as in older recordings."""
    is_command: bool = False
    """True if the process is the recorded command and not a rank."""


def write_exit(
    folder: Path,
    pid: int,
    status: int,
    *,
    signaled_at_ns: int | None = None,
    signal_received: int | None = None,
    is_command: bool = False,
) -> None:
    """Append a record to the file of this process.

    Raises:
        OSError: it can't be written.
    """
    line = {
        "pid": pid,
        "boot_id": host.get_boot_id(),
        "status": status,
        "time_ns": host.host_now_ns(),
        "signaled_at_ns": signaled_at_ns,
        "signal_received": signal_received,
        "is_command": is_command,
    }
    with (folder / f"exits_{socket.gethostname()}_{os.getpid()}.jsonl").open("a", encoding="utf-8") as file:
        file.write(dump_json_line(line))


def read_exits(folder: Path, problems: list[Problem]) -> list[ProcessExit]:
    """Read the exit records of all processes, in no particular order."""
    paths = sorted(folder.glob(EXITS_PATTERN))
    return [found for path in paths for found in read_lines(path, problems, lambda line: [_exit_of(line)])]


def _exit_of(line: dict[str, Any]) -> ProcessExit:
    signaled_at_ns, signal_received, boot_id = line["signaled_at_ns"], line.get("signal_received"), line["boot_id"]
    return ProcessExit(
        pid=int(line["pid"]),
        boot_id=None if boot_id is None else str(boot_id),
        status=int(line["status"]),
        time_ns=int(line["time_ns"]),
        signaled_at_ns=None if signaled_at_ns is None else int(signaled_at_ns),
        signal_received=None if signal_received is None else int(signal_received),
        is_command=bool(line["is_command"]),
    )
