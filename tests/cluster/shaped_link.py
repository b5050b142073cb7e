"""Links between ranks: this machine's loopback, or hosts of their own with a rate and a latency.

    python -m tests.cluster.shaped_link 1gbit-2.5ms

Hosts are network namespaces (``hosts.py``) that ``tc tbf`` lets send no faster than the link's rate. A latency comes
from ``delay_line.py`` in the switch's place. On the command line this opens a link, measures its round trip and its
rate in both directions at once, which is how all-reduce uses it, and prints them. All but ``loopback`` need root, and
Linux's ``ip`` and ``tc``.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from tests.cluster.hosts import INTERFACE, Hosts, cluster_of, namespace, run_command
from tests.cluster.processes import ROOT, run_together

CHECK_TIME_LIMIT_S: Final = 60
_BURST_BYTES: Final = 128 * 1024
"""Segments of TCP, of up to 64 KB and their headers, have to fit: the kernel would cut larger ones into packets of
1,500 bytes, and then hardly reach 1 Gbit/s on a busy core."""


@dataclass(frozen=True, kw_only=True)
class Link:
    """What lies between two ranks. Neither a rate nor a latency: nothing, they share the loopback."""

    rate: str | None = None
    """What each can send, as ``tc`` writes it."""
    latency_ms: float = 0
    """From one to the other, beside what the rate makes a packet wait."""


LINKS: Final = {
    "loopback": Link(),
    "10gbit": Link(rate="10gbit"),
    "1gbit": Link(rate="1gbit"),
    "1gbit-2.5ms": Link(rate="1gbit", latency_ms=2.5),
    "1gbit-10ms": Link(rate="1gbit", latency_ms=10),
}


@dataclass(frozen=True, kw_only=True)
class LinkCheck:
    """What a link really does, as two TCP sockets see it."""

    rtt_us: float
    """Median of single bytes sent there and back."""
    bytes_per_s: float
    """Of the slower direction, while both carry as much as they can."""


@dataclass(frozen=True)
class Ranks:
    """Where ranks run, by rank."""

    prefixes: tuple[tuple[str, ...], ...]
    """What to put before a command to run it there."""
    addresses: tuple[str, ...]
    interface: str
    """Name of the link, at each of them."""
    carriers: tuple[int, ...] = ()
    """Processes that carry packets between them, by id."""
    hosts: Hosts | None = None
    """If they are on hosts of their own."""

    def set_rate(self, rate: str) -> None:
        """Let each send no faster than that from now on, as ``tc`` writes it."""
        if self.hosts is None:
            raise RuntimeError("the loopback has no rate")
        for host in range(len(self.prefixes)):
            self.hosts.slow_down(host, rate, _BURST_BYTES)

    def only(self, one: int, other: int) -> Ranks:
        """Two of them, as ranks 0 and 1."""
        prefixes, addresses = self.prefixes, self.addresses
        return Ranks(
            (prefixes[one], prefixes[other]), (addresses[one], addresses[other]), self.interface, self.carriers
        )

    def run(self, command: Sequence[str], environment: Mapping[str, str], time_limit_s: float) -> None:
        """Run a command on all ranks at once, with RANK, WORLD_SIZE and the interface for gloo in its environment.

        Raises:
            RuntimeError: it has failed on one; says how its output ends.
            TimeoutError: it took longer than it may.
        """
        shared = {"WORLD_SIZE": str(len(self.prefixes)), "GLOO_SOCKET_IFNAME": self.interface}
        commands = [[*prefix, "env", f"RANK={rank}", *command] for rank, prefix in enumerate(self.prefixes)]
        run_together(commands, {**environment, **shared}, time_limit_s)


@contextmanager
def ranks_over(link: Link, count: int = 2) -> Iterator[Ranks]:
    """Places for ranks that reach each other over a link, until the block is left.

    Raises:
        RuntimeError: a command failed; what it had made is deleted again.
    """
    if link == Link():
        yield Ranks(((),) * count, ("127.0.0.1",) * count, "lo")
        return
    with ExitStack() as cleanup:
        if link.latency_ms:
            hosts, delay_line = cleanup.enter_context(_delayed_hosts(count, link.latency_ms))
            carriers: tuple[int, ...] = (delay_line,)
        else:
            hosts, carriers = cleanup.enter_context(cluster_of(count)), ()
        prefixes = tuple(tuple(hosts.command(host)) for host in range(count))
        addresses = tuple(hosts.address(host) for host in range(count))
        ranks = Ranks(prefixes, addresses, INTERFACE, carriers, hosts)
        if link.rate is not None:
            ranks.set_rate(link.rate)
        yield ranks


@contextmanager
def _delayed_hosts(count: int, latency_ms: float) -> Iterator[tuple[Hosts, int]]:
    """With the id of the process between them."""
    name = f"delayed-{uuid.uuid4().hex[:8]}"
    with ExitStack() as cleanup:
        names = [namespace(f"{name}-{host}", cleanup) for host in range(count)]
        hosts = Hosts(names)
        arguments = ["--delay-ms", str(latency_ms), "--interface", INTERFACE, *names]
        delay_line = subprocess.Popen(
            [sys.executable, "-m", "tests.cluster.delay_line", *arguments],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        cleanup.enter_context(delay_line)  # closes its input, which ends it
        assert delay_line.stdout is not None
        if delay_line.stdout.readline() != "ready\n":
            raise RuntimeError("the delay line did not start; see its message above")
        for host, own in enumerate(names):
            run_command(f"ip -n {own} address add {hosts.address(host)}/24 dev {INTERFACE}")
            run_command(f"ip -n {own} link set {INTERFACE} up")
        yield hosts, delay_line.pid


def check(ranks: Ranks) -> LinkCheck:
    """Measure the link between two ranks, in about a second for a rate of 1 Gbit/s."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "tests.cluster.link_check", folder, ranks.addresses[0]]
        ranks.run(command, os.environ, CHECK_TIME_LIMIT_S)
        seen = [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in (0, 1)]
    return LinkCheck(rtt_us=seen[1]["rtt_us"], bytes_per_s=min(each["bytes_per_s"] for each in seen))


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tests.cluster.shaped_link",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("link", choices=LINKS, metavar="LINK", help=", ".join(LINKS))
    args = parser.parse_args()
    with ranks_over(LINKS[args.link]) as ranks:
        seen = asdict(check(ranks))
    print(f"{args.link}: round trip {seen['rtt_us']:.0f} µs, {seen['bytes_per_s'] / 1e6:.1f} MB/s each way")


if __name__ == "__main__":
    main()
