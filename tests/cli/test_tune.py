"""``overlapscope tune``: what is run, what is said of it, and how it ends.

The training is played by a script that writes a recording where the environment says, whose steps are as long as the
setting says. What real trainings do with a setting is in tests/cluster/test_tuning.py.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from overlapscope.cli import tuning_runs
from overlapscope.trace.json_files import read_json
from tests.cli.command_line import COMMAND, REPOSITORY, overlapscope
from tests.cli.test_json import documented
from tests.synthetic import write_recording

TRAINER = """
import os, sys, time
from pathlib import Path
from overlapscope.trace.ddp_trial import read_trial
from tests.synthetic import write_straggling_recording
setting = read_trial().setting
late_us = 0
if setting.caps_mb is not None:
    late_us += int(sys.argv[1])
if setting.bucket_views:
    if sys.argv[2] == "fails":
        raise SystemExit(3)
    late_us += int(sys.argv[2])
folder = Path(os.environ["OVERLAPSCOPE_TRACE"])
written = folder.parent.parent / "written"  # elsewhere first, as the training is ended once rank 0 has enough steps
write_straggling_recording(written, ranks=2, steps=30, late_us=lambda rank, step: 3000 + late_us + step % 3)
for rank in (1, 0):
    (written / f"rank_{rank}").rename(folder / f"rank_{rank}")
time.sleep(600)  # which is ended, as all steps are done
"""


def tune(folder: Path, size_us: int, views_us: int | str, *options: str) -> subprocess.CompletedProcess[str]:
    """Tune a training of 13 ms a step, to which a bucket size and bucket views add some microseconds."""
    train = [sys.executable, "-c", TRAINER, size_us, views_us]
    return overlapscope("tune", "-o", folder, "--steps", 25, *options, "--", *train, PYTHONPATH=str(REPOSITORY))


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Looks for steps often, to wait less."""
    monkeypatch.setattr(tuning_runs, "_POLL_S", 0.02)


def runs_in(folder: Path) -> list[str]:
    return sorted(each.name for each in folder.iterdir())


def test_the_fastest_setting_is_printed_as_code_with_its_gain(
    tmp_path: Path, golden: Callable[[str, str], None]
) -> None:
    ran = tune(tmp_path / "tuning", -1000, -500)
    assert ran.returncode == 0
    golden("cli/tune", f"{ran.stderr}\n{ran.stdout}".replace(f"{tmp_path}/", ""))
    names = runs_in(tmp_path / "tuning")
    assert names[0] == "1_as_it_is"
    assert re.search(r"Set bucket_cap_mb=\S+, gradient_as_bucket_view=True", ran.stdout)
    assert len(names) >= 4  # both once more


def test_what_fails_is_left_out_and_what_is_slower_not_run_again(tmp_path: Path) -> None:
    ran = tune(tmp_path / "tuning", 2000, "fails", "--json")
    content = json.loads(ran.stdout)
    assert (ran.returncode, content["verdict"], content["code"]) == (0, "keep", None)
    assert set(content) == set(documented("`overlapscope tune`", 0))
    assert all(set(each) == set(documented("`overlapscope tune`", 1)) for each in content["tried"])
    assert content["tried"][0]["step_ns"] == pytest.approx(13e6, rel=0.001)
    assert all(each["runs"] == (not each["failure"]) for each in content["tried"])
    (failed,) = (each for each in content["tried"] if each["failure"])
    assert "exit code 3" in failed["failure"]
    assert failed["setting"]["bucket_views"]
    assert content["gain"]["value"] == pytest.approx(-2 / 13, rel=0.02)


def test_a_training_that_fails_as_it_is_is_one_line_with_where_its_output_is(tmp_path: Path) -> None:
    ran = overlapscope(
        "tune", "-o", tmp_path / "tuning", "--", sys.executable, "-c", "print('mine'); raise SystemExit(4)"
    )
    assert ran.returncode == 1
    output = tmp_path / "tuning" / "1_as_it_is" / "output.log"
    assert output.read_text() == "mine\n"
    last = ran.stderr.splitlines()[-1]
    assert "exit code 4" in last
    assert str(output) in last


def test_runs_are_replaced_only_if_asked_and_other_files_stay(tmp_path: Path) -> None:
    folder = tmp_path / "tuning"
    for name in ("1_as_it_is", "2_bucket_cap_mb_10"):
        write_recording(folder / name)
        (folder / name / "output.log").write_text("before")
    (folder / "3_notes").mkdir()
    before = runs_in(folder)
    assert overlapscope("tune", "-o", folder, "--", "false").returncode == 1
    assert runs_in(folder) == before
    assert overlapscope("tune", "-o", folder, "--force", "--", "false").returncode == 1
    assert runs_in(folder) == ["1_as_it_is", "3_notes"]
    assert not (folder / "1_as_it_is" / "rank_0").exists()


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
def test_a_signal_ends_the_training_with_its_children_and_leaves_the_runs(tmp_path: Path, number: int) -> None:
    grandchild = "import time; time.sleep(600)"
    train = (
        "import os, subprocess, sys, time; from pathlib import Path; from tests.synthetic import write_recording\n"
        f"child = subprocess.Popen([sys.executable, '-c', {grandchild!r}])\n"
        "folder = Path(os.environ['OVERLAPSCOPE_TRACE'])\n"
        "write_recording(folder, steps=5)\n"
        "(folder / 'pid').write_text(str(child.pid))\n"
        "time.sleep(600)"
    )
    run = tmp_path / "tuning" / "1_as_it_is"
    tuning = subprocess.Popen(
        [*COMMAND, "tune", "-o", str(tmp_path / "tuning"), "--", sys.executable, "-c", train],
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        stderr=subprocess.PIPE,
        text=True,
    )
    while not (run / "pid").exists() or not (run / "pid").read_text():
        assert tuning.poll() is None
        time.sleep(0.1)
    tuning.send_signal(number)
    _, said = tuning.communicate(timeout=60)
    assert tuning.returncode == 128 + number
    assert str(tmp_path / "tuning") in said.splitlines()[-1]
    assert (run / "rank_1").is_dir()
    pid = int((run / "pid").read_text())
    status = Path(f"/proc/{pid}/stat")
    assert not status.exists() or status.read_text().split()[2] == "Z"
    assert read_json(run / "rank_0" / "run.json", [])
