"""Training scripts, started as their users start them: as a command, with a time limit, ended by pid."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import psutil

from tests.cli.command_line import COMMAND

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
