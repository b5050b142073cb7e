"""Links between simulated hosts: their settings, and a measurement of what they really provide.

Run as a program, it is one end of the connection with which ``measure_link`` measures a link.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from overlapscope.errors import OverlapScopeError
from overlapscope.lab.network.hosts import Hosts, make_cluster, make_delayed_cluster, python_module

CHECK_TIME_LIMIT_S: Final = 60
_BITS: Final = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
_LEAST_BITS_PER_S, _MOST_BITS_PER_S = 1e6, 100e9
_MS: Final = {"us": 1e-3, "ms": 1.0, "s": 1e3}
_MOST_LATENCY_MS: Final = 1e3
_BURST_S: Final = 0.002
_LEAST_BURST_BYTES, _MOST_BURST_BYTES = 16 * 1024, 128 * 1024
_CHECK_S: Final = 0.5
_LEAST_SENT_BYTES, _MOST_SENT_BYTES = 256 * 1024, 64 * 1024**2
_LEAST_ROUND_TRIPS, _MOST_ROUND_TRIPS = 3, 200


@dataclass(frozen=True, kw_only=True)
class Link:
    """Settings of the links between each host and the others."""

    bits_per_s: float | None = None
    """Rate at which each host can send; None for the maximum of the machine."""
    latency_ms: float = 0
    """One-way latency, in addition to the time that packets wait because of the rate."""


@dataclass(frozen=True, kw_only=True)
class LinkMeasurement:
    """Measured properties of a link, as seen by two TCP sockets."""

    rtt_us: float
    """Median round-trip time of single bytes."""
    bytes_per_s: float
    """Rate of the slower direction, while both carry as much as they can."""


def parse_rate(text: str) -> float:
    """Parse a rate as in ``tc``, such as ``25mbit``; return bits per second.

    Raises:
        OverlapScopeError: The text is not a rate, or one that no link here can have.
    """
    bits_per_s = _parse_with_unit(text, _BITS)
    if bits_per_s is None:
        raise OverlapScopeError(f"{text}: not a rate; write it as tc does, such as 1gbit or 25mbit")
    if not _LEAST_BITS_PER_S <= bits_per_s <= _MOST_BITS_PER_S:
        raise OverlapScopeError(f"{text}: a link can have 1mbit to 100gbit")
    return bits_per_s


def parse_latency(text: str) -> float:
    """Parse a latency as in ``tc``, such as ``2ms`` or ``500us``; return milliseconds.

    Raises:
        OverlapScopeError: The text is not a latency, or one that no link here can have.
    """
    latency_ms = 0.0 if text == "0" else _parse_with_unit(text, _MS)
    if latency_ms is None:
        raise OverlapScopeError(f"{text}: not a latency; write it as tc does, such as 2ms or 500us")
    if latency_ms > _MOST_LATENCY_MS:
        raise OverlapScopeError(f"{text}: a link can have up to 1s, one way")
    return latency_ms


def _parse_with_unit(text: str, units: Mapping[str, float]) -> float | None:
    """Parse a number with a unit, and convert it to the unit whose factor is 1; None if it isn't one."""
    parts = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)([a-z]+)", text.lower())
    return float(parts[1]) * units[parts[2]] if parts and parts[2] in units else None


@contextmanager
def make_linked_hosts(link: Link, count: int) -> Iterator[Hosts]:
    """Make hosts that reach each other over such links, and delete them at the end of the block.

    Raises:
        OverlapScopeError: A command failed; everything made before is deleted again.
    """
    with make_delayed_cluster(count, link.latency_ms) if link.latency_ms else make_cluster(count) as hosts:
        if link.bits_per_s is not None:
            set_rate(hosts, link.bits_per_s)
        yield hosts


def set_rate(hosts: Hosts, bits_per_s: float) -> None:
    """Limit each host's sending rate from now on.

    The burst is two of the segments that TCP makes, each a millisecond of data and at most 64 KB: the kernel would cut
    larger ones into packets of 1,500 bytes, and then hardly reach 1 Gbit/s on a busy core.
    """
    burst_bytes = round(min(max(bits_per_s / 8 * _BURST_S, _LEAST_BURST_BYTES), _MOST_BURST_BYTES))
    for host in range(len(hosts.namespaces)):
        hosts.limit_rate(host, f"{bits_per_s:.0f}bit", burst_bytes)


