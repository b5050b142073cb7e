"""What the kernel counts on this process's TCP connections, sampled while it trains.

gloo, and NCCL over sockets, send gradients through connections of the training process itself. For each, Linux
counts the bytes that its peer has acknowledged and measures how fast they are delivered, pauses left out. In an
all-reduce every rank is as slow as the slowest link; this tells it from the others, and nothing is sent to find out.

The connections belong to others: they are looked at through a duplicate of the descriptor that lives for
microseconds, because one that is kept would hide from the peer that its connection was closed.
"""

from __future__ import annotations

import json
import os
import socket
import stat
import struct
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from instrumented_ddp.timing import host_now_ns
from overlapscope.trace.format import LINKS_FILE

_TCP_INFO: Final = struct.Struct("=68xI28xI16xQQ12xI8xQQQQ")
"""Of ``struct tcp_info`` (include/uapi/linux/tcp.h): rtt, total_retrans, bytes_acked, bytes_received, min_rtt,
delivery_rate, busy_time, rwnd_limited, sndbuf_limited."""
_OPEN_FILES: Final = "/proc/self/fd"
_LEAST_BYTES: Final = 64 * 1024
"""A connection that has carried less, both ways together, is a store's or a rendezvous', or not yet of interest."""

_SHORTEST_DISTANCE_S: Final = 0.125
_LONGEST_DISTANCE_S: Final = 60.0
_CLOSE_TIMEOUT_S: Final = 2.0


class LinkSampler:
    """Writes a line to ``links.jsonl`` from time to time, on a thread of its own.

    A connection costs about 15 us to look at (``benchmarks/links.py``), and a rank may have a thousand. The distance
    between samples doubles from 1/8 to 60 s, so that the newest one covers at least half of a run however it ends, and
    a short run has enough of them for one that meets a burst, after a pause, not to count.

    Args:
        folder: of the rank.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / LINKS_FILE
        self._wake = threading.Event()
        self._is_closing = False
        self._thread = threading.Thread(target=self._sample_until_closed, name="overlapscope-links", daemon=True)
        self._thread.start()

    def sample_soon(self) -> None:
        """Another part of the run begins: sample now, and at short distances again."""
        self._wake.set()

    def close(self) -> None:
        """Write a last sample. May be called twice."""
        self._is_closing = True
        self._wake.set()
        self._thread.join(_CLOSE_TIMEOUT_S)

    def _sample_until_closed(self) -> None:
        distance_s = _SHORTEST_DISTANCE_S
        while not self._is_closing:
            self._write_sample()
            if self._wake.wait(distance_s):
                self._wake.clear()
                distance_s = _SHORTEST_DISTANCE_S
            else:
                distance_s = min(2 * distance_s, _LONGEST_DISTANCE_S)
        self._write_sample()

    def _write_sample(self) -> None:
        time_ns = host_now_ns()
        with suppress(OSError):  # no /proc, or a disk that is full
            connections = list(sample_connections())
            if connections:
                line = json.dumps({"time_ns": time_ns, "connections": connections}, separators=(",", ":"))
                with self._path.open("a", encoding="utf-8") as file:
                    file.write(line + "\n")


def sample_connections() -> Iterator[dict[str, Any]]:
    """What the kernel counts on each TCP connection of this process that has carried data.

    Raises:
        OSError: the process's open files can't be listed.
    """
    for name in os.listdir(_OPEN_FILES):
        with suppress(OSError):  # closed since, or not a connection
            if stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                with _duplicate(int(name)) as connection:
                    if (counters := _counters(connection)) is not None:
                        yield counters


def _duplicate(descriptor: int) -> socket.socket:
    duplicate = os.dup(descriptor)
    try:
        return socket.socket(fileno=duplicate)
    except OSError:
        os.close(duplicate)
        raise


def _counters(connection: socket.socket) -> dict[str, Any] | None:
    if connection.family not in (socket.AF_INET, socket.AF_INET6) or connection.type != socket.SOCK_STREAM:
        return None
    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO.size)
    if len(info) < _TCP_INFO.size:  # Linux before 4.10
        return None
    rtt_us, retransmits, acked, received, min_rtt_us, delivery_rate, busy_us, rwnd_limited_us, sndbuf_limited_us = (
        _TCP_INFO.unpack(info)
    )
    if acked + received < _LEAST_BYTES:
        return None
    return {
        "local": _endpoint(connection.getsockname()),
        "peer": _endpoint(connection.getpeername()),
        "bytes_acked": acked,
        "bytes_received": received,
        "busy_us": busy_us,
        "rwnd_limited_us": rwnd_limited_us,
        "sndbuf_limited_us": sndbuf_limited_us,
        "delivery_bytes_per_s": delivery_rate,
        "rtt_us": rtt_us,
        "min_rtt_us": min_rtt_us,
        "retransmits": retransmits,
    }


def _endpoint(address: tuple[Any, ...]) -> str:
    """``ip:port``; an IPv4 address is written as one also where a socket of IPv6 carries it."""
    ip = address[0].removeprefix("::ffff:")
    return f"[{ip}]:{address[1]}" if ":" in ip else f"{ip}:{address[1]}"
