"""Host clock of all times in a recording, and identifiers of hosts that share a clock or a process table."""

from __future__ import annotations

import os
import socket
import time
from contextlib import suppress
from pathlib import Path
from typing import Final

host_now_ns = time.monotonic_ns
"""Return nanoseconds of ``CLOCK_MONOTONIC``, which on Linux all processes of one boot share (in one time namespace)."""

_INITIAL_TIME_NAMESPACE: Final = "time:[4026531834]"


def get_boot_id() -> str | None:
    """Return an identifier shared by all processes with the same ``CLOCK_MONOTONIC``; None if unknown.

    It is the kernel's boot id, and the time namespace unless it is the machine's initial one, because its clock is
    shifted.
    """
    try:
        boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return None
    try:
        namespace = str(Path("/proc/self/ns/time").readlink())
    except OSError:  # a kernel without time namespaces
        return boot_id
    return boot_id if namespace == _INITIAL_TIME_NAMESPACE else f"{boot_id} {namespace}"


def get_host_id() -> str:
    """Return an identifier shared by all processes that also see each other in /proc."""
    with suppress(OSError):
        return f"{get_boot_id()} {Path('/proc/self/ns/pid').readlink()}"
    return f"{socket.gethostname()} {os.getpid()}"
