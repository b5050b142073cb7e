"""Ranks of an experiment that something else has started."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from overlapscope.lab.experiments.results import read_results
from overlapscope.trace.folders import find_rank_folders
from tests.cli.command_line import COMMAND, REPOSITORY

pytestmark = [pytest.mark.cluster, pytest.mark.nightly]

TIME_LIMIT_S = 480
"""A busy machine is slow to start the many processes of this job."""
OPTIONS = ["lab", "run", "breakdown", "--repetitions", "1", "--steps", "10"]
MODELS = ["--model", "small-transformer", "--model", "small-convnet"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--no-python"]


def with_a_disk_of_its_own(rank: int, folder: Path) -> list[str]:
    """What runs a command on every rank, of which one sees an empty disk in place of a folder."""
    empty_disk = f'exec unshare --mount sh -c \'mount -t tmpfs none {folder} && exec "$@"\' sh "$@"'
    return ["sh", "-c", f'[ "$RANK" != {rank} ] || {empty_disk}; exec "$@"', "sh"]


def test_under_torchrun_ranks_may_share_no_disk_and_a_trial_that_fails_takes_no_other_with_it(tmp_path: Path):
    """One job, as starting one takes long. What fails is the data of one of two models."""
    broken, output = tmp_path / "packages" / "sklearn", tmp_path / "lab"
    broken.mkdir(parents=True)
    output.mkdir()
    (broken / "__init__.py").write_text("raise RuntimeError('the digits are gone')")
    is_root = os.geteuid() == 0  # who else can't give a process a disk
    launcher = [*TORCHRUN, *(with_a_disk_of_its_own(1, output) if is_root else [])]
    environment = {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(broken.parent)}
    job = subprocess.run(
        [*launcher, *COMMAND, *OPTIONS, *MODELS, "-o", str(output)],
        cwd=REPOSITORY,
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=TIME_LIMIT_S,
    )
    assert job.returncode == 0, job.stdout

    # The command was the rank: it has started none itself.
    rows = read_results(output / "breakdown")
    assert rows["ranks"].tolist() == [2] * 4
    assert all(argv[:4].tolist() == ["overlapscope", "lab", "run", "breakdown"] for argv in rows["argv"])

    failures = rows.groupby("model")["failure"].agg(list).to_dict()
    assert failures == {"small-transformer": [""] * 2, "small-convnet": ["the digits are gone"] * 2}
    assert job.stdout.count("failed: the digits are gone") == 2

    # Rank 1 has sent its recording, if it has a disk of its own.
    for recording in rows.query("failure == ''")["recording"]:
        assert list(find_rank_folders(output / "breakdown" / recording)) == [0, 1]
    folder = output / "breakdown" / rows.query("failure != ''")["recording"].iloc[0]
    assert (folder / "1-trial.log").exists() != is_root
    if not is_root:
        pytest.skip("all but this passed: only root can give a rank a disk of its own")
