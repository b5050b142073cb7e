"""A job on simulated hosts: one command on each of them, stopped together.

Run as a program on a host, it becomes the command, with the host's name and the names of the others.
"""

from __future__ import annotations

import ctypes
import math
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from overlapscope.lab.network.hosts import INTERFACE, Hosts, python_module

GRACE_PERIOD_S: Final = 10.0
"""Time to exit without SIGKILL, for the other hosts after one has failed, or for all of them after Ctrl-C."""
_MASTER_PORT: Final = "29500"
"""torch's default port. Hosts of different clusters share no ports."""
_POLL_INTERVAL_S: Final = 0.05
# linux/sched.h, linux/mount.h
_CLONE_NEWUTS: Final = 0x04000000
_MS_BIND: Final = 4096

OnLine = Callable[[int, str], None]


def host_name(host: int) -> str:
    """Return the host name, for the host itself and for the others."""
    return f"host{host}"


def make_launcher_variables(host: int, hosts: Hosts, ranks_per_host: int) -> dict[str, str]:
    """Return the environment variables that tell launchers, and scripts without one, their position in the cluster.

    torchrun takes its options from those that begin with ``PET_``. A host with one rank needs no launcher.
    """
    count = len(hosts.namespaces)
    variables = {
        "PET_NNODES": str(count),
        "PET_NODE_RANK": str(host),
        "PET_NPROC_PER_NODE": str(ranks_per_host),
        "PET_MASTER_ADDR": hosts.address(0),
        "PET_MASTER_PORT": _MASTER_PORT,
        "MASTER_ADDR": hosts.address(0),
        "MASTER_PORT": _MASTER_PORT,
        "GLOO_SOCKET_IFNAME": INTERFACE,
        "NCCL_SOCKET_IFNAME": INTERFACE,
    }
    if ranks_per_host == 1:
        variables |= {"RANK": str(host), "WORLD_SIZE": str(count), "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    return variables


@dataclass
class ClusterJob:
    """A running command on each host, by host number."""

    hosts: Hosts
    processes: list[subprocess.Popen[str]]
    first_failed: int | None = None
    """First host whose command failed."""

    def wait(self, signals: Sequence[int], on_failure: Callable[[int, int], None]) -> int:
        """Wait until the commands on all hosts have ended.

        After a failure or a signal, the others have ``GRACE_PERIOD_S`` to exit on their own. A second signal ends them
        at once.

        Args:
            signals: Signals received so far that are meant for the job; polled.
            on_failure: Called with the first host that has failed, and its exit status.

        Returns:
            The exit status of the first command that failed, -N if signal N ended it or the job; 0 if all succeeded.
        """
        signals_sent = 0
        terminate_s = kill_s = math.inf
        while self._running():
            now_s = time.monotonic()
            if self.first_failed is None and not signals_sent and (failed := self._failed()) is not None:
                self.first_failed = failed
                on_failure(failed, self.processes[failed].returncode)
                terminate_s, kill_s = now_s + GRACE_PERIOD_S, now_s + 2 * GRACE_PERIOD_S
            if len(signals) > signals_sent:
                self._send(signals[0])
                terminate_s, kill_s = math.inf, now_s if signals_sent else now_s + GRACE_PERIOD_S
                signals_sent = len(signals)
            if now_s >= kill_s:
                self.kill()
            elif now_s >= terminate_s:
                self._send(signal.SIGTERM)
                terminate_s = math.inf
            time.sleep(_POLL_INTERVAL_S)
        if self.first_failed is None and signals:
            return -signals[0]
        if self.first_failed is None and (failed := self._failed()) is not None:
            self.first_failed = failed
            on_failure(failed, self.processes[failed].returncode)
        return 0 if self.first_failed is None else self.processes[self.first_failed].returncode

    def kill(self) -> None:
        """Kill all processes on the hosts, also those that their command has left behind, and wait for their end."""
        deadline_s = time.monotonic() + GRACE_PERIOD_S  # a process that waits for a disk may take longer
        while (left := self._pids()) and time.monotonic() < deadline_s:
            for pid in left:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(_POLL_INTERVAL_S)

    def _pids(self) -> list[int]:
        return [pid for host in range(len(self.processes)) for pid in self.hosts.processes(host)]

    def _running(self) -> list[subprocess.Popen[str]]:
        return [process for process in self.processes if process.poll() is None]

    def _failed(self) -> int | None:
        return next((host for host, process in enumerate(self.processes) if process.poll()), None)

    def _send(self, number: int) -> None:
        """Send a signal to the command and its process group, as a terminal does."""
        for process in self._running():
            with suppress(ProcessLookupError):
                os.killpg(process.pid, number)


@contextmanager
def run_on_hosts(
    hosts: Hosts,
    command: Sequence[str],
    environment: Mapping[str, str],
    ranks_per_host: int,
    on_line: OnLine,
) -> Iterator[ClusterJob]:
    """Start a command on each host, and kill what remains of it afterwards.

    Args:
        hosts: Hosts that exist for as long as the block.
        command: The command; its program is a path.
        environment: Environment for all hosts; host-specific variables are added.
        ranks_per_host: Number of training processes per host.
        on_line: Called with the host and each line of output, on a thread.
    """
    numbers = range(len(hosts.namespaces))
    cores = len(os.sched_getaffinity(0))
    shared = {
        "OMP_NUM_THREADS": str(max(1, cores // (len(numbers) * ranks_per_host))),  # all hosts share the same cores
        **environment,
        "PYTHONUNBUFFERED": "1",
    }
    with tempfile.TemporaryDirectory(prefix="overlapscope-cluster-") as etc:
        Path(etc, "hosts").write_text(_hosts_file(hosts), encoding="utf-8")
        Path(etc, "resolv.conf").write_text("# no name server can be reached from here\n", encoding="utf-8")
        job, readers = ClusterJob(hosts, []), []
        try:
            for host in numbers:
                become = [*hosts.command(host), *python_module("overlapscope.lab.cluster"), host_name(host), etc]
                process = subprocess.Popen(
                    [*become, *command],
                    env=shared | make_launcher_variables(host, hosts, ranks_per_host),
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                    errors="replace",
                    start_new_session=True,  # Ctrl-C reaches only us, and is passed on to all hosts from here
                )
                job.processes.append(process)
                reader = threading.Thread(target=_forward_output, args=(process, host, on_line), daemon=True)
                reader.start()
                readers.append(reader)
            yield job
        finally:
            job.kill()
            for process in job.processes:
                process.wait()
            for reader in readers:
                reader.join(timeout=GRACE_PERIOD_S)


def _hosts_file(hosts: Hosts) -> str:
    addresses = {hosts.address(host): host_name(host) for host in range(len(hosts.namespaces))}
    # torch looks up names of IPv4 addresses written as IPv6, and warns if there is none.
    lines = [f"{address} {name}\n::ffff:{address} {name}" for address, name in addresses.items()]
    return "\n".join(["127.0.0.1 localhost", "::1 localhost", *lines, ""])


def _forward_output(process: subprocess.Popen[str], host: int, on_line: OnLine) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        on_line(host, line.rstrip("\n"))


def main() -> None:
    """Take a host's name, and become the command, as started by ``run_on_hosts``: NAME ETC-FOLDER PROGRAM ARGUMENTS...

    ``ip netns exec`` gives the process a private mount namespace, so files mounted over those in ``/etc`` here are seen
    on this host only.

    Raises:
        OSError: The kernel refuses it, or the program can't be run.
    """
    name, etc, program, *arguments = sys.argv[1:]
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_CLONE_NEWUTS) != 0:
        raise OSError(ctypes.get_errno(), "unshare")
    socket.sethostname(name)
    for own in Path(etc).iterdir():
        over = Path("/etc", own.name)
        if over.exists() and libc.mount(bytes(own), bytes(over), None, _MS_BIND, None) != 0:
            raise OSError(ctypes.get_errno(), f"mount {over}")
    os.execv(program, [program, *arguments])


if __name__ == "__main__":
    try:
        main()
    except OSError as error:
        sys.exit(f"{sys.argv[3]}: can't be started ({error})")
