"""Clock synchronization with rank 0 by pings between hosts, written next to the event log.

Ranks with the same boot identity share ``CLOCK_MONOTONIC``. One rank of each other identity, the reporter, asks rank 0
for its time, in bursts: at construction, when a plan is rebuilt, at growing intervals, and at the end. All of this runs
on one daemon thread per rank, never on the training thread; if it fails, the recording continues unaligned.
"""

from __future__ import annotations

import json
import logging
import os
import random
import secrets
import select
import selectors
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import torch.distributed as dist
from torch.distributed.distributed_c10d import Store, _get_default_store

from overlapscope.trace import clocks
from overlapscope.trace.clocks import host_now_ns
from overlapscope.trace.json_files import dump_json_line
from overlapscope.trace.schema import CLOCK_FILE

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
    """Clock server on a free port of all interfaces; answers while ``serve`` runs.

    The protocol is TCP. A client sends the first half of the token, and the server answers with the second. Then each
    ping is a number of 8 bytes, and its answer is this number and the host's clock in nanoseconds. A farewell is an
    unrequested answer: the server closes soon, and clients have ``CLOSING_TIME_S`` for a last burst.
    """

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


_log = logging.getLogger(__name__)

_MAX_INTERVAL_S: Final = 60.0
_MAX_PAUSE_S: Final = 5.0
_WAKE_BYTES: Final = {"rebuild": b"r", "end": b"e"}


class ClockSync:
    """Rank 0's clock server, or a reporter that pings it.

    Without a default process group there is no store through which ranks could find each other, and nothing is done.

    Args:
        folder: folder of this rank, inside the run's folder.
        rank: rank of this process in the whole job.
    """

    def __init__(self, folder: Path, rank: int) -> None:
        self._folder = folder
        self._rank = rank
        self._boot = clocks.get_boot_id()
        self._thread: threading.Thread | None = None
        if not dist.is_initialized():
            return
        self._wake, woken = socket.socketpair()
        store = _get_default_store()
        self._thread = threading.Thread(target=self._run, args=(store, woken), name="overlapscope-clock", daemon=True)
        self._thread.start()

    def on_plan_rebuilt(self) -> None:
        """Request a burst of pings soon."""
        self._wake_thread("rebuild")

    def close(self) -> None:
        """Request a last burst, and wait for it no longer than the end of a training may be delayed."""
        self._wake_thread("end")
        if self._thread is not None:
            self._thread.join(CLOSING_TIME_S)
            self._wake.close()
            self._thread = None

    def _wake_thread(self, reason: str) -> None:
        # A thread that has finished, or that was not copied by a fork, no longer listens.
        if self._thread is not None and self._thread.is_alive():
            try:
                self._wake.send(_WAKE_BYTES[reason], socket.MSG_DONTWAIT)
            except OSError:
                return

    def _run(self, store: Store, woken: socket.socket) -> None:
        try:
            with woken:
                # The training thread may block in the store: use a separate connection, if possible.
                store = store.clone() if hasattr(store, "clone") else store
                if self._rank == 0:
                    self._serve(store, woken)
                else:
                    self._report(store, woken)
        except Exception as error:
            _log.warning("rank %d: its clock is no longer compared with rank 0's: %s", self._rank, error)

    def _serve(self, store: Store, woken: socket.socket) -> None:
        with ClockServer() as server:
            server_info = {
                "boot": self._boot,
                "addresses": server.addresses(),
                "port": server.port,
                "token": server.token.hex(),
            }
            store.set(self._key, json.dumps(server_info))
            server.serve(until=lambda: _read_reason(woken) == "end", woken=woken)

    def _report(self, store: Store, woken: socket.socket) -> None:
        for server_info in self._watch_server_info(store, woken):
            if self._boot is not None:
                if server_info["boot"] == self._boot:
                    return
                reporter = store.compare_set(f"{self._key}/{server_info['token']}/{self._boot}", "", str(self._rank))
                if reporter != str(self._rank).encode():
                    return
            try:
                connection = PingConnection(
                    server_info["addresses"], server_info["port"], bytes.fromhex(server_info["token"])
                )
            except OSError:  # perhaps rank 0 of an earlier recording: the next one publishes its own address
                continue
            with connection:
                self._ping_until_the_end(connection, server_info["boot"], woken)
            return

    @property
    def _key(self) -> str:
        """Return the key of rank 0's address, without the run's path, which may differ between hosts."""
        return f"overlapscope/clock/{self._folder.parent.name}"

    def _watch_server_info(self, store: Store, woken: socket.socket) -> Iterator[dict[str, Any]]:
        """Yield each address that rank 0 publishes, until the end. Never blocks in the store."""
        pause_s, last = 0.02, b""
        while True:
            if store.check([self._key]) and (server_info := store.get(self._key)) != last:
                last = server_info
                yield json.loads(server_info)
            if _wait_for_reason(pause_s, woken) == "end":
                return
            pause_s = min(pause_s * 1.5, _MAX_PAUSE_S)

    def _ping_until_the_end(self, connection: PingConnection, reference: str | None, woken: socket.socket) -> None:
        reason, interval_s = "start", 1.0
        while True:
            pings, best = connection.burst()
            line = {"reason": reason, "reference": reference, "pings": pings, "best": best}
            with (self._folder / CLOCK_FILE).open("a", encoding="utf-8") as file:
                file.write(dump_json_line(line))
            if reason == "end" or connection.is_server_closing:
                return
            # Hosts began together, but should not keep pinging rank 0 all at the same time.
            reason = _wait_for_reason(interval_s * random.uniform(0.75, 1.0), woken, connection)
            if reason == "periodic":
                interval_s = min(2 * interval_s, _MAX_INTERVAL_S)


def _wait_for_reason(seconds: float, woken: socket.socket, connection: PingConnection | None = None) -> str:
    """Return the reason for the next burst: the interval has passed, this process asks for it, or rank 0 is closing."""
    ready, _, _ = select.select([woken] if connection is None else [woken, connection.socket], [], [], seconds)
    if woken in ready:
        return _read_reason(woken)
    if connection is not None and ready:
        connection.read_farewell()
        return "end"
    return "periodic"


def _read_reason(woken: socket.socket) -> str:
    received = woken.recv(64)
    return "rebuild" if received and _WAKE_BYTES["end"] not in received else "end"
