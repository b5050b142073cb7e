"""Kernel statistics of this process's TCP connections, sampled while it trains.

gloo, and NCCL over sockets, send gradients through connections of the training process itself. For each, Linux counts
the bytes that its peer has acknowledged and measures the delivery rate, idle time excluded. In an all-reduce every rank
is as slow as the slowest link; these counters identify that link without sending anything.
"""

from __future__ import annotations

import os
import socket
import stat
import struct
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from instrumented_ddp.recording.background import BackgroundScheduler
from overlapscope.trace.clocks import host_now_ns
from overlapscope.trace.json_files import dump_json_line
from overlapscope.trace.schema import LINKS_FILE

_OPEN_FILES: Final = "/proc/self/fd"


def iter_tcp_sockets() -> Iterator[socket.socket]:
    """Yield duplicates of the process's TCP sockets, each closed when the next one is requested.

    They include sockets opened by other libraries. A duplicate that stayed open would hide from the peer that its
    connection was closed.

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


_TCP_INFO: Final = struct.Struct("=68xI28xI16xQQ12xI8xQQQQ")
"""Fields of ``struct tcp_info`` (include/uapi/linux/tcp.h): rtt, total_retrans, bytes_acked, bytes_received, min_rtt,
delivery_rate, busy_time, rwnd_limited, sndbuf_limited."""
_MIN_BYTES: Final = 64 * 1024
"""Bytes, both directions together, below which a connection is one to a store or a rendezvous, or not yet relevant."""

_MIN_INTERVAL_S: Final = 0.125
_MAX_INTERVAL_S: Final = 60.0


class LinkSampler:
    """Appends a line to ``links.jsonl`` periodically; a ``PeriodicTask``.

    Reading a connection costs about 15 us (``benchmarks/links.py``), and a rank may have a thousand. The interval
    between samples doubles from 1/8 to 60 s, so that the last one covers at least half of a run however it ends, and
    a short run has enough samples that one taken in a burst after a pause does not matter.

    Args:
        folder: folder of the rank.
        scheduler: schedules the samples.
        min_interval_s: interval after the first sample.
    """

    name = "link sampling"

    def __init__(
        self, folder: Path, scheduler: BackgroundScheduler, *, min_interval_s: float = _MIN_INTERVAL_S
    ) -> None:
        self._path = folder / LINKS_FILE
        self._scheduler = scheduler
        self._min_interval_s = self._interval_s = min_interval_s
        scheduler.add(self)

    def sample_soon(self) -> None:
        """Sample now, and at short intervals again, because another part of the run begins."""
        self._interval_s = self._min_interval_s
        self._scheduler.wake(self)

    def run(self) -> float:
        """Write a sample, and return the interval to the next one in seconds."""
        self._write_sample()
        interval_s = self._interval_s
        self._interval_s = min(2 * interval_s, _MAX_INTERVAL_S)
        return interval_s

    def end(self) -> None:
        """Write the last sample."""
        self._write_sample()

    def _write_sample(self) -> None:
        time_ns = host_now_ns()
        with suppress(OSError):  # no /proc, or a full disk
            connections = list(sample_connections())
            if connections:
                line = dump_json_line({"time_ns": time_ns, "connections": connections})
                with self._path.open("a", encoding="utf-8") as file:
                    file.write(line)


def sample_connections() -> Iterator[dict[str, Any]]:
    """Yield the kernel's counters of each TCP connection of this process that has carried data.

    Raises:
        OSError: the process's open files can't be listed.
    """
    for connection in iter_tcp_sockets():
        with suppress(OSError):  # it listens, or was closed meanwhile
            if (counters := _counters(connection)) is not None:
                yield counters


def _counters(connection: socket.socket) -> dict[str, Any] | None:
    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO.size)
    if len(info) < _TCP_INFO.size:  # Linux before 4.10
        return None
    rtt_us, retransmits, acked, received, min_rtt_us, delivery_rate, busy_us, rwnd_limited_us, sndbuf_limited_us = (
        _TCP_INFO.unpack(info)
    )
    if acked + received < _MIN_BYTES:
        return None
    return {
        "local": endpoint(connection.getsockname()),
        "peer": endpoint(connection.getpeername()),
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
