"""``overlapscope recommend``: the text for people, the JSON for programs, and the plan as a file."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from overlapscope.bucket_model.calibration import AllReduceSample, Calibration, write_calibration
from overlapscope.bucket_model.plan_file import read_plan
from tests.cli.command_line import overlapscope
from tests.synthetic import BUCKET_ELEMENTS, PARAMETERS, write_recording

STEPS = 12


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Three gradients of 1, 16 and 8 MB in buckets of their own, two ranks, steps of 10 ms."""
    return write_recording(tmp_path / "traces", steps=STEPS)


def calibrated(folder: Path, hosts: Sequence[str] = ("node0", "node0")) -> Path:
    samples = [
        AllReduceSample(bytes=size, times_ns=tuple([300_000 + size // 20] * 5))
        for size in (1024, 1024**2, 16 * 1024**2, 64 * 1024**2)
    ]
    calibration = Calibration(backend="gloo", device="cpu", hosts=tuple(hosts), samples=tuple(samples))
    path = folder / "calibration.json"
    write_calibration(path, calibration)
    return path


def test_json_has_everything(folder: Path) -> None:
    content = json.loads(overlapscope("recommend", "--json", folder).stdout)
    assert content["verdict"] in ("change", "leave it", "can't tell")
    assert content["parameters"] == [name for name, _ in PARAMETERS]
    assert content["now"]["recorded_ns"]["value"] == pytest.approx(10e6)
    assert content["now"]["buckets"] == [[0], [1], [2]]
    assert content["best"]["step_ns"]["low"] <= content["best"]["step_ns"]["value"] <= content["now"]["step_ns"]["high"]
    assert content["sizes"][-1]["high_mb"] is None, "every larger size gives one bucket"
    assert len(content["what_ifs"]) >= 6
    assert content["problems"] == []


def test_the_plan_is_written_and_nothing_is_overwritten(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    ran = overlapscope("recommend", folder, "--plan", path)
    assert ran.returncode == 0
    assert f"Written to {path}" in ran.stdout
    plan = read_plan(path)
    assert {parameter.name: parameter.shape for parameter in plan.parameters} == {
        name: (elements,) for name, elements in PARAMETERS
    }
    assert [parameter.bytes for parameter in plan.parameters] == [4 * elements for elements in BUCKET_ELEMENTS]
    assert plan.predicted["step_ns"] <= plan.predicted["step_now_ns"]
    again = overlapscope("recommend", folder, "--plan", path)
    assert again.returncode == 1
    assert read_plan(path) == plan


def test_a_calibration_in_the_folder_is_used(folder: Path) -> None:
    calibrated(folder)
    ran = overlapscope("recommend", folder)
    assert ran.returncode == 0
    assert ", 1 bucket plan, a calibration; " in ran.stdout.splitlines()[0]


def test_one_that_is_elsewhere_can_be_named(folder: Path, tmp_path: Path) -> None:
    path = calibrated(tmp_path)
    assert "a calibration" in overlapscope("recommend", folder, "--calibration", path).stdout
    missing = overlapscope("recommend", folder, "--calibration", tmp_path / "none.json")
    assert missing.returncode == 1
    assert "none.json" in missing.stderr


def test_a_rank_that_left_no_log_is_said(tmp_path: Path) -> None:
    write_recording(tmp_path, ranks=3, steps=STEPS)
    (tmp_path / "rank_2" / "events.log").unlink()
    ran = overlapscope("recommend", tmp_path)
    assert ran.returncode == 1
    assert "1 of 3 ranks" in ran.stdout
    assert "rank_2/events.log" in ran.stderr


def test_what_a_strategy_would_take_with_other_buckets_is_not_guessed(folder: Path) -> None:
    for rank in range(2):
        path = folder / f"rank_{rank}" / "run.json"
        run = json.loads(path.read_text())
        run["models"] = [{"model": 0, "class": "Net", "ddp_arguments": {"strategy": "ring"}}]
        run.pop("crc32", None)
        path.write_text(json.dumps(run))
    ran = overlapscope("recommend", folder)
    assert (ran.returncode, ran.stdout) == (1, "")
    assert "strategy ring" in ran.stderr
