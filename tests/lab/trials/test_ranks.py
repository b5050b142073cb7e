"""Ranks of an experiment that something else has started."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from overlapscope.lab.trials.results import read_results
from overlapscope.trace.folders import find_rank_folders
from tests.commands.command_line import COMMAND, REPOSITORY

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

TIME_LIMIT_S = 240
OPTIONS = ["lab", "run", "breakdown", "--model", "small-transformer", "--repetitions", "1", "--steps", "10"]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def start(command: list[str], variables: Mapping[str, str]) -> subprocess.Popen[str]:
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", **variables}
    return subprocess.Popen(
        command, cwd=REPOSITORY, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a process a disk of its own")
def test_ranks_that_share_no_disk_send_their_recordings(tmp_path: Path):
    """Rank 1 sees an empty disk where rank 0 keeps the results."""
    port = str(free_port())
    meeting = {"WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    command = [*COMMAND, *OPTIONS, "-o", str(tmp_path)]
    own_disk = ["unshare", "--mount", "sh", "-c", f'mount -t tmpfs none {tmp_path} && exec "$@"', "sh"]
    ranks = [
        start(command, {**meeting, "RANK": "0"}),
        start([*own_disk, *command], {**meeting, "RANK": "1"}),
    ]
    try:
        output = [rank.communicate(timeout=TIME_LIMIT_S)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0, 0], output
    rows = read_results(tmp_path / "breakdown")
    assert rows["failure"].tolist() == ["", ""]
    for recording in rows["recording"]:
        assert list(find_rank_folders(tmp_path / "breakdown" / recording)) == [0, 1]


def test_under_torchrun_the_command_is_the_rank(tmp_path: Path):
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--no-python"]
    job = start([*launcher, *COMMAND, *OPTIONS, "-o", str(tmp_path)], {})
    output, _ = job.communicate(timeout=TIME_LIMIT_S)
    assert job.returncode == 0, output
    rows = read_results(tmp_path / "breakdown")
    assert rows["failure"].tolist() == ["", ""]
    assert rows["ranks"].tolist() == [2, 2]
    assert rows["argv"][0][:4].tolist() == ["overlapscope", "lab", "run", "breakdown"]


def test_a_trial_that_fails_takes_no_other_with_it(tmp_path: Path):
    """Here it is the data of one of two models."""
    broken = tmp_path / "packages" / "sklearn"
    broken.mkdir(parents=True)
    (broken / "__init__.py").write_text("raise RuntimeError('the digits are gone')")
    command = [*COMMAND, *OPTIONS, "--model", "small-convnet", "--ranks", "2", "-o", str(tmp_path / "lab")]
    job = start(command, {"PYTHONPATH": str(broken.parent)})
    output, _ = job.communicate(timeout=TIME_LIMIT_S)
    assert job.returncode == 0, output
    rows = read_results(tmp_path / "lab" / "breakdown")
    failures = dict(zip(rows["model"], rows["failure"], strict=True))
    assert failures == {"small-transformer": "", "small-convnet": "the digits are gone"}
    assert output.count("failed: the digits are gone") == 2
