"""``overlapscope calibrate``: the ranks it starts, the table it prints, and what it is refused for."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from overlapscope.bucket_model.calibration import read_calibration
from tests.cli.command_line import REPOSITORY, overlapscope_process

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


@pytest.mark.cluster
@pytest.mark.parametrize(
    "launcher",
    [
        pytest.param(["--nproc", "2"], id="alone", marks=pytest.mark.nightly),
        pytest.param(["--", *TORCHRUN], id="launcher", marks=pytest.mark.nightly),
    ],
)
def test_it_prints_a_table_and_writes_the_file(tmp_path: Path, launcher: list[str]) -> None:
    file = tmp_path / "new" / "calibration.json"
    traces = tmp_path / "traces"
    ran = overlapscope_process(
        "calibrate", "-o", file, "--max-mb", 1, *launcher, GLOO_SOCKET_IFNAME="lo", OVERLAPSCOPE_TRACE=str(traces)
    )
    assert ran.returncode == 0, ran.stderr
    title, heading, *rows, pair, done = ran.stdout.splitlines()
    assert " 2 ranks on 1 host, gloo, cpu" in title
    assert heading.split() == ["size", "time", "algbw", "busbw", "times"]
    calibration = read_calibration(file)
    assert len(rows) == len(calibration.samples)
    assert rows[-1].split()[:2] == ["1", "MB"]
    assert " 1 MB at once " in pair
    assert done == f"written to {file}"
    assert not traces.exists(), "nothing is recorded"


def test_without_a_launcher_the_module_says_so(tmp_path: Path) -> None:
    environment = {
        name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "MASTER_ADDR")
    }
    command = [sys.executable, "-m", "instrumented_ddp.calibrate", "-o", str(tmp_path / "c.json")]
    ran = subprocess.run(command, capture_output=True, text=True, cwd=REPOSITORY, env=environment, timeout=120)
    assert ran.returncode == 1
    assert ran.stderr.startswith("overlapscope calibrate: RANK, WORLD_SIZE, MASTER_ADDR")
    assert ran.stderr.count("\n") == 1
