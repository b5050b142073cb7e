"""Ranks that end before they have joined a process group: real processes that run our startup hook."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest

from overlapscope.diagnosis.caught_errors import read_caught_errors
from overlapscope.diagnosis.evidence import RankEvidence
from overlapscope.diagnosis.judge import judge
from overlapscope.trace.early_ends import EARLY_END_PATTERN, EarlyEnd
from overlapscope.trace.json_files import write_json
from overlapscope.trace.process_files import write_exit
from overlapscope.trace.schema import JOINING_FILE, rank_folder
from tests.cluster.processes import ROOT
from tests.diagnosis.test_from_logs import evidence_of

STARTUP = ROOT / "instrumented_ddp" / "startup"
PID = 7


def run(folder: Path, script: str, **environment: str) -> subprocess.Popen[str]:
    """Run a script as a process under ``overlapscope record``, until it ends."""
    path = folder / "train.py"
    path.write_text(script)
    added = {"PYTHONPATH": str(STARTUP), "OVERLAPSCOPE_TRACE": str(folder), **environment}
    child = subprocess.Popen([sys.executable, str(path)], env=os.environ | added, stderr=subprocess.PIPE, text=True)
    child.communicate(timeout=60)
    return child


def waits_for_the_others(folder: Path, *ranks: int) -> None:
    """These ranks of three wait in ``init_process_group``."""
    for rank in ranks:
        rank_folder(folder, rank).mkdir()
        content = {"rank": rank, "world_size": 3, "host": "a", "pid": 100 + rank, "boot_id": "b", "time_ns": 1}
        write_json(rank_folder(folder, rank) / JOINING_FILE, content)


def early(folder: Path, rank: int = 1) -> RankEvidence:
    return evidence_of(folder).ranks[rank]


@pytest.mark.parametrize(
    ("script", "kind", "line"),
    [
        ("import os\nimport flash_attn_nope\n", "ModuleNotFoundError", 2),
        ("x = 1\ndef f(:\n    pass\n", "SyntaxError", 2),
        ("import json\n\ndef load():\n    json.loads('{')\n\nload()\n", "JSONDecodeError", 4),
    ],
)
def test_what_ended_a_rank_before_it_joined_is_the_verdict(tmp_path: Path, script: str, kind: str, line: int) -> None:
    waits_for_the_others(tmp_path, 0, 2)
    run(tmp_path, script, RANK="1", WORLD_SIZE="3")
    verdict = judge(evidence_of(tmp_path))
    assert (verdict.kind, verdict.blamed, verdict.step, verdict.certainty) == ("failed", (1,), None, "certain")
    assert (Path(verdict.call_sites[1].file).name, verdict.call_sites[1].line) == ("train.py", line)
    failure = early(tmp_path).failure
    assert failure is not None
    assert failure.type == kind


def test_a_rank_that_exits_before_it_joined_is_named_with_the_line(tmp_path: Path) -> None:
    waits_for_the_others(tmp_path, 0, 2)
    run(tmp_path, "import argparse\nargparse.ArgumentParser().parse_args(['--nope'])\n", RANK="1")
    verdict = judge(evidence_of(tmp_path))
    assert (verdict.kind, verdict.blamed, verdict.call_sites[1].line) == ("failed", (1,), 2)
    assert early(tmp_path).exit_status == 2


def test_without_any_rank_that_joined_the_first_to_fail_is_known(tmp_path: Path) -> None:
    child = run(tmp_path, "raise OSError('no such disk')\n", RANK="1", WORLD_SIZE="2")
    write_exit(tmp_path, child.pid, 1, rank=1)
    write_exit(tmp_path, PID, -15, signaled_at_ns=1, signal_received=15, rank=0)
    verdict = judge(evidence_of(tmp_path))
    assert (verdict.kind, verdict.blamed) == ("failed", (1,))


@pytest.mark.parametrize(("status", "kind"), [(-11, "killed"), (-9, "killed"), (2, "failed"), (0, "never started")])
def test_what_a_launcher_saw_of_a_rank_that_left_nothing_is_the_verdict(tmp_path: Path, status: int, kind: str) -> None:
    waits_for_the_others(tmp_path, 0, 2)
    write_exit(tmp_path, PID, status, rank=1)
    verdict = judge(evidence_of(tmp_path))
    assert (verdict.kind, verdict.blamed, early(tmp_path).exit_status) == (kind, (1,), status)


def test_a_child_of_multiprocessing_is_the_only_rank_that_is_missing(tmp_path: Path) -> None:
    waits_for_the_others(tmp_path, 0, 2)
    write_exit(tmp_path, PID, -11, is_of_multiprocessing=True)
    assert judge(evidence_of(tmp_path)).blamed == (1,)
    write_exit(tmp_path, PID + 1, 1, is_of_multiprocessing=True)  # which of them was the rank?
    assert 1 not in evidence_of(tmp_path).ranks


def test_other_processes_of_the_job_are_no_rank(tmp_path: Path) -> None:
    waits_for_the_others(tmp_path, 0, 2)
    run(tmp_path, "raise ValueError\n", RANK="")
    assert not list(tmp_path.glob(EARLY_END_PATTERN))
    helper = "import subprocess, sys\nif sys.argv[1:]: 1 / 0\nsubprocess.run([sys.executable, __file__, 'x'])\n"
    run(tmp_path, helper, RANK="1")
    assert not list(tmp_path.glob(EARLY_END_PATTERN))
    assert 1 not in evidence_of(tmp_path).ranks


def test_a_helper_that_failed_before_a_rank_was_ended_is_not_its_failure(tmp_path: Path) -> None:
    waits_for_the_others(tmp_path, 0, 2)
    run(tmp_path, "raise ValueError\n", RANK="1")
    write_exit(tmp_path, PID, -15, signaled_at_ns=1, signal_received=15, rank=1)
    assert early(tmp_path).failure is None


def test_a_rank_that_fails_while_it_joins_has_that_error(tmp_path: Path) -> None:
    waits_for_the_others(tmp_path, 0, 2)
    child = run(tmp_path, "raise RuntimeError('Connection closed by peer')\n", RANK="0")
    content = {"rank": 0, "world_size": 3, "host": os.uname().nodename, "pid": child.pid, "boot_id": "b", "time_ns": 1}
    write_json(rank_folder(tmp_path, 0) / JOINING_FILE, content)
    failure = early(tmp_path, 0).failure
    assert failure is not None
    assert (failure.type, early(tmp_path, 0).liveness) == ("RuntimeError", "failed")


def test_a_child_process_that_a_rank_started_anew_is_not_the_rank(tmp_path: Path) -> None:
    frames = ({"file": "/home/me/train.py", "line": 31, "function": "feed"},)
    end = EarlyEnd(
        pid=PID, host="a", boot_id="b", time_ns=9, rank=1, world_size=3, exit_status=None, exit_text="",
        type="ValueError", message="bad shard", traceback="", frames=frames, exit_frames=(),
    )  # fmt: skip
    write_json(tmp_path / f"early_end_a_{PID}.json", asdict(end))
    (one,) = read_caught_errors(rank_folder(tmp_path, 1), [], rank=1, pid=PID + 1)
    assert (one.how, one.process, one.failure.type, one.last_ns) == ("process", str(PID), "ValueError", 9)
    assert one.failure.call_site is not None
    assert one.failure.call_site.line == 31
    assert read_caught_errors(rank_folder(tmp_path, 1), [], rank=1, pid=PID) == ()
    assert read_caught_errors(rank_folder(tmp_path, 0), [], rank=0, pid=PID + 1) == ()
