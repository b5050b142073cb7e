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
            is_stream = duplicate.getsockopt(socket.SOL_SOCKET, socket.SO_TYPE) == socket.SOCK_STREAM
            if is_stream and duplicate.family in (socket.AF_INET, socket.AF_INET6):
                yield duplicate


def endpoint(address: tuple[Any, ...]) -> str:
    """``ip:port``; an IPv4 address is written as one also where a socket of IPv6 carries it."""
    ip = address[0].removeprefix("::ffff:")
    return f"[{ip}]:{address[1]}" if ":" in ip else f"{ip}:{address[1]}"


def duplicate_of(descriptor: int) -> socket.socket:
    """Another handle of somebody's socket, which leaves that as it is.

    Where the user has called ``socket.setdefaulttimeout``, Python makes the descriptor of each new socket object
    non-blocking, and with it the connection that it shares with others (``init_sockobject`` in Modules/socketmodule.c);
    but not of one that is said to be non-blocking already, which it only believes.

    Raises:
        OSError: it is no socket, or was closed.
    """
    duplicate = os.dup(descriptor)
    try:
        return socket.socket(-1, socket.SOCK_STREAM | socket.SOCK_NONBLOCK, -1, duplicate)
    except OSError:
        os.close(duplicate)
        raise


def _duplicate(descriptor: int) -> socket.socket | None:
    """None if it was closed since, or is no socket."""
    with suppress(OSError):
        if stat.S_ISSOCK(os.fstat(descriptor).st_mode):
            return duplicate_of(descriptor)
    return None
