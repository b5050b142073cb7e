"""Several hosts on one machine: network namespaces behind a switch, whose links can be made slow.

Each cluster is an island: its switch is a bridge in a namespace of its own, so addresses and interface names collide
with nothing, several clusters may exist at once, and deleting the namespaces deletes everything. A latency comes from
``delay_line.py`` in the switch's place. All hosts share the kernel, and so the boot and its clock. Needs root, and
Linux's ``ip`` and ``tc``.
"""

from __future__ import annotations

import os
import subprocess
import sys
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from overlapscope.errors import OverlapScopeError

INTERFACE: Final = "eth0"
"""The name that every host has for its link to the switch."""
BURST_BYTES: Final = 64 * 1024
"""What a slow link lets through at once, before its rate holds."""
_BRIDGE: Final = "bridge"
_NAMESPACES: Final = Path("/run/netns")
_PACKAGE: Final = "overlapscope.lab.network"
_TIME_LIMIT_S: Final = 30
_NOT_IN_THE_KERNEL: Final = {
    "qdisc kind is unknown": "this kernel has no token bucket filter (tbf); try 'modprobe sch_tbf'",
    "Unknown device type": "this kernel has no such network devices; try 'modprobe veth' and 'modprobe bridge'",
}
"""What ``ip`` and ``tc`` say, and what it means."""


@dataclass(frozen=True)
class Hosts:
    """The hosts of one cluster, numbered from 0."""

    namespaces: tuple[str, ...]
    """Of the hosts, by number."""
    carriers: tuple[int, ...] = ()
    """Processes that carry packets between them, by id."""

    def command(self, host: int) -> list[str]:
        """What to put before a command to run it on a host; the process it starts becomes that command."""
        return ["ip", "netns", "exec", self.namespaces[host]]

    def address(self, host: int) -> str:
        """The IPv4 address of a host, for the others of its cluster."""
        return f"10.0.0.{host + 1}"

    def slow_down(self, host: int, rate: str, burst_bytes: int = BURST_BYTES) -> None:
        """Limit what a host can send.

        Args:
            host: whose link to the switch is limited, in that direction alone.
            rate: as ``tc`` writes it, such as ``100mbit``.
            burst_bytes: let through at once, before the rate holds.
        """
        limit = f"tbf rate {rate} burst {burst_bytes} latency 400ms"
        run_command(f"tc -n {self.namespaces[host]} qdisc replace dev {INTERFACE} root {limit}")

    def processes(self, host: int) -> list[int]:
        """The ids of all processes on a host, whoever started them."""
        return [int(line) for line in run_command(f"ip netns pids {self.namespaces[host]}").split()]


@contextmanager
def cluster_of(count: int) -> Iterator[Hosts]:
    """A cluster of hosts that exist until the block is left, behind a switch that takes no time.

    End the processes on them before: a namespace lives on for as long as a process is in it.

    Raises:
        OverlapScopeError: a command failed; what it had made is deleted again.
    """
    name = _unique_name()
    with ExitStack() as cleanup:
        switch = _namespace(f"{name}-switch", cleanup)
        run_command(f"ip -n {switch} link add {_BRIDGE} type bridge")
        run_command(f"ip -n {switch} link set {_BRIDGE} up")
        hosts = Hosts(_namespaces(name, count, cleanup))
        for host, own in enumerate(hosts.namespaces):
            port = f"port{host}"
            run_command(f"ip link add {port} netns {switch} type veth peer name {INTERFACE} netns {own}")
            run_command(f"ip -n {switch} link set {port} master {_BRIDGE} up")
        _bring_up(hosts)
        yield hosts


@contextmanager
def distant_cluster_of(count: int, latency_ms: float) -> Iterator[Hosts]:
    """The same, but a packet takes its time from one host to another.

    Args:
        count: of hosts.
        latency_ms: one way.

    Raises:
        OverlapScopeError: a command failed; what it had made is deleted again.
    """
    with ExitStack() as cleanup:
        namespaces = _namespaces(_unique_name(), count, cleanup)
        arguments = ["--delay-ms", str(latency_ms), "--interface", INTERFACE, *namespaces]
        delay_line = subprocess.Popen(
            [*python_module("delay_line"), *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            process_group=0,
        )
        cleanup.enter_context(delay_line)  # closes its input, which ends it
        assert delay_line.stdout is not None
        if delay_line.stdout.readline() != "ready\n":
            raise OverlapScopeError("the process that delays packets did not start; see its message above")
        hosts = Hosts(namespaces, (delay_line.pid,))
        _bring_up(hosts)
        yield hosts


def run_command(command: str) -> str:
    """Run a command, out of the reach of Ctrl-C, and return what it prints.

    Raises:
        OverlapScopeError: it failed; with what it said.
    """
    done = subprocess.run(command.split(), capture_output=True, text=True, timeout=_TIME_LIMIT_S, process_group=0)
    if done.returncode != 0:
        said = " ".join(done.stderr.split())
        meaning = next((meaning for text, meaning in _NOT_IN_THE_KERNEL.items() if text in said), said)
        raise OverlapScopeError(f"{command}: {meaning}")
    return done.stdout


def python_module(name: str) -> list[str]:
    """The command that runs a module of this package, whatever is in the working directory."""
    return [sys.executable, "-P", "-m", f"{_PACKAGE}.{name}"]


def _unique_name() -> str:
    """Says whose it is; and what an earlier process of the same number may have left has another one."""
    return f"overlapscope-{os.getpid()}-{uuid.uuid4().hex[:6]}"


def _namespaces(name: str, count: int, cleanup: ExitStack) -> tuple[str, ...]:
    return tuple(_namespace(f"{name}-{host}", cleanup) for host in range(count))


def _namespace(name: str, cleanup: ExitStack) -> str:
    """Make a namespace that has a loopback, and have it deleted with what is in it."""
    cleanup.callback(_delete_namespace, name)  # before: Ctrl-C may come while it is made
    run_command(f"ip netns add {name}")
    run_command(f"ip -n {name} link set lo up")
    return name


def _bring_up(hosts: Hosts) -> None:
    for host, own in enumerate(hosts.namespaces):
        run_command(f"ip -n {own} address add {hosts.address(host)}/24 dev {INTERFACE}")
        run_command(f"ip -n {own} link set {INTERFACE} up")


def _delete_namespace(name: str) -> None:
    if (_NAMESPACES / name).exists():
        run_command(f"ip netns delete {name}")
