"""One end of the connection that tests/cluster/shaped_link.py measures a link with.

RANK=0 python -m tests.cluster.link_check FOLDER ADDRESS-OF-RANK-0
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

ROUND_TRIPS: Final = 200
SENT_BYTES: Final = 64 * 1024**2
UNCOUNTED_BYTES: Final = 8 * 1024**2
"""At the beginning, while TCP finds out what the link carries."""
_CHUNK_BYTES: Final = 1024**2


def connect(rank: int, folder: Path, address: str) -> socket.socket:
    """Rank 0 listens, and leaves its port in the folder; the other one connects to it."""
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


def median_rtt_us(rank: int, connection: socket.socket) -> float:
    """Single bytes there and back; what rank 0 returns means nothing, it may wait for the first one to arrive."""
    taken_ns = []
    for _ in range(ROUND_TRIPS):
        start_ns = time.monotonic_ns()
        if rank == 1:
            connection.sendall(b"x")
        connection.recv(1)
        if rank == 0:
            connection.sendall(b"x")
        taken_ns.append(time.monotonic_ns() - start_ns)
    return statistics.median(taken_ns) / 1e3


def receive_rate(connection: socket.socket) -> float:
    """Bytes/s at which the other's bytes arrive."""
    buffer = bytearray(_CHUNK_BYTES)
    received = counted_from = 0
    start_ns = 0
    while received < SENT_BYTES:
        received += connection.recv_into(buffer)
        if received >= UNCOUNTED_BYTES and not counted_from:
            start_ns, counted_from = time.monotonic_ns(), received
    return (received - counted_from) / (time.monotonic_ns() - start_ns) * 1e9


def main() -> None:
    rank, folder, address = int(os.environ["RANK"]), Path(sys.argv[1]), sys.argv[2]
    with connect(rank, folder, address) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        rtt_us = median_rtt_us(rank, connection)
        sending = threading.Thread(target=connection.sendall, args=(bytes(SENT_BYTES),))
        sending.start()
        bytes_per_s = receive_rate(connection)
        sending.join()
    (folder / f"{rank}.json").write_text(json.dumps({"rtt_us": rtt_us, "bytes_per_s": bytes_per_s}))


if __name__ == "__main__":
    main()
