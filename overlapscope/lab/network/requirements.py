"""Check of what a machine needs for simulated hosts."""

from __future__ import annotations

import os
import re
import shutil
import sys
from pathlib import Path
from typing import Final

from overlapscope.lab.network.link import Link

_STATUS: Final = Path("/proc/self/status")
_TUN: Final = Path("/dev/net/tun")
_CAPABILITIES: Final = {"CAP_NET_ADMIN": 12, "CAP_SYS_ADMIN": 21}
"""Bit numbers from linux/capability.h."""


def find_missing_requirement(link: Link) -> str | None:
    """Return what this machine lacks for hosts with such links, and how to get it; None if it seems to lack nothing.

    Features that the kernel lacks show only when the hosts are made.
    """
    if sys.platform != "linux":
        return f"this needs network namespaces, which only Linux has; this is {sys.platform}"
    effective = re.search(r"^CapEff:\s*([0-9a-f]+)$", _STATUS.read_text(), re.MULTILINE)
    has = int(effective[1], 16) if effective else 0
    if lacking := [name for name, bit in _CAPABILITIES.items() if not has >> bit & 1]:
        return f"this needs root ({' and '.join(lacking)}) to make network namespaces; run it with sudo"
    if programs := [name for name in ("ip", "tc") if shutil.which(name) is None]:
        return f"there is no program {' and no '.join(programs)}; install the package iproute2"
    if link.latency_ms and not os.access(_TUN, os.R_OK | os.W_OK):
        return f"{_TUN}: can't be used, and a latency needs it; try 'modprobe tun', or leave out the latency"
    return None
