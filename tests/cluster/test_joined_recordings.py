"""Two hosts of one job, each with an ``overlapscope record --join`` of its own, leave one recording."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from overlapscope.diagnosis.attempts import read_attempt
from tests.cli.command_line import COMMAND, REPOSITORY
from tests.cluster.test_unchanged_scripts import ENVIRONMENT, WITH_DDP, script_in

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

TIME_LIMIT_S = 120


def test_two_commands_of_a_job_record_into_one_folder(tmp_path: Path) -> None:
    script = script_in(tmp_path, WITH_DDP.format(package="torch.nn.parallel"))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    job = os.environ | ENVIRONMENT | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2"}
    command = [*COMMAND, "record", "--join", "-o", str(tmp_path / "traces"), "--", sys.executable, str(script)]
    hosts = [
        subprocess.Popen(command, cwd=REPOSITORY, env=job | {"RANK": rank}, stderr=subprocess.PIPE, text=True)
        for rank in ("0", "1")
    ]
    try:
        said = [host.communicate(timeout=TIME_LIMIT_S)[1] for host in hosts]
    finally:
        for host in hosts:
            host.terminate()
    assert [host.returncode for host in hosts] == [0, 0], said
    assert all("recorded 2 ranks, 3 steps" in each for each in said), said
    attempt = read_attempt(tmp_path / "traces")
    assert (attempt.verdict.kind, sorted(attempt.evidence.ranks)) == ("healthy", [0, 1])
    assert not (tmp_path / "traces" / "restart_1").exists()
