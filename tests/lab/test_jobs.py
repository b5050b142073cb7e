"""Jobs of the laboratory: what they say is passed on, and none of their processes outlives them."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from overlapscope.lab import jobs
from tests.cli.command_line import REPOSITORY


def script(folder: Path, text: str) -> Path:
    path = folder / "script.py"
    path.write_text(f"import os, signal, sys, time\nrank = int(os.environ['RANK'])\n{text}\n")
    return path


def test_each_rank_knows_its_place_and_what_it_prints_is_passed_on(tmp_path: Path) -> None:
    lines: list[tuple[int, str]] = []
    text = "print(os.environ['WORLD_SIZE']); print('oh', file=sys.stderr); sys.exit(rank)"
    with jobs.run_fault_job(script(tmp_path, text), 3, on_line=lambda rank, line: lines.append((rank, line))) as job:
        job.wait()
        assert job.ends() == ["succeeded", "exit code 1", "exit code 2"]
    assert sorted(lines) == [(rank, line) for rank in range(3) for line in ("3", "oh")]
    assert job.output == [["3", "oh"]] * 3


def test_only_what_is_asked_for_is_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OVERLAPSCOPE_TRACE", "/elsewhere")
    for trace, said in ((None, "None"), (tmp_path / "trace", str(tmp_path / "trace"))):
        with jobs.run_fault_job(script(tmp_path, "print(os.environ.get('OVERLAPSCOPE_TRACE'))"), 1, trace=trace) as job:
            job.wait()
        assert job.output == [[said]]


def test_ranks_that_hang_after_the_fault_are_waited_for_no_longer_and_ended(tmp_path: Path) -> None:
    text = """
open(os.environ['OVERLAPSCOPE_LAB_FAULT_TIMES'] + '/0', 'w').write(str(time.monotonic_ns()))
if rank == 1:
    os.kill(os.getpid(), signal.SIGSTOP)
time.sleep(600)
"""
    with jobs.run_fault_job(script(tmp_path, text), 2) as job:
        job.wait(patience_s=0.5)
        assert job.ends() == ["still alive", "still alive"]
        assert job.fault_ns() is not None
    assert job.running() == ()
    assert job.ends() == ["killed by SIGKILL"] * 2


def test_ranks_end_with_the_lab_that_is_killed(tmp_path: Path) -> None:
    text = "import sys; sys.path.insert(0, sys.argv[1]); import job; job.limit_process(); print('up'); time.sleep(60)"
    path = script(tmp_path, text.replace("sys.argv[1]", repr(str(REPOSITORY / "examples" / "faults"))))
    program = (
        "import sys; from pathlib import Path; from overlapscope.lab import jobs\n"
        "with jobs.run_fault_job(Path(sys.argv[1]), 1, on_line=lambda _, line: print(line, flush=True)) as job:\n"
        "    print(job.processes[0].pid, flush=True)\n"
        "    job.wait()\n"
    )
    lab = subprocess.Popen(
        [sys.executable, "-c", program, str(path)], stdout=subprocess.PIPE, text=True, cwd=REPOSITORY
    )
    assert lab.stdout is not None
    rank = int(lab.stdout.readline())
    assert lab.stdout.readline() == "up\n"
    lab.send_signal(signal.SIGKILL)
    lab.wait()
    deadline = time.monotonic() + 30
    while Path(f"/proc/{rank}").exists() and Path(f"/proc/{rank}/stat").read_text().split()[2] != "Z":
        assert time.monotonic() < deadline, "the rank lives on"
        time.sleep(0.05)
