"""How a process ended is written also where Python calls no hook of ours."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from overlapscope.diagnosis.process_state import parse_exit_call, parse_failure
from overlapscope.trace.json_files import read_json
from overlapscope.trace.schema import ENDED_FILE
from tests.cluster.warm_process import WarmProcess

BEGIN = """
import atexit, logging, os, sys
from pathlib import Path
from instrumented_ddp.collectives.call_sites import LoopTracker
from instrumented_ddp.collectives.position import TrainingPosition
from instrumented_ddp.recording.caught_errors import CaughtErrors
from instrumented_ddp.recording.exit_recorder import ExitRecorder
position = TrainingPosition()
loop, folder = LoopTracker(position), Path(sys.argv[1])
recorder = ExitRecorder(folder, loop, CaughtErrors(folder, loop), lambda failure: print(failure.type, flush=True))
atexit.register(recorder.close)
def check():
    raise FloatingPointError("gradient exploded")
"""
LINE_OF_CHECK = BEGIN.splitlines().index("def check():") + 2


def run(folder: Path, end: str) -> tuple[int, list[str]]:
    script = folder / "train.py"
    script.write_text(BEGIN + end)
    with tempfile.TemporaryFile() as output:
        ran = WarmProcess([str(script), str(folder)], os.environ, output)
        status = ran.wait(60)
        output.seek(0)
        printed = output.read().decode()
    return status, [line for line in printed.splitlines() if line == FloatingPointError.__name__]


HANDLED = "try:\n    check()\nexcept Exception:\n    os._exit(3)\n"
LOGGED = "try:\n    check()\nexcept Exception:\n    logging.exception('failed')\nos._exit(3)\n"
REPLACED_HOOK = "sys.excepthook = lambda *_: os._exit(3)\ncheck()\n"


@pytest.mark.parametrize("end", [HANDLED, LOGGED, REPLACED_HOOK], ids=["handled", "logged", "in a hook"])
def test_an_error_before_an_immediate_exit_is_known_and_told_to_the_others(tmp_path: Path, end: str) -> None:
    assert run(tmp_path, end) == (3, ["FloatingPointError"])
    call = parse_exit_call(read_json(tmp_path / ENDED_FILE, []))
    assert call is not None
    assert call.caught is not None
    assert call.caught.call_site is not None
    assert (call.status, call.caught.type, call.caught.call_site.line) == (3, "FloatingPointError", LINE_OF_CHECK)


def test_an_uncaught_error_is_known_after_another_hook_has_taken_it(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(BEGIN + "sys.excepthook = lambda *_: None\ncheck()\n")
    subprocess.run([sys.executable, script, tmp_path], timeout=60)  # the interpreter's own end is what is looked at
    failure = parse_failure(read_json(tmp_path / ENDED_FILE, []))
    assert failure is not None
    assert failure.type == "FloatingPointError"


@pytest.mark.parametrize(
    "end",
    [
        "os._exit(0)\n",
        LOGGED.replace("os._exit(3)", "position.step = 5\nos._exit(3)"),
        LOGGED.replace("os._exit(3)", "sys.exit(0)"),
        "child = os.fork()\nif not child: os._exit(4)\nos.waitpid(child, 0)\n",
    ],
    ids=["well", "logged long ago", "logged and gone on", "a child"],
)
def test_what_did_not_end_the_process_is_no_error(tmp_path: Path, end: str) -> None:
    _, told = run(tmp_path, end)
    ended = read_json(tmp_path / ENDED_FILE, [])
    call = parse_exit_call(ended)
    assert (told, ended["how"], call and call.caught) == ([], "ended", None)
    assert call is None or call.status in (0, 3)
