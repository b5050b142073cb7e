"""Training scripts, started as their users start them: as a command, with a time limit, ended by pid."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

import psutil

from tests.cli.command_line import COMMAND
from tests.cluster.warm_process import WarmProcess

TIME_LIMIT_S = 240
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
QUIET_AND_OFFLINE = {
    "GLOO_SOCKET_IFNAME": "lo",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "TRANSFORMERS_VERBOSITY": "error",
}


def run(command: list[str]) -> None:
    """Run a command until all of its processes have ended.

    Raises:
        AssertionError: it failed. The message is its output.
        TimeoutExpired: it did not end, and all of its processes were killed.
    """
    environment = os.environ | QUIET_AND_OFFLINE
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        try:
            output, _ = process.communicate(timeout=TIME_LIMIT_S)  # ends when the last heir of the pipe does
        except BaseException:
            _kill_family(process.pid)
            raise
    assert process.returncode == 0, output


FORKING_RANKS = """
import os, runpy, sys, torch
torch.set_num_threads(1)  # as OMP_NUM_THREADS says, which is read when torch is imported
sys.argv = {arguments!r}
sys.path[0] = {folder!r}
train = runpy.run_path(sys.argv[0])["main"]
os.environ |= {environment!r}
first = os.fork()
os.environ["RANK"] = os.environ["LOCAL_RANK"] = "0" if first else "1"
train()
if first:
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(first, 0)[1]))
"""


def run_forked(arguments: list[str]) -> None:
    """Run the ``main`` of a script on two ranks, which are forked from one process that has imported it.

    Raises:
        AssertionError: one has failed. The message is the output of both.
        TimeoutError: it did not end, and was killed.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    job = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    folder = str(Path(arguments[0]).parent)
    text = FORKING_RANKS.format(arguments=arguments, folder=folder, environment=job)
    with tempfile.TemporaryFile() as output:
        process = WarmProcess(["-c", text], os.environ | QUIET_AND_OFFLINE, output, leads_group=True)
        try:
            code = process.wait(TIME_LIMIT_S)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        output.seek(0)
        assert code == 0, output.read().decode()


def record(command: list[str], traces: Path) -> None:
    """Run a command under ``overlapscope record``."""
    run([*COMMAND, "record", "-o", str(traces), "--", *command])


def _kill_family(pid: int) -> None:
    try:
        parent = psutil.Process(pid)
        family = [*parent.children(recursive=True), parent]
    except psutil.NoSuchProcess:
        return
    for process in family:
        try:
            process.kill()
        except psutil.NoSuchProcess:
            continue
