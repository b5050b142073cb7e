"""``overlapscope demo``: records, judges, and says where; a training that fails is shown, not hidden.

All but one test play the training with a script that writes a recording, without torch.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pytest

from dashboards import app
from overlapscope.cli import child_process, demo
from overlapscope.cli.main import main
from overlapscope.trace.recording import read_trace
from tests.cli.command_line import COMMAND, REPOSITORY
from tests.cluster.ranks import TIME_LIMIT_S

TRAINER = """
import os, sys
from pathlib import Path
from tests.synthetic import write_recording
print("threads", os.environ["OMP_NUM_THREADS"], "detail", os.environ["OVERLAPSCOPE_DETAIL"])
write_recording(Path(os.environ["OVERLAPSCOPE_TRACE"]), ranks=2, steps=int(sys.argv[1]))
"""
FAILING = "import sys; print('out of luck', file=sys.stderr); sys.exit(6)"


@pytest.fixture
def play_training(monkeypatch: pytest.MonkeyPatch):
    def play(script: str) -> None:
        monkeypatch.setattr(demo, "_training_command", lambda steps: [sys.executable, "-c", script, str(steps)])

    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY))
    play(TRAINER)
    return play


@pytest.mark.usefixtures("play_training")
def test_it_records_and_prints_the_verdict(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    golden: Callable[[str, str], None],
) -> None:
    monkeypatch.setattr(demo, "_SECONDS_BETWEEN_LINES", 0.0)
    assert main(["demo", "-o", str(tmp_path), "--steps", "6", "--no-serve"]) == 0
    printed = capsys.readouterr()
    golden("cli/demo", printed.out.replace(str(tmp_path), "traces"))
    progress = printed.err.splitlines()
    assert progress[0].startswith("training: starting, ")
    assert all(line.startswith("training: ") for line in progress)
    assert len(read_trace(tmp_path).steps) == 12


@pytest.mark.usefixtures("play_training")
def test_the_training_gets_one_thread_and_records_every_parameter(tmp_path: Path) -> None:
    main(["demo", "-o", str(tmp_path), "--no-serve"])
    assert (tmp_path / "training.log").read_text() == "threads 1 detail parameters\n"


@pytest.mark.usefixtures("play_training")
def test_without_a_folder_it_records_into_a_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    main(["demo", "--no-serve"])
    main(["demo", "--no-serve"])
    folders = [line.split(" into ")[1] for line in capsys.readouterr().out.splitlines() if " into " in line]
    assert len(set(folders)) == 2
    assert all(Path(folder, "rank_1").is_dir() and Path(folder).parent == tmp_path for folder in folders)


@pytest.mark.usefixtures("play_training")
def test_it_serves_what_it_recorded_where_it_is_told_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    served = []
    monkeypatch.setattr(app, "serve", lambda *args, **kwargs: served.append((args, kwargs)))
    assert main(["demo", "-o", str(tmp_path), "--port", "0", "--address", "::1", "--no-browser"]) == 0
    (((folders,), how),) = served
    assert (folders, how["port"], how["address"], how["show"]) == ([tmp_path], 0, "::1", False)


def test_a_training_that_fails_is_shown_and_nothing_is_served(
    tmp_path: Path, play_training, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(app, "serve", lambda *_, **__: pytest.fail("served a failed training"))
    play_training(FAILING)
    assert main(["demo", "-o", str(tmp_path)]) == 1
    log, reason = capsys.readouterr().err.splitlines()
    assert log == "  out of luck"
    assert reason.endswith(f"(exit code 6); see {tmp_path}/training.log")


def test_a_training_that_records_nothing_has_failed(
    tmp_path: Path, play_training, capsys: pytest.CaptureFixture[str]
) -> None:
    play_training("print('done')")
    assert main(["demo", "-o", str(tmp_path)]) == 1
    assert "the training recorded nothing" in capsys.readouterr().err


def test_without_torch_it_says_how_to_get_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(child_process, "find_spec", lambda _: None)
    assert main(["demo", "-o", str(tmp_path / "a")]) == 1
    assert "pip install 'overlapscope[torch]'" in capsys.readouterr().err
    assert not (tmp_path / "a").exists()


def test_ctrl_c_ends_the_training_too(tmp_path: Path) -> None:
    program = (
        "import sys; from overlapscope.cli import demo; from overlapscope.cli.main import main\n"
        "script = 'import time, pathlib, sys; pathlib.Path(sys.argv[2]).touch(); time.sleep(60)'\n"
        "demo._training_command = lambda steps: [sys.executable, '-c', script, str(steps), sys.argv[2] + '/up']\n"
        "sys.exit(main(['demo', '-o', sys.argv[1], '--no-serve']))"
    )
    running = subprocess.Popen(
        [sys.executable, "-c", program, tmp_path / "a", tmp_path],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=REPOSITORY,
        start_new_session=True,
    )
    while not (tmp_path / "up").exists():
        assert running.poll() is None, running.communicate()
    os.killpg(running.pid, signal.SIGINT)
    _, errors = running.communicate(timeout=30)
    assert running.returncode == 130
    assert "Traceback" not in errors


@pytest.mark.cluster
@pytest.mark.slow
def test_the_real_training_is_recorded_and_its_page_is_served(tmp_path: Path) -> None:
    command = [*COMMAND, "demo", "-o", tmp_path / "traces", "--steps", "4", "--port", "0", "--no-browser"]
    output = tmp_path / "output"
    with output.open("w") as file, subprocess.Popen(command, stdout=file, stderr=file, cwd=REPOSITORY) as running:
        try:
            until = time.monotonic() + TIME_LIMIT_S
            while not (address := re.search(r"http://\S+", output.read_text())):
                assert running.poll() is None, output.read_text()
                assert time.monotonic() < until, output.read_text()
                time.sleep(0.1)
            with urllib.request.urlopen(address.group(), timeout=TIME_LIMIT_S) as answer:
                page = answer.read().decode()
        finally:
            running.kill()
    assert "of communication is hidden" in output.read_text()
    assert "model <b>GPT</b>" in page
    trace = read_trace(tmp_path / "traces")
    assert trace.errors == []
    assert trace.steps.groupby("rank").size().tolist() == [4, 4]
    assert len(trace.collectives) > 0
    assert len(trace.gradients) > 0
