"""The clock of every time in a trace, and what tells whether two processes share it and see each other."""

from __future__ import annotations

import os
import socket
import time
from contextlib import suppress
from pathlib import Path
from typing import Final

host_now_ns = time.monotonic_ns
"""Nanoseconds of ``CLOCK_MONOTONIC``, which on Linux all processes of one boot share (in one time namespace)."""

_INITIAL_TIME_NAMESPACE: Final = "time:[4026531834]"


def boot_identity() -> str | None:
    """What processes that share ``CLOCK_MONOTONIC`` have in common; None if that can't be known.

    It is the kernel's boot id, and the time namespace where that is not the machine's own: its clock is shifted.
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


def host_identity() -> str:
    """What processes have in common that also see each other in /proc."""
    with suppress(OSError):
        return f"{boot_identity()} {Path('/proc/self/ns/pid').readlink()}"
    return f"{socket.gethostname()} {os.getpid()}"
