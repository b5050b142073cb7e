"""Client of rank 0's clock server: bursts of pings."""

from __future__ import annotations

import socket
import time
from typing import Final

from instrumented_ddp.recording.clock_server import ANSWER, FAREWELL, HALF_TOKEN_BYTES, PING
from overlapscope.trace.host import host_now_ns

_PINGS: Final = 100
_PINGS_PER_KEPT_PING: Final = 10
"""Inverse of the share of a burst's pings that are kept: those with the shortest round trips."""
_MAX_BURST_S: Final = 0.5
_TIMEOUT_S: Final = 1.0


class PingConnection:
    """A connection to rank 0's ``ClockServer``.

    Args:
        addresses: possible addresses of the server, tried in this order.
        token: distinguishes this run's server from any other service that listens at such an address.

    Raises:
        OSError: the server is at none of them.
    """

    def __init__(self, addresses: list[str], port: int, token: bytes) -> None:
        self.socket = _connect(addresses, port, token)
        self.is_server_closing = False
        """True if rank 0 is about to close."""

    def __enter__(self) -> PingConnection:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()

    def burst(self) -> tuple[int, list[tuple[int, int, int]]]:
        """Send pings, for at most ``_MAX_BURST_S``.

        Returns:
            The number of pings, and the best tenth by round trip: times of sending (this host's clock), answer (rank
            0's) and arrival (this host's), in nanoseconds.

        Raises:
            OSError: rank 0 is gone.
        """
        pings: list[tuple[int, int, int]] = []
        give_up_at = time.monotonic() + _MAX_BURST_S
        while len(pings) < _PINGS and (not pings or time.monotonic() < give_up_at):
            sent_ns = host_now_ns()
            self.socket.sendall(PING.pack(len(pings)))
            reference_ns = self._answer()
            pings.append((sent_ns, reference_ns, host_now_ns()))
        best = sorted(pings, key=lambda ping: ping[2] - ping[0])[: -(-len(pings) // _PINGS_PER_KEPT_PING)]
        return len(pings), sorted(best)

    def read_farewell(self) -> None:
        """Read a message that rank 0 sent unrequested.

        Raises:
            OSError: rank 0 is gone already.
        """
        number, _ = ANSWER.unpack(_read(self.socket, ANSWER.size))
        self.is_server_closing = number == FAREWELL

    def _answer(self) -> int:
        number, reference_ns = ANSWER.unpack(_read(self.socket, ANSWER.size))
        if number != FAREWELL:
            return int(reference_ns)
        self.is_server_closing = True  # the burst that it asks for is in progress
        return self._answer()


def _connect(addresses: list[str], port: int, token: bytes) -> socket.socket:
    for address in addresses:
        try:
            connection = socket.create_connection((address, port), timeout=_TIMEOUT_S)
        except OSError:
            continue
        try:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.sendall(token[:HALF_TOKEN_BYTES])
            if _read(connection, HALF_TOKEN_BYTES) == token[HALF_TOKEN_BYTES:]:
                return connection
        except OSError:
            pass
        connection.close()
    raise ConnectionError(f"can't reach rank 0 at {', '.join(addresses)}, port {port}")


def _read(connection: socket.socket, size: int) -> bytes:
    content = connection.recv(size)
    while len(content) < size:
        more = connection.recv(size - len(content))
        if not more:
            raise ConnectionError("rank 0 is gone")
        content += more
    return content
