"""Clock synchronization with rank 0 by pings between hosts, written next to the event log.

Ranks with the same boot identity share ``CLOCK_MONOTONIC``. One rank of each other identity, the reporter, asks rank 0
for its time, in bursts: at construction, when a plan is rebuilt, at growing intervals, and at the end. All of this runs
on one daemon thread per rank, never on the training thread; if it fails, the recording continues unaligned.
"""

from __future__ import annotations

import json
import logging
import random
import select
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import torch.distributed as dist
from torch.distributed.distributed_c10d import Store, _get_default_store

from instrumented_ddp.recording.clock_pings import PingConnection
from instrumented_ddp.recording.clock_server import CLOSING_TIME_S, ClockServer
from overlapscope.trace import host
from overlapscope.trace.checksum import dump_json_line
from overlapscope.trace.format import CLOCK_FILE

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
        self._boot = host.get_boot_id()
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
            except OSError:  # perhaps rank 0 of an earlier recording: the next one publishes another card
                continue
            with connection:
                self._ping_until_the_end(connection, server_info["boot"], woken)
            return

    @property
    def _key(self) -> str:
        """Return the key of rank 0's address, without the run's path, which may differ between hosts."""
        return f"overlapscope/clock/{self._folder.parent.name}"

    def _watch_server_info(self, store: Store, woken: socket.socket) -> Iterator[dict[str, Any]]:
        """Yield each new card that rank 0 publishes, until the end. Never blocks in the store."""
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
