"""TCP sockets of this process, including those opened by other libraries.

They are inspected through duplicates of their descriptors that live for microseconds: a duplicate that was kept open
would hide from the peer that its connection was closed.
"""

from __future__ import annotations

import os
import socket
import stat
from collections.abc import Iterator
from contextlib import suppress
from typing import Any, Final

_OPEN_FILES: Final = "/proc/self/fd"


def iter_tcp_sockets() -> Iterator[socket.socket]:
    """Yield duplicates of the process's TCP sockets, each closed when the next one is requested.

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
    """Format an address as ``ip:port``; IPv4 addresses of an IPv6 socket are written as IPv4."""
    ip = address[0].removeprefix("::ffff:")
    return f"[{ip}]:{address[1]}" if ":" in ip else f"{ip}:{address[1]}"


def duplicate_socket(descriptor: int) -> socket.socket:
    """Return another handle of a socket without changing the original.

    If the user has called ``socket.setdefaulttimeout``, Python makes the descriptor of each new socket object
    non-blocking, and with it the connection shared with the original (``init_sockobject`` in
    Modules/socketmodule.c). It does not if the socket is declared non-blocking already, which Python does not verify.

    Raises:
        OSError: it is not a socket, or was closed.
    """
    duplicate = os.dup(descriptor)
    try:
        return socket.socket(-1, socket.SOCK_STREAM | socket.SOCK_NONBLOCK, -1, duplicate)
    except OSError:
        os.close(duplicate)
        raise


def _duplicate(descriptor: int) -> socket.socket | None:
    """Return a duplicate; None if the descriptor was closed meanwhile, or is not a socket."""
    with suppress(OSError):
        if stat.S_ISSOCK(os.fstat(descriptor).st_mode):
            return duplicate_socket(descriptor)
    return None