def measure_link(prefixes: Sequence[Sequence[str]], address: str, link: Link) -> LinkMeasurement:
    """Measure the link between two hosts, in a second or two.

    Args:
        prefixes: Prefixes that run a command on each of the two hosts.
        address: Address of the first host, as seen from the second.
        link: Expected settings: a slow link is measured with less data.

    Raises:
        OverlapScopeError: The link can't be measured; contains the reason.
    """
    sent_bytes = _MOST_SENT_BYTES
    if link.bits_per_s is not None:
        sent_bytes = round(min(max(link.bits_per_s / 8 * _CHECK_S, _LEAST_SENT_BYTES), _MOST_SENT_BYTES))
    round_trips = _MOST_ROUND_TRIPS
    if link.latency_ms:
        round_trips = round(min(max(_CHECK_S * 1e3 / (2 * link.latency_ms), _LEAST_ROUND_TRIPS), _MOST_ROUND_TRIPS))
    with tempfile.TemporaryDirectory() as folder:
        command = [*python_module("overlapscope.lab.network.link"), folder, address, str(sent_bytes), str(round_trips)]
        _run_at_both_ends([[*prefix, "env", f"RANK={end}", *command] for end, prefix in enumerate(prefixes)])
        seen = [json.loads(Path(folder, f"{end}.json").read_text()) for end in (0, 1)]
    return LinkMeasurement(rtt_us=seen[1]["rtt_us"], bytes_per_s=min(each["bytes_per_s"] for each in seen))


def _run_at_both_ends(commands: Sequence[Sequence[str]]) -> None:
    with ExitStack() as cleanup:
        ends = []
        for command in commands:
            end = subprocess.Popen(command, env=os.environ, stderr=subprocess.PIPE, text=True, process_group=0)
            cleanup.enter_context(end)
            cleanup.callback(end.kill)
            ends.append(end)
        for end in ends:
            try:
                _, said = end.communicate(timeout=CHECK_TIME_LIMIT_S)
            except subprocess.TimeoutExpired:
                raise OverlapScopeError(f"the link carried nothing in {CHECK_TIME_LIMIT_S} s") from None
            if end.returncode != 0:
                reason = (said.strip().splitlines() or [f"exit code {end.returncode}"])[-1]
                raise OverlapScopeError(f"the link can't be measured: {reason}")


# One end of a measured connection.

_UNCOUNTED_SHARE: Final = 1 / 8
"""Share of the sent bytes that is not counted, at the beginning, while TCP probes the capacity of the link."""
_CHUNK_BYTES: Final = 1024**2


def _connect_ends(rank: int, folder: Path, address: str) -> socket.socket:
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


def _median_rtt_us(rank: int, connection: socket.socket, round_trips: int) -> float:
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


def _receive_rate(connection: socket.socket, sent_bytes: int) -> float:
    """Measure the rate at which the other's bytes arrive, in bytes per second."""
    buffer = bytearray(_CHUNK_BYTES)
    received = counted_from = 0
    start_ns = 0
    while received < sent_bytes:
        received += connection.recv_into(buffer)
        if received >= _UNCOUNTED_SHARE * sent_bytes and not counted_from:
            start_ns, counted_from = time.monotonic_ns(), received
    return (received - counted_from) / (time.monotonic_ns() - start_ns) * 1e9


def main() -> None:
    """Measure from one end, as started by ``measure_link``: RANK=0 ... FOLDER ADDRESS-OF-RANK-0 SENT-BYTES ROUND-TRIPS.

    The result goes into FOLDER.
    """
    rank, folder, address = int(os.environ["RANK"]), Path(sys.argv[1]), sys.argv[2]
    sent_bytes, round_trips = map(int, sys.argv[3:])
    with _connect_ends(rank, folder, address) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        rtt_us = _median_rtt_us(rank, connection, round_trips)
        sending = threading.Thread(target=connection.sendall, args=(bytes(sent_bytes),))
        sending.start()
        bytes_per_s = _receive_rate(connection, sent_bytes)
        sending.join()
    (folder / f"{rank}.json").write_text(json.dumps({"rtt_us": rtt_us, "bytes_per_s": bytes_per_s}))


# Check of what a machine needs for simulated hosts.

_STATUS: Final = Path("/proc/self/status")
_TUN: Final = Path("/dev/net/tun")
_CAPABILITIES: Final = {"CAP_NET_ADMIN": 12, "CAP_SYS_ADMIN": 21}
"""Bit numbers from linux/capability.h."""


def find_missing_requirement(link: Link) -> str | None:
    """Return what this machine lacks for hosts with such links, and how to get it; None if it seems to lack nothing.

    Features that the kernel lacks show only when the hosts are made.
    """
    if sys.platform != "linux":
        return f"this needs network namespaces, which only Linux has; this is {sys.platform}"
    effective = re.search(r"^CapEff:\s*([0-9a-f]+)$", _STATUS.read_text(), re.MULTILINE)
    has = int(effective[1], 16) if effective else 0
    if lacking := [name for name, bit in _CAPABILITIES.items() if not has >> bit & 1]:
        return f"this needs root ({' and '.join(lacking)}) to make network namespaces; run it with sudo"
    if programs := [name for name in ("ip", "tc") if shutil.which(name) is None]:
        return f"there is no program {' and no '.join(programs)}; install the package iproute2"
    if link.latency_ms and not os.access(_TUN, os.R_OK | os.W_OK):
        return f"{_TUN}: can't be used, and a latency needs it; try 'modprobe tun', or leave out the latency"
    return None


if __name__ == "__main__":
    main()
