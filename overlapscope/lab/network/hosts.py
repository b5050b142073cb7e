"""Several simulated hosts on one machine: network namespaces behind a switch, with links that can be slowed down.

Each cluster is isolated: its switch is a bridge in a separate namespace, so addresses and interface names collide with
nothing, several clusters may exist at once, and deleting the namespaces deletes everything. For a latency,
``delay_line.py`` replaces the switch. All hosts share the kernel, and so the boot and its clock. Needs root, and
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
"""Name of the interface that connects each host to the switch."""
BURST_BYTES: Final = 64 * 1024
"""Bytes that a slow link lets through at once, before its rate applies."""
_BRIDGE: Final = "bridge"
_NAMESPACES: Final = Path("/run/netns")
_TIME_LIMIT_S: Final = 30
_KERNEL_ERROR_HINTS: Final = {
    "qdisc kind is unknown": "this kernel has no token bucket filter (tbf); try 'modprobe sch_tbf'",
    "Unknown device type": "this kernel has no such network devices; try 'modprobe veth' and 'modprobe bridge'",
}
"""Messages of ``ip`` and ``tc``, and what they mean."""


@dataclass(frozen=True)
class Hosts:
    """The hosts of one cluster, numbered from 0."""

    namespaces: tuple[str, ...]
    """Network namespace of each host."""
    carrier_pids: tuple[int, ...] = ()
    """Process ids of the processes that carry packets between the hosts."""

    def command(self, host: int) -> list[str]:
        """Return the prefix that runs a command on a host; the process it starts becomes that command."""
        return ["ip", "netns", "exec", self.namespaces[host]]

    def address(self, host: int) -> str:
        """Return the IPv4 address of a host within its cluster."""
        return f"10.0.0.{host + 1}"

    def limit_rate(self, host: int, rate: str, burst_bytes: int = BURST_BYTES) -> None:
        """Limit the rate at which a host can send.

        Args:
            host: Host whose link to the switch is limited, in that direction only.
            rate: Rate as in ``tc``, such as ``100mbit``.
            burst_bytes: Bytes let through at once, before the rate applies.
        """
        limit = f"tbf rate {rate} burst {burst_bytes} latency 400ms"
        run_command(f"tc -n {self.namespaces[host]} qdisc replace dev {INTERFACE} root {limit}")

    def processes(self, host: int) -> list[int]:
        """Return the ids of all processes on a host, including those of other programs."""
        return [int(line) for line in run_command(f"ip netns pids {self.namespaces[host]}").split()]


@contextmanager
def make_cluster(count: int) -> Iterator[Hosts]:
    """Make a cluster of hosts behind a switch without latency; they are deleted at the end of the block.

    End the processes on them before: a namespace exists for as long as a process is in it.

    Raises:
        OverlapScopeError: A command failed; everything made before is deleted again.
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
def make_delayed_cluster(count: int, latency_ms: float) -> Iterator[Hosts]:
    """Make a cluster like ``make_cluster``, in which packets between hosts have a latency.

    Args:
        count: Number of hosts.
        latency_ms: One-way latency.

    Raises:
        OverlapScopeError: A command failed; everything made before is deleted again.
    """
    with ExitStack() as cleanup:
        namespaces = _namespaces(_unique_name(), count, cleanup)
        arguments = ["--delay-ms", str(latency_ms), "--interface", INTERFACE, *namespaces]
        delay_line = subprocess.Popen(
            [*python_module("overlapscope.lab.network.delay_line"), *arguments],
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
    """Run a command, shielded from Ctrl-C, and return its output.

    Raises:
        OverlapScopeError: The command failed; contains its message.
    """
    done = subprocess.run(command.split(), capture_output=True, text=True, timeout=_TIME_LIMIT_S, process_group=0)
    if done.returncode != 0:
        said = " ".join(done.stderr.split())
        meaning = next((meaning for text, meaning in _KERNEL_ERROR_HINTS.items() if text in said), said)
        raise OverlapScopeError(f"{command}: {meaning}")
    return done.stdout


def python_module(name: str) -> list[str]:
    """Return the command that runs a module as a program, independent of the working directory."""
    return [sys.executable, "-P", "-m", name]


def _unique_name() -> str:
    """Return a name with the process id, and a random part in case an earlier process with this id left some behind."""
    return f"overlapscope-{os.getpid()}-{uuid.uuid4().hex[:6]}"


def _namespaces(name: str, count: int, cleanup: ExitStack) -> tuple[str, ...]:
    return tuple(_namespace(f"{name}-{host}", cleanup) for host in range(count))


def _namespace(name: str, cleanup: ExitStack) -> str:
    """Make a namespace with a loopback interface, to be deleted with its content at cleanup."""
    cleanup.callback(_delete_namespace, name)  # registered first, because Ctrl-C may arrive while it is made
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
