"""Whoever reads a command's output may leave, as ``head`` does: no command minds."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from overlapscope.bucket_model.calibration import read_calibration
from tests.cli.command_line import COMMAND, REPOSITORY
from tests.ordered import end, steps, write_order
from tests.synthetic import write_recording


def run_for_nobody(*arguments: object) -> tuple[int, str]:
    """The exit code and stderr of a command whose reader has left before it began."""
    reading, writing = os.pipe()
    os.close(reading)
    # Buffered, as at a shell: what is left at exit is flushed to nobody, too.
    environment = os.environ | {"GLOO_SOCKET_IFNAME": "lo", "PYTHONUNBUFFERED": ""}
    ran = subprocess.run(
        [*COMMAND, *map(str, arguments)],
        stdout=writing,
        stderr=subprocess.PIPE,
        text=True,
        cwd=REPOSITORY,
        env=environment,
        timeout=120,
    )
    os.close(writing)
    return ran.returncode, ran.stderr


@pytest.mark.parametrize("arguments", [["--help"], ["record", "--help"], ["lab"], ["lab", "faults"]], ids=" ".join)
def test_what_is_printed_from_its_own_knowledge(arguments: list[str]) -> None:
    assert run_for_nobody(*arguments) == (0, "")


@pytest.mark.parametrize("verb", ["recommend", "stragglers", "summary"])
def test_what_is_printed_of_a_recording(tmp_path: Path, verb: str) -> None:
    code, said = run_for_nobody(verb, write_recording(tmp_path, ranks=2, steps=30))
    assert code == 0
    assert all(line.endswith(" ...") for line in said.splitlines()), "no more than progress, on a slow machine"


def test_what_is_printed_of_the_order_of_collectives(tmp_path: Path) -> None:
    end(write_order(tmp_path, {0: steps(5), 1: steps(5)}), (0, 1))
    assert run_for_nobody("diagnose", tmp_path) == (0, "")


def test_what_is_found_goes_to_stderr_and_the_exit_code_all_the_same(tmp_path: Path) -> None:
    (write_recording(tmp_path, ranks=2) / "rank_1" / "events.log").write_bytes(b"")
    code, said = run_for_nobody("summary", tmp_path)
    assert code == 1
    assert "rank_1/events.log" in said


@pytest.mark.cluster
@pytest.mark.nightly
def test_a_fault_is_run_to_its_end(tmp_path: Path) -> None:
    assert run_for_nobody("lab", "fault", "failed-rank", "--ranks", 2, "-o", tmp_path) == (0, "")


@pytest.mark.cluster
@pytest.mark.nightly
def test_a_calibration_is_written(tmp_path: Path) -> None:
    file = tmp_path / "calibration.json"
    code, _ = run_for_nobody("calibrate", "--max-mb", 1, "-o", file)
    assert code == 0
    assert read_calibration(file).samples
