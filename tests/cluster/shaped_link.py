"""Links between ranks: this machine's loopback, or hosts of their own with a rate and a latency.

    python -m tests.cluster.shaped_link 1gbit-2.5ms

Hosts are those of ``overlapscope.lab.network``. On the command line this opens a link, measures its round trip and its
rate in both directions at once, which is how all-reduce uses it, and prints them. All but ``loopback`` need root, and
Linux's ``ip`` and ``tc``.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

from overlapscope.lab.network import link as links
from overlapscope.lab.network.hosts import INTERFACE, Hosts
from overlapscope.lab.network.link import Link, LinkMeasurement, make_linked_hosts
from tests.cluster.processes import METHOD, Method, Program, run_together

LINKS: Final = {
    "loopback": Link(),
    "10gbit": Link(bits_per_s=10e9),
    "1gbit": Link(bits_per_s=1e9),
    "1gbit-2.5ms": Link(bits_per_s=1e9, latency_ms=2.5),
    "1gbit-10ms": Link(bits_per_s=1e9, latency_ms=10),
    "400mbit-1ms": Link(bits_per_s=400e6, latency_ms=1),
}


@dataclass(frozen=True)
class Ranks:
    """Where ranks run, by rank."""

    prefixes: tuple[tuple[str, ...], ...]
    """What to put before a command to run it there."""
    addresses: tuple[str, ...]
    interface: str
    """Name of the link, at each of them."""
    carrier_pids: tuple[int, ...] = ()
    """Processes that carry packets between them, by id."""
    hosts: Hosts | None = None
    """If they are on hosts of their own."""

    def set_rate(self, bits_per_s: float) -> None:
        """Let each send no faster than that from now on."""
        if self.hosts is None:
            raise RuntimeError("the loopback has no rate")
        links.set_rate(self.hosts, bits_per_s)

    def only(self, one: int, other: int) -> Ranks:
        """Two of them, as ranks 0 and 1."""
        prefixes, addresses = self.prefixes, self.addresses
        return Ranks(
            (prefixes[one], prefixes[other]), (addresses[one], addresses[other]), self.interface, self.carrier_pids
        )

    def run(
        self, arguments: Sequence[str], environment: Mapping[str, str], time_limit_s: float, method: Method = METHOD
    ) -> None:
        """Run Python on all ranks at once, with RANK, WORLD_SIZE and the interface for gloo in its environment.

        Raises:
            RuntimeError: it has failed on one; says how its output ends.
            TimeoutError: it took longer than it may.
        """
        shared = {"WORLD_SIZE": str(len(self.prefixes)), "GLOO_SOCKET_IFNAME": self.interface}
        programs = [
            Program(arguments, {**environment, **shared, "RANK": str(rank)}, prefix[-1] if prefix else None)
            for rank, prefix in enumerate(self.prefixes)
        ]
        run_together(programs, time_limit_s, method)


@contextmanager
def ranks_over(link: Link, count: int = 2) -> Iterator[Ranks]:
    """Places for ranks that reach each other over a link, until the block is left.

    Raises:
        OverlapScopeError: a command failed; what it had made is deleted again.
    """
    if link == Link():
        yield Ranks(((),) * count, ("127.0.0.1",) * count, "lo")
        return
    with make_linked_hosts(link, count) as hosts:
        prefixes = tuple(tuple(hosts.command(host)) for host in range(count))
        addresses = tuple(hosts.address(host) for host in range(count))
        yield Ranks(prefixes, addresses, INTERFACE, hosts.carrier_pids, hosts)


def check(ranks: Ranks, link: Link) -> LinkMeasurement:
    """Measure the link between two ranks, in about a second."""
    return links.measure_link(ranks.prefixes, ranks.addresses[0], link)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tests.cluster.shaped_link",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("link", choices=LINKS, metavar="LINK", help=", ".join(LINKS))
    args = parser.parse_args()
    link = LINKS[args.link]
    with ranks_over(link) as ranks:
        seen = check(ranks, link)
    print(f"{args.link}: round trip {seen.rtt_us:.0f} µs, {seen.bytes_per_s / 1e6:.1f} MB/s each way")


if __name__ == "__main__":
    main()
