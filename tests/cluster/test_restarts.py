"""A job that is started again leaves a recording of each attempt."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from overlapscope.diagnosis.attempts import Attempt, read_attempts
from overlapscope.trace.folders import find_rank_folders
from overlapscope.trace.process_files import read_exits
from tests.cluster.test_unchanged_scripts import WITH_DDP, record, script_in

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

WITH_RESTART = (
    WITH_DDP.format(package="torch.nn.parallel")
    .replace(
        'if step == 2 and "fail" in sys.argv', 'if step == 2 and os.environ["TORCHELASTIC_RESTART_COUNT"] in sys.argv'
    )
    .replace("import sys", "import os, sys")
)

WITH_RETRY = """
import os
import sys

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def train(rank, rendezvous, fails):
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=2)
    for _ in range(4):
        dist.all_reduce(torch.ones(5))
    if rank == 1 and fails:
        raise ValueError("a bad batch")
    dist.destroy_process_group()


if __name__ == "__main__":
    try:
        mp.spawn(train, (sys.argv[1] + "_0", True), nprocs=2)
    except mp.ProcessRaisedException:
        mp.spawn(train, (sys.argv[1] + "_1", False), nprocs=2)
"""


def torchrun(script: Path, *failing: int) -> list[object]:
    """With two starts, of which these fail."""
    rendezvous = ["--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0", "--max-restarts", 1]
    return [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", 2, *rendezvous, script, *failing]


def restarted(traces: Path, script: Path, *failing: int) -> tuple[int, str, list[Attempt]]:
    """The exit code of two starts, what was said, and their recordings."""
    # Else the ranks of a later attempt meet in a store with the addresses of the first one's, and gloo gives up.
    ran = record(traces, *torchrun(script, *failing), TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1")
    return ran.returncode, ran.stderr, list(read_attempts(traces))


def pids_of(traces: Path) -> set[int]:
    folders = find_rank_folders(traces).values()
    return {json.loads((folder / "rank.json").read_text())["pid"] for folder in folders}


def test_each_attempt_of_torchrun_is_a_recording_with_a_verdict_of_its_own(tmp_path: Path) -> None:
    traces = tmp_path / "traces"
    code, said, (first, second) = restarted(traces, script_in(tmp_path, WITH_RESTART), 0)
    assert code == 0, said
    assert (first.path, first.verdict.kind, first.verdict.blamed, first.verdict.step) == (traces, "failed", (1,), 2)
    assert (second.path, second.verdict.kind) == (traces / "restart_1", "healthy")
    assert f"{first.line}\n{second.line}\n" in said
    assert "2 ranks, 3 steps" in said
    for attempt in (first, second):
        noted = read_exits(attempt.path, [])
        assert pids_of(attempt.path) == {each.pid for each in noted if not each.is_command}
        assert [each.status for each in noted if each.is_command] == ([0] if attempt is second else [])


@pytest.mark.nightly
def test_if_the_last_attempt_fails_too_its_verdict_is_that_of_the_job(tmp_path: Path) -> None:
    traces = tmp_path / "traces"
    code, said, (first, second) = restarted(traces, script_in(tmp_path, WITH_RESTART), 0, 1)
    assert code == 1
    assert first.verdict.kind == second.verdict.kind == "failed"
    assert f"{first.line}\n{second.line}\n\n{second.verdict.sentence}\n" in said
    assert second.verdict.sentence.startswith("Rank 1 failed")
    assert "ValueError: a bad batch" in second.verdict.sentence
    assert said.splitlines()[-2].startswith("overlapscope record: ")


@pytest.mark.nightly
def test_a_script_that_starts_its_ranks_twice_leaves_two_recordings(tmp_path: Path) -> None:
    traces = tmp_path / "traces"
    ran = record(traces, sys.executable, script_in(tmp_path, WITH_RETRY), tmp_path / "rendezvous")
    assert ran.returncode == 0, ran.stderr
    first, second = read_attempts(traces)
    assert (first.verdict.kind, first.verdict.blamed, second.verdict.kind) == ("failed", (1,), "healthy")
    assert pids_of(traces).isdisjoint(pids_of(traces / "restart_1"))
    assert "training continues unrecorded" not in ran.stderr
