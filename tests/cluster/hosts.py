"""Hosts of ``overlapscope.lab.network`` for tests: whether this machine can have them, and ranks that enter them."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Final

from overlapscope.errors import OverlapScopeError
from overlapscope.lab.network.hosts import INTERFACE, Hosts, make_cluster
from overlapscope.lab.network.link import Link, find_missing_requirement

_CLONE_NEWNET: Final = 0x40000000
"""Of linux/sched.h."""


def why_unavailable() -> str | None:
    """What this machine lacks for clusters; None if it can have them."""
    if missing := find_missing_requirement(Link(bits_per_s=1e8)):
        return missing
    try:
        with make_cluster(1) as hosts:
            hosts.limit_rate(0, "100mbit")
    except OverlapScopeError as error:
        return str(error)
    return None


def entrance_to(hosts: Hosts) -> Callable[[int], None]:
    """For ``Ranks``: brings each rank's process onto the host of its number."""
    return partial(_enter, hosts.namespaces)


def _enter(namespaces: tuple[str, ...], host: int) -> None:
    """``ip netns exec``, for a process that runs already."""
    os.environ["GLOO_SOCKET_IFNAME"] = INTERFACE
    libc = ctypes.CDLL(None, use_errno=True)
    with Path("/run/netns", namespaces[host]).open() as file:
        if libc.setns(file.fileno(), _CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), "setns")
