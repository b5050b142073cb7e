"""A Slurm of one node, on this machine, for one test: Debian's ``slurm-wlm``, with files in a folder of its own."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.clients.launch import TIME_LIMIT_S

_PROGRAMS = ("slurmctld", "slurmd", "sbatch", "srun", "scontrol", "sinfo")
_CONFIGURATION = """
ClusterName=one
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller_port}
SlurmdPort={node_port}
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
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
NodeName=localhost NodeHostname={host} NodeAddr=127.0.0.1 CPUs=4 State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES State=UP
"""


def why_not() -> str:
    """Why there can be no such cluster here; empty if there can."""
    missing = [name for name in _PROGRAMS if shutil.which(name) is None]
    if missing:
        return f"no {', '.join(missing)}: apt-get install slurm-wlm"
    return "" if os.geteuid() == 0 else "slurmd starts tasks as root"


@dataclass(frozen=True)
class Cluster:
    """A cluster that takes jobs."""

    folder: Path
    environment: Mapping[str, str]

    def submit(
        self, options: Sequence[object], job: Sequence[object], cwd: Path, environment: Mapping[str, str]
    ) -> str:
        """Run a job to its end; what it printed.

        Raises:
            AssertionError: it failed.
        """
        output = self.folder / "output.txt"
        command = ["sbatch", "--wait", "--output", output, *options, *job]
        ran = subprocess.run(
            [*map(str, command)],
            cwd=cwd,
            env={**self.environment, **environment},
            capture_output=True,
            text=True,
            timeout=TIME_LIMIT_S,
        )
        said = output.read_text() if output.exists() else ""
        assert ran.returncode == 0, ran.stderr + said
        return said


@contextmanager
def start_cluster(folder: Path) -> Iterator[Cluster]:
    """Start a controller and a node."""
    for name in ("state", "spool"):
        (folder / name).mkdir(parents=True)
    ports = _free_ports(2)
    text = _CONFIGURATION.format(host=socket.gethostname(), folder=folder, controller_port=ports[0], node_port=ports[1])
    (folder / "slurm.conf").write_text(text)
    environment = os.environ | {"SLURM_CONF": str(folder / "slurm.conf")}
    commands = (["slurmctld", "-D"], ["slurmd", "-D", "-N", "localhost"])
    daemons = [
        subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        for command in commands
    ]
    try:
        _wait_until_idle(folder, environment)
        yield Cluster(folder, environment)
    finally:
        for daemon in reversed(daemons):
            daemon.terminate()
        for daemon in daemons:
            daemon.wait(30)


def _wait_until_idle(folder: Path, environment: Mapping[str, str]) -> None:
    until_s = time.monotonic() + 60
    while time.monotonic() < until_s:
        ran = subprocess.run(["sinfo", "--noheader", "--format", "%t"], env=environment, capture_output=True, text=True)
        if ran.stdout.strip() == "idle":
            return
        time.sleep(0.5)
    logs = "".join(log.read_text() for log in folder.glob("*.log"))
    raise TimeoutError(f"the node did not come up: {logs}")


def _free_ports(count: int) -> list[int]:
    probes = [socket.socket() for _ in range(count)]
    try:
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [int(probe.getsockname()[1]) for probe in probes]
    finally:
        for probe in probes:
            probe.close()
