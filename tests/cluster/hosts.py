"""Several hosts on one machine: network namespaces behind a switch, whose links can be made slow.

Each cluster is an island: its switch is a bridge in a namespace of its own, so addresses and interface names collide
with nothing, several clusters may exist at once, and deleting the namespaces deletes everything. All hosts share the
kernel, and so the boot and its clock. Needs root, and Linux's ``ip`` and ``tc``.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Final

INTERFACE: Final = "eth0"
"""The name that every host has for its link to the switch."""
BURST_BYTES: Final = 64 * 1024
"""What a slow link lets through at once, before its rate holds."""
_BRIDGE: Final = "bridge"
_NAMESPACES: Final = Path("/run/netns")
_CLONE_NEWNET: Final = 0x40000000
"""Of linux/sched.h."""


class Hosts:
    """The hosts of one cluster, numbered from 0.

    Args:
        namespaces: of the hosts, by number.
    """

    def __init__(self, namespaces: list[str]) -> None:
        self._namespaces = namespaces

    def command(self, host: int) -> list[str]:
        """What to put before a command to run it on a host; the process it starts becomes that command."""
        return ["ip", "netns", "exec", self._namespaces[host]]

    def entrance(self) -> Callable[[int], None]:
        """For ``Ranks``: brings each rank's process onto the host of its number."""
        return partial(_enter, self._namespaces)

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
        run_command(f"tc -n {self._namespaces[host]} qdisc replace dev {INTERFACE} root {limit}")


@contextmanager
def cluster_of(count: int) -> Iterator[Hosts]:
    """A cluster of hosts that exist until the block is left.

    End the processes on them before: a namespace lives on for as long as a process is in it.

    Raises:
        RuntimeError: a command failed; what it had made is deleted again.
    """
    name = f"cluster-{uuid.uuid4().hex[:8]}"
    with ExitStack() as cleanup:
        switch = namespace(f"{name}-switch", cleanup)
        run_command(f"ip -n {switch} link add {_BRIDGE} type bridge")
        run_command(f"ip -n {switch} link set {_BRIDGE} up")
        names = [namespace(f"{name}-{host}", cleanup) for host in range(count)]
        hosts = Hosts(names)
        for host, own in enumerate(names):
            port = f"port{host}"
            run_command(f"ip link add {port} netns {switch} type veth peer name {INTERFACE} netns {own}")
            run_command(f"ip -n {switch} link set {port} master {_BRIDGE} up")
            run_command(f"ip -n {own} address add {hosts.address(host)}/24 dev {INTERFACE}")
            run_command(f"ip -n {own} link set {INTERFACE} up")
        yield hosts


def why_unavailable() -> str | None:
    """What this machine lacks for clusters; None if it can have them."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    missing = [program for program in ("ip", "tc") if shutil.which(program) is None]
    if missing:
        return f"there is no program {' and no '.join(missing)}"
    try:
        with cluster_of(1) as hosts:
            hosts.slow_down(0, "100mbit")
    except RuntimeError as error:
        return str(error)
    return None


def namespace(name: str, cleanup: ExitStack) -> str:
    """Make a namespace that has a loopback, and have it deleted with what is in it."""
    cleanup.callback(_delete_namespace, name)  # before: Ctrl-C may come while it is made
    run_command(f"ip netns add {name}")
    run_command(f"ip -n {name} link set lo up")
    return name


def _enter(namespaces: list[str], host: int) -> None:
    """``ip netns exec``, for a process that runs already."""
    os.environ["GLOO_SOCKET_IFNAME"] = INTERFACE
    libc = ctypes.CDLL(None, use_errno=True)
    with (_NAMESPACES / namespaces[host]).open() as file:
        if libc.setns(file.fileno(), _CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), "setns")


def _delete_namespace(name: str) -> None:
    if (_NAMESPACES / name).exists():
        run_command(f"ip netns delete {name}")


def run_command(command: str) -> None:
    """Run a command that says nothing if all is well.

    Raises:
        RuntimeError: it failed; with what it said.
    """
    done = subprocess.run(command.split(), capture_output=True, text=True, timeout=30)
    if done.returncode != 0:
        raise RuntimeError(f"{command}: {done.stderr.strip()}")
