"""A Slurm on this machine, for one test: Debian's ``slurm-wlm``, whose nodes are simulated hosts.

Each node has its own network, host name and disk; they share all else, as nodes do with a file system for all.
"""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from overlapscope.lab.network.hosts import Hosts, make_cluster
from tests.clients.launch import TIME_LIMIT_S
from tests.cluster.hosts import why_unavailable

_PROGRAMS = ("slurmctld", "slurmd", "sbatch", "srun", "scontrol", "sinfo")
_CONFIGURATION = """
ClusterName=simulated
SlurmctldHost=node0({controller})
SlurmUser=root
AuthType=auth/none
CredType=cred/none
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SwitchType=switch/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
ReturnToService=2
StateSaveLocation={folder}/state
SlurmdSpoolDir={spool}/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd_%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd_%n.log
{nodes}
PartitionName=all Nodes=ALL Default=YES State=UP
"""
_BOOT = """
set -e
hostname {name}
mount --bind {folder}/hosts /etc/hosts
mkdir -p {folder}/disk_{name} {spool}/{name}
mount --bind {folder}/disk_{name} {folder}/disk
exec "$@"
"""
"""What makes a namespace a node, before a program runs in it."""


def why_not() -> str:
    """Why there can be no such cluster here; empty if there can."""
    missing = [name for name in _PROGRAMS if shutil.which(name) is None]
    if missing:
        return f"no {', '.join(missing)}: apt-get install slurm-wlm"
    return "slurmd starts tasks as root" if os.geteuid() else why_unavailable() or ""


@dataclass(frozen=True)
class Cluster:
    """A cluster that takes jobs."""

    folder: Path
    hosts: Hosts

    @property
    def disk(self) -> Path:
        """Return the folder that is another one on each node."""
        return self.folder / "disk"

    def submit(
        self, options: Sequence[object], job: Sequence[object], cwd: Path, environment: Mapping[str, str]
    ) -> tuple[int, str]:
        """Run a job to its end; its exit code, and what it printed."""
        output = self.folder / "output.txt"
        ran = self._run("sbatch", "--wait", "--output", output, *options, *job, cwd=cwd, environment=environment)
        return ran.returncode, ran.stderr + (output.read_text() if output.exists() else "")

    def wait_until_idle(self) -> None:
        """Wait until all nodes take jobs."""
        until_s = time.monotonic() + 30
        while time.monotonic() < until_s:
            if set(self._run("sinfo", "--noheader", "--Node", "--format", "%t").stdout.split()) == {"idle"}:
                return
            time.sleep(0.5)
        logs = "".join(log.read_text() for log in self.folder.glob("*.log"))
        raise TimeoutError(f"a node did not come up: {logs}")

    def _run(
        self, *command: object, cwd: Path | None = None, environment: Mapping[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*self.hosts.command(0), *map(str, command)],
            cwd=cwd,
            env=os.environ | {"SLURM_CONF": str(self.folder / "slurm.conf")} | dict(environment or {}),
            capture_output=True,
            text=True,
            timeout=TIME_LIMIT_S,
        )


@contextmanager
def start_cluster(folder: Path, nodes: int) -> Iterator[Cluster]:
    """Start a controller, on the first node, and the nodes."""
    for name in ("state", "disk"):
        (folder / name).mkdir(parents=True)
    # Sockets are in the spool, whose path must be short: that of a test with workers is too long.
    with make_cluster(nodes) as hosts, tempfile.TemporaryDirectory(prefix="slurm-") as spool:
        addresses = {f"node{node}": hosts.address(node) for node in range(nodes)}
        lines = [f"NodeName={name} NodeAddr={address} CPUs=4 State=UNKNOWN" for name, address in addresses.items()]
        (folder / "slurm.conf").write_text(
            _CONFIGURATION.format(folder=folder, spool=spool, controller=hosts.address(0), nodes="\n".join(lines))
        )
        named = [f"{address} {name}\n" for name, address in addresses.items()]
        (folder / "hosts").write_text("".join(["127.0.0.1 localhost\n", *named]))
        daemons = []
        try:
            for command, node in [("slurmctld -D", 0), *((f"slurmd -D -N node{node}", node) for node in range(nodes))]:
                boot = _BOOT.format(name=f"node{node}", folder=shlex.quote(str(folder)), spool=shlex.quote(spool))
                # `ip netns exec` would hide the control groups, which slurmd asks for.
                enter = ["nsenter", f"--net=/run/netns/{hosts.namespaces[node]}", "unshare", "--mount", "--uts"]
                daemons.append(
                    subprocess.Popen(
                        [*enter, "sh", "-c", boot, "sh", *command.split()],
                        env=os.environ | {"SLURM_CONF": str(folder / "slurm.conf")},
                        stdout=subprocess.DEVNULL,
                        stderr=subprocess.DEVNULL,
                    )
                )
            cluster = Cluster(folder, hosts)
            cluster.wait_until_idle()
            yield cluster
        finally:
            for daemon in reversed(daemons):
                daemon.terminate()
            for daemon in daemons:
                daemon.wait(30)
            for node in range(nodes):  # of a job that hangs
                for pid in hosts.processes(node):
                    with suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
