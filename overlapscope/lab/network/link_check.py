"""One end of the connection with which ``link.check`` measures a link.

RANK=0 python -m overlapscope.lab.network.link_check FOLDER ADDRESS-OF-RANK-0 SENT-BYTES ROUND-TRIPS
"""

from __future__ import annotations

import json
import os
import socket
import statistics
import sys
import threading
import time
from pathlib import Path
from typing import Final

UNCOUNTED_SHARE: Final = 1 / 8
"""Share of the sent bytes that is not counted, at the beginning, while TCP probes the capacity of the link."""
_CHUNK_BYTES: Final = 1024**2


def connect_ends(rank: int, folder: Path, address: str) -> socket.socket:
    """Connect the two ends: rank 0 listens, and writes its port to the folder; the other one connects to it."""
    port = folder / "port"
    if rank == 0:
        with socket.create_server((address, 0)) as listener:
            written = folder / "port.part"
            written.write_text(str(listener.getsockname()[1]))
            written.rename(port)
            return listener.accept()[0]
    while not port.exists():
        time.sleep(0.01)
    return socket.create_connection((address, int(port.read_text())))


def median_rtt_us(rank: int, connection: socket.socket, round_trips: int) -> float:
    """Measure the round-trip time of single bytes. Rank 0's result is invalid: it may wait for the first one."""
    taken_ns = []
    for _ in range(round_trips):
        start_ns = time.monotonic_ns()
        if rank == 1:
            connection.sendall(b"x")
        connection.recv(1)
        if rank == 0:
            connection.sendall(b"x")
        taken_ns.append(time.monotonic_ns() - start_ns)
    return statistics.median(taken_ns) / 1e3


def receive_rate(connection: socket.socket, sent_bytes: int) -> float:
    """Measure the rate at which the other's bytes arrive, in bytes per second."""
    buffer = bytearray(_CHUNK_BYTES)
    received = counted_from = 0
    start_ns = 0
    while received < sent_bytes:
        received += connection.recv_into(buffer)
        if received >= UNCOUNTED_SHARE * sent_bytes and not counted_from:
            start_ns, counted_from = time.monotonic_ns(), received
    return (received - counted_from) / (time.monotonic_ns() - start_ns) * 1e9


def main() -> None:
    """Measure from one end, and write the result to FOLDER."""
    rank, folder, address = int(os.environ["RANK"]), Path(sys.argv[1]), sys.argv[2]
    sent_bytes, round_trips = map(int, sys.argv[3:])
    with connect_ends(rank, folder, address) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        rtt_us = median_rtt_us(rank, connection, round_trips)
        sending = threading.Thread(target=connection.sendall, args=(bytes(sent_bytes),))
        sending.start()
        bytes_per_s = receive_rate(connection, sent_bytes)
        sending.join()
    (folder / f"{rank}.json").write_text(json.dumps({"rtt_us": rtt_us, "bytes_per_s": bytes_per_s}))


if __name__ == "__main__":
    main()
