"""Clock server of rank 0, which other hosts ping.

The protocol is TCP. A client sends the first half of the token, and the server answers with the second. Then each ping
is a number of 8 bytes, and its answer is this number and the host's clock in nanoseconds. A farewell is an unrequested
answer: the server closes soon, and clients have ``CLOSING_TIME_S`` for a last burst.
"""

from __future__ import annotations

import os
import secrets
import selectors
import socket
import struct
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Final

from overlapscope.trace.host import host_now_ns

PING: Final = struct.Struct("<Q")
ANSWER: Final = struct.Struct("<Qq")
FAREWELL: Final = 2**64 - 1
HALF_TOKEN_BYTES: Final = 16
CLOSING_TIME_S: Final = 1.0

_MAX_UNAUTHENTICATED: Final = 256
"""Maximum number of connections that have not sent the token; beyond that, the oldest are closed."""
_ROUTES: Final = ("192.0.2.1", "2001:db8::1")
"""Addresses reserved for documentation, routed to the default gateway."""


class ClockServer:
    """Clock server on a free port of all interfaces; answers while ``serve`` runs."""

    def __init__(self) -> None:
        self.token = secrets.token_bytes(2 * HALF_TOKEN_BYTES)
        dual = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if dual else socket.AF_INET
        self._listener = socket.create_server(("", 0), family=family, backlog=1024, dualstack_ipv6=dual)
        self._listener.setblocking(False)
        self.port: int = self._listener.getsockname()[1]
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._partial_pings: dict[socket.socket, bytes] = {}
        """Bytes of an incomplete ping received from each client."""
        self._unauthenticated: dict[socket.socket, bytes] = {}
        """Bytes received from each connection that has not sent the token."""

    def __enter__(self) -> ClockServer:
        return self

    def __exit__(self, *_: object) -> None:
        for connection in [*self._partial_pings, *self._unauthenticated]:
            self._drop(connection)
        self._selector.close()
        self._listener.close()

    def addresses(self) -> list[str]:
        """Return addresses of this host, most likely first; loopback is for other network namespaces of this host."""
        found = [_local_address_towards(host) for host in (os.environ.get("MASTER_ADDR"), *_ROUTES) if host]
        with suppress(OSError):
            found += [str(address[0]) for *_, address in socket.getaddrinfo(socket.gethostname(), None)]
        return [*dict.fromkeys(address for address in found if address and not _is_loopback(address)), "127.0.0.1"]

    def serve(self, *, woken: socket.socket, until: Callable[[], bool]) -> None:
        """Answer pings until it is time to close, and then until clients have had their last burst.

        Args:
            woken: becomes readable when ``until`` should be called.
        """
        self._selector.register(woken, selectors.EVENT_READ)
        closes_at: float | None = None
        while closes_at is None or (self._partial_pings and time.monotonic() < closes_at):
            for key, _ in self._selector.select(None if closes_at is None else closes_at - time.monotonic()):
                if key.fileobj is woken:
                    if until():
                        self._selector.unregister(woken)
                        closes_at = time.monotonic() + CLOSING_TIME_S
                        self._send_farewell()
                elif key.fileobj is self._listener:
                    self._accept()
                elif isinstance(key.fileobj, socket.socket):
                    self._receive(key.fileobj)

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except (BlockingIOError, ConnectionError):  # it is gone again
            return
        except OSError:  # no file descriptor is left: only existing clients are served
            self._selector.unregister(self._listener)
            return
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._unauthenticated[connection] = b""
        self._selector.register(connection, selectors.EVENT_READ)
        if len(self._unauthenticated) > _MAX_UNAUTHENTICATED:
            self._drop(next(iter(self._unauthenticated)))

    def _receive(self, connection: socket.socket) -> None:
        """Read what has arrived. A client that is gone, unknown, or does not take its answers is dropped."""
        if connection not in self._partial_pings and connection not in self._unauthenticated:
            return  # dropped a moment ago
        try:
            data = connection.recv(4096)
            if not data:
                self._drop(connection)
            elif connection in self._partial_pings:
                self._answer(connection, self._partial_pings[connection] + data)
            else:
                self._authenticate(connection, self._unauthenticated[connection] + data)
        except OSError:
            self._drop(connection)

    def _authenticate(self, connection: socket.socket, received: bytes) -> None:
        expected = self.token[:HALF_TOKEN_BYTES]
        if len(received) < len(expected) and expected.startswith(received):
            self._unauthenticated[connection] = received
        elif secrets.compare_digest(received, expected):
            del self._unauthenticated[connection]
            self._partial_pings[connection] = b""
            connection.send(self.token[HALF_TOKEN_BYTES:])
        else:
            self._drop(connection)

    def _answer(self, connection: socket.socket, received: bytes) -> None:
        whole = len(received) - len(received) % PING.size
        for (number,) in PING.iter_unpack(received[:whole]):
            if connection.send(ANSWER.pack(number, host_now_ns())) < ANSWER.size:
                raise BlockingIOError
        self._partial_pings[connection] = received[whole:]

    def _send_farewell(self) -> None:
        for connection in list(self._partial_pings):
            try:
                connection.send(ANSWER.pack(FAREWELL, 0))
            except OSError:
                self._drop(connection)

    def _drop(self, connection: socket.socket) -> None:
        self._partial_pings.pop(connection, None)
        self._unauthenticated.pop(connection, None)
        self._selector.unregister(connection)
        with suppress(OSError):  # a process forked from this one keeps it open too
            connection.shutdown(socket.SHUT_RDWR)
        connection.close()


def _local_address_towards(host: str) -> str | None:
    """Return the address of the interface on the route to a host, without sending anything."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(address)
            return str(probe.getsockname()[0])
    except OSError:
        return None


def _is_loopback(address: str) -> bool:
    return address.startswith("127.") or address == "::1"
