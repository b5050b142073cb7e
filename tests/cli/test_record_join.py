"""``overlapscope record --join``: the commands of one job record into one folder, and nobody else does."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from overlapscope.cli import joined_job
from overlapscope.cli.joined_job import find_job, join_folder, wait_for_other_hosts
from overlapscope.diagnosis.from_recording import read_evidence
from overlapscope.errors import OverlapScopeError
from overlapscope.trace.json_files import write_json
from overlapscope.trace.process_files import read_exits, write_exit
from overlapscope.trace.recording import read_trace
from overlapscope.trace.schema import ENDED_FILE
from tests.cli.command_line import Ran, overlapscope
from tests.ordered import lives_here, steps, write_order
from tests.synthetic import write_recording

RANK = """
import os, shutil, sys, tempfile
from pathlib import Path
from overlapscope.trace.json_files import write_json
from tests.synthetic import write_recording
with tempfile.TemporaryDirectory() as made:
    write_recording(Path(made), ranks=2, steps=5)
    own = Path(made, f"rank_{sys.argv[1]}")
    write_json(own / "ended.json", {"how": "ended", "time_ns": 10**18})
    shutil.move(own, os.environ["OVERLAPSCOPE_TRACE"])
"""
JOB = {"SLURM_JOB_ID": "12"}


def record_rank(folder: Path, rank: int) -> Ran:
    return overlapscope("record", "--join", "-o", folder, "--", sys.executable, "-c", RANK, rank, **JOB)


def test_the_ranks_of_all_commands_of_a_job_are_one_recording(tmp_path: Path) -> None:
    first, second = (record_rank(tmp_path / "a", rank) for rank in (0, 1))
    assert (first.returncode, second.returncode) == (0, 0), first.stderr + second.stderr
    assert " 1 rank, 5 steps, " in first.stderr
    assert " 2 ranks, 5 steps, " in second.stderr
    assert len(read_trace(tmp_path / "a").steps) == 10
    assert [each.is_command for each in read_exits(tmp_path / "a", [])] == [True, True]


def test_a_command_that_records_nothing_leaves_the_folder_to_the_others(tmp_path: Path) -> None:
    record_rank(tmp_path / "a", 0)
    fail = [sys.executable, "-c", "raise SystemExit(3)"]
    assert overlapscope("record", "--join", "-o", tmp_path / "a", "--", *fail, **JOB).returncode == 3
    assert overlapscope("record", "--join", "-o", tmp_path / "b", "--", *fail, **JOB).returncode == 3
    assert (tmp_path / "b" / "job.json").exists()
    assert record_rank(tmp_path / "a", 1).returncode == 0
    assert len(read_trace(tmp_path / "a").steps) == 10


def test_only_commands_of_the_same_job_are_let_in(tmp_path: Path) -> None:
    join_folder(tmp_path / "a", "rendezvous 7")
    write_recording(tmp_path / "a", ranks=1)
    join_folder(tmp_path / "a", "rendezvous 7")
    with pytest.raises(OverlapScopeError, match="rendezvous 7, not Slurm job 12"):
        join_folder(tmp_path / "a", "Slurm job 12")
    write_recording(tmp_path / "b", ranks=1)
    with pytest.raises(OverlapScopeError, match="without --join"):
        join_folder(tmp_path / "b", "rendezvous 7")
    (tmp_path / "c" / "job.json").mkdir(parents=True)
    with pytest.raises(OverlapScopeError, match="does not say which job"):
        join_folder(tmp_path / "c", "rendezvous 7")


def test_force_makes_a_folder_free_for_another_job(tmp_path: Path) -> None:
    record_rank(tmp_path, 0)
    overlapscope("record", "--force", "-o", tmp_path, "--", "true")
    join_folder(tmp_path, "rendezvous 7")


@pytest.mark.parametrize(
    ("command", "variables", "job"),
    [
        ("torchrun train.py", {"SLURM_JOB_ID": "12", "MASTER_ADDR": "node0"}, "Slurm job 12"),
        ("torchrun --rdzv-id 7 --rdzv_endpoint=node0:1 train.py", {}, "rendezvous 7, rendezvous at node0:1"),
        ("torchrun train.py", {"PET_RDZV_ENDPOINT": "node0:1", "PET_RDZV_ID": "none"}, "rendezvous at node0:1"),
        ("python train.py", {"TORCHELASTIC_RUN_ID": "7", "MASTER_ADDR": "node0"}, "rendezvous 7"),
        ("torchrun --master-addr node0 train.py", {}, "master node0:29500"),
        ("torchrun --rdzv-id=7 train.py --rdzv-id 8", {}, "rendezvous 7"),
        ("python train.py", {"MASTER_ADDR": "node0", "MASTER_PORT": "1"}, "master node0:1"),
    ],
)
def test_a_job_is_known_by_what_all_of_its_hosts_are_given(command: str, variables: dict[str, str], job: str) -> None:
    assert find_job(command.split(), variables) == job


def test_a_command_that_no_host_shares_anything_with_belongs_to_no_job() -> None:
    with pytest.raises(OverlapScopeError, match="--join"):
        find_job(["torchrun", "--standalone", "train.py"], {"TORCHELASTIC_RUN_ID": "none"})


def test_ranks_elsewhere_are_waited_for_and_not_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_order(tmp_path, {0: steps(1), 1: steps(1)})
    lives_here(tmp_path, 0, 2**22 - 1)  # it was here, and is gone
    naps: list[float] = []

    def end_at_last(seconds: float) -> None:
        naps.append(seconds)
        if len(naps) == 3:
            write_json(tmp_path / "rank_1" / ENDED_FILE, {"how": "ended"})

    monkeypatch.setattr(joined_job.time, "sleep", end_at_last)
    wait_for_other_hosts(tmp_path)
    assert len(naps) == 3
    (tmp_path / "rank_1" / ENDED_FILE).unlink()
    monkeypatch.setattr(joined_job, "_WAIT_S", 0.0)
    wait_for_other_hosts(tmp_path)
    assert len(naps) == 3


def test_of_several_commands_the_one_that_was_signaled_tells_how_the_job_ended(tmp_path: Path) -> None:
    write_order(tmp_path, {0: steps(2)})
    write_exit(tmp_path, 11, 0, is_command=True)
    write_exit(tmp_path, 12, 1, is_command=True)
    assert read_evidence(tmp_path)[0].job_status == 1
    write_exit(tmp_path, 13, -15, signaled_at_ns=5, signal_received=15, is_command=True)
    assert (read_evidence(tmp_path)[0].job_status, read_evidence(tmp_path)[0].job_signal) == (-15, 15)
