"""The TCP sockets of this process, whoever has opened them.

They belong to others: they are looked at through duplicates of their descriptors that live for microseconds, because
one that is kept would hide from the peer that its connection was closed.
"""

from __future__ import annotations

import os
import socket
import stat
from collections.abc import Iterator
from contextlib import suppress
from typing import Any, Final

_OPEN_FILES: Final = "/proc/self/fd"


def tcp_sockets() -> Iterator[socket.socket]:
    """Duplicates of the process's TCP sockets, each closed when the next one is asked for.

    Raises:
        OSError: the process's open files can't be listed.
    """
    for name in os.listdir(_OPEN_FILES):
        duplicate = _duplicate(int(name))
        if duplicate is None:
            continue
        with duplicate:
            if duplicate.family in (socket.AF_INET, socket.AF_INET6) and duplicate.type == socket.SOCK_STREAM:
                yield duplicate


def endpoint(address: tuple[Any, ...]) -> str:
    """``ip:port``; an IPv4 address is written as one also where a socket of IPv6 carries it."""
    ip = address[0].removeprefix("::ffff:")
    return f"[{ip}]:{address[1]}" if ":" in ip else f"{ip}:{address[1]}"


def _duplicate(descriptor: int) -> socket.socket | None:
    """None if it was closed since, or is no socket."""
    with suppress(OSError):
        if stat.S_ISSOCK(os.fstat(descriptor).st_mode):
            duplicate = os.dup(descriptor)
            try:
                return socket.socket(fileno=duplicate)
            except OSError:
                os.close(duplicate)
    return None
