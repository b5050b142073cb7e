"""What is left out of a recording, to see what it costs, is not there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.device_training import PARTS
from overlapscope.trace.recording import read_trace

ROOT = Path(__file__).parents[2]


def files_of_training(folder: Path, *options: str) -> set[str]:
    """Those that a rank has recorded into."""
    command = [sys.executable, "-m", "benchmarks.device_training", "ours", "tiny", "--device", "cpu"]
    ended = subprocess.run(
        [*command, "--trace", str(folder), *options],
        input="3 none\n",
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=120,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert ended.returncode == 0, ended.stderr
    assert json.loads(ended.stdout)["step_ms"] > 0
    return {path.name for path in (folder / "rank_0").iterdir()}


@pytest.mark.cluster
@pytest.mark.nightly
def test_parts_that_are_left_out_are_not_recorded(tmp_path: Path) -> None:
    files = files_of_training(tmp_path / "all")
    fewer = files_of_training(tmp_path / "fewer", "--without", *PARTS)
    assert fewer < files
    assert {name.partition("_")[0] for name in files - fewer} >= {"group", "fingerprints"}, files - fewer
    steps, fewer_steps = (len(read_trace(tmp_path / name).steps) for name in ("all", "fewer"))
    assert steps == fewer_steps > 3
