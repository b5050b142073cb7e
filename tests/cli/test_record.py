"""``overlapscope record``: what the child is told, what comes back, and what is never touched.

The training is played by a script that writes a recording where the environment says, without torch.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from overlapscope.cli.joined_job import count_awaited_nodes
from overlapscope.cli.record import describe_recorders
from overlapscope.trace.recording import read_trace
from tests.cli.command_line import COMMAND, REPOSITORY, overlapscope, overlapscope_process
from tests.synthetic import write_recording

TRAINER = """
import os, sys
from pathlib import Path
from tests.synthetic import write_recording
write_recording(Path(os.environ["OVERLAPSCOPE_TRACE"]), ranks=int([*sys.argv, 2][2]), steps=int(sys.argv[1]))
"""
TRAIN = [sys.executable, "-c", TRAINER]


def exits_with(code: int) -> list[str]:
    return [sys.executable, "-c", f"raise SystemExit({code})"]


def files_in(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def test_what_was_recorded_and_how_to_look_at_it_is_said_on_stderr(
    tmp_path: Path, golden: Callable[[str, str], None]
) -> None:
    folder = tmp_path / "new" / "my traces"
    ran = overlapscope("record", "-o", folder, "--", *TRAIN, 7)
    assert (ran.returncode, ran.stdout) == (0, "")
    golden("cli/record", re.sub(r"\d+ kB", "N kB", ran.stderr.replace(f"{tmp_path}/", "")))
    assert len(read_trace(folder).steps) == 14


def test_one_rank_and_one_step_are_counted_as_such(tmp_path: Path) -> None:
    ran = overlapscope("record", "-o", tmp_path / "traces", "--", *TRAIN, 1, 1)
    assert " 1 rank, 1 step, " in ran.stderr


def test_the_dashes_may_be_left_out_and_the_folder_is_traces(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    subprocess.run([*COMMAND, "record", *TRAIN, "1"], cwd=tmp_path, env=environment, check=True)
    assert (tmp_path / "traces" / "rank_1").is_dir()


SHOW = "import os; print({k: v for k, v in os.environ.items() if k.startswith('OVERLAPSCOPE')})"


def test_the_child_is_told_what_to_record_in_its_environment(tmp_path: Path) -> None:
    relative = os.path.relpath(tmp_path / "a", REPOSITORY)
    ran = overlapscope("record", "-o", relative, "--", sys.executable, "-c", SHOW)
    told = {
        "OVERLAPSCOPE_TRACE": f"{REPOSITORY}/{relative}",
        "OVERLAPSCOPE_DETAIL": "buckets",
        "OVERLAPSCOPE_ON_INCIDENT": "report",
    }
    assert ran.stdout == f"{told}\n"


def test_detail_and_limit_are_passed_on_and_stale_ones_are_not(tmp_path: Path) -> None:
    show = [sys.executable, "-c", SHOW]
    told = overlapscope("record", "-o", tmp_path / "a", "--detail", "parameters", "--limit-mb", 5, "--", *show).stdout
    assert "'OVERLAPSCOPE_DETAIL': 'parameters'" in told
    assert "'OVERLAPSCOPE_LIMIT_MB': '5'" in told
    told = overlapscope("record", "-o", tmp_path / "a", "--on-incident", "raise", "--", *show).stdout
    assert "'OVERLAPSCOPE_ON_INCIDENT': 'raise'" in told
    stale = {"OVERLAPSCOPE_DETAIL": "parameters", "OVERLAPSCOPE_LIMIT_MB": "9", "OVERLAPSCOPE_PROBE_BUCKETS": "1"}
    told = overlapscope("record", "-o", tmp_path / "a", "--", *show, **stale).stdout
    assert "'OVERLAPSCOPE_DETAIL': 'buckets'" in told
    assert "LIMIT" not in told
    assert "PROBE" not in told


def test_probing_takes_detail_parameters_unless_another_is_asked_for(tmp_path: Path) -> None:
    show = ["--", sys.executable, "-c", SHOW]
    told = overlapscope("record", "-o", tmp_path / "a", "--probe-buckets", *show).stdout
    assert "'OVERLAPSCOPE_PROBE_BUCKETS': '1'" in told
    assert "'OVERLAPSCOPE_DETAIL': 'parameters'" in told
    told = overlapscope("record", "-o", tmp_path / "a", "--probe-buckets", "--detail", "buckets", *show).stdout
    assert "'OVERLAPSCOPE_DETAIL': 'buckets'" in told


PLAY_PROBING = """
import json, os, sys
from pathlib import Path
from overlapscope.trace.json_files import write_json
from tests.synthetic import write_recording
folder = Path(os.environ["OVERLAPSCOPE_TRACE"])
write_recording(folder, ranks=2, steps=3)
for rank in range(2):
    file = folder / f"rank_{rank}" / "run.json"
    run = json.loads(file.read_text())
    run["models"] = json.loads(sys.argv[1])
    write_json(file, run)
"""
DONE = {"state": "done", "first_step": 4, "steps": 24, "plans": 5}


def test_what_came_of_probing_is_said(tmp_path: Path, golden: Callable[[str, str], None]) -> None:
    said = []
    for probing in ((), (None,), (DONE,), (DONE, {"state": "impossible", "why": "a communication hook"})):
        models = [{"model": number, "class": "GPT", "probing": each} for number, each in enumerate(probing)]
        play = [sys.executable, "-c", PLAY_PROBING, json.dumps(models)]
        ran = overlapscope("record", "-o", tmp_path / f"{len(said)}", "--probe-buckets", "--", *play)
        assert ran.returncode == 0
        *sentences, _recorded, _view = ran.stderr.splitlines()
        said += [*sentences, ""]
    golden("cli/record_probing", "\n".join(said))


def test_the_child_keeps_stdin_and_stdout(tmp_path: Path) -> None:
    echo = [sys.executable, "-c", "print(input()[::-1])"]
    command = [*COMMAND, "record", "-o", str(tmp_path / "a"), "--", *echo]
    ran = subprocess.run(command, input="abc\n", capture_output=True, text=True, cwd=REPOSITORY)
    assert ran.stdout == "cba\n"


@pytest.mark.parametrize(("child", "code"), [(exits_with(0), 1), (exits_with(3), 3)], ids=["ended well", "failed"])
def test_nothing_recorded_is_a_failure_with_a_reason_and_no_empty_folder(
    tmp_path: Path, child: list[str], code: int
) -> None:
    ran = overlapscope("record", "-o", tmp_path / "a", "--", *child)
    assert ran.returncode == code
    assert len(ran.stderr.splitlines()) == 1
    assert "nothing was recorded" in ran.stderr
    assert "nodes" not in ran.stderr
    assert not (tmp_path / "a").exists()


@pytest.mark.parametrize(
    ("words", "nodes"),
    [
        (["torchrun", "--nnodes", "3", "train.py"], 3),
        (["python", "-m", "torch.distributed.run", "--nnodes=3:4", "train.py", "--nnodes", "5"], 3),
        (["torchrun", "--nproc-per-node", "2", "train.py", "--nnodes", "5"], 1),
        (["torchrun", "--nproc-per-node", "2", "-m", "train", "--nnodes", "5"], 1),
        (["python", "launch.py", "--nnodes", "5"], 1),
        (["start_jobs", "--nnodes", "5"], 1),
    ],
)
def test_only_torchruns_own_option_says_how_many_nodes_it_waits_for(words: list[str], nodes: int) -> None:
    assert count_awaited_nodes(words, {}) == nodes
    assert count_awaited_nodes(["torchrun", "train.py"], {"PET_NNODES": "2"}) == 2


def test_where_nothing_is_recorded_it_is_said_how_many_nodes_were_waited_for(tmp_path: Path) -> None:
    failing = tmp_path / "torchrun"
    failing.write_text("#!/bin/sh\nexit 1\n")
    failing.chmod(0o755)
    ran = overlapscope("record", "-o", tmp_path / "a", "--", failing, "--nnodes", 3, "train.py")
    assert "3 nodes" in ran.stderr


RESTARTED = """
import os, sys
from pathlib import Path
from tests.synthetic import write_recording
folder = Path(os.environ["OVERLAPSCOPE_TRACE"])
write_recording(folder, ranks=2, steps=3)
write_recording(folder / "restart_1", ranks=2, steps=int(sys.argv[1]))
"""


def test_of_a_job_that_was_started_again_all_attempts_are_described_and_replaced_together(tmp_path: Path) -> None:
    command = ["record", "-o", tmp_path / "a", "--", sys.executable, "-c", RESTARTED, 7]
    ran = overlapscope(*command)
    assert f"Attempt 0 ({tmp_path / 'a'})" in ran.stderr
    assert f"Attempt 1 ({tmp_path / 'a' / 'restart_1'})" in ran.stderr
    assert " 2 ranks, 7 steps, " in ran.stderr
    assert ran.stderr.endswith(f"overlapscope serve {tmp_path / 'a' / 'restart_1'}\n")
    assert list((tmp_path / "a" / "restart_1").glob("exits_*"))
    shutil.rmtree(tmp_path / "a" / "rank_0")
    shutil.rmtree(tmp_path / "a" / "rank_1")
    assert overlapscope(*command).returncode == 1
    (tmp_path / "a" / "restart_1" / "mine.txt").touch()
    overlapscope("record", "--force", *command[1:5], "-c", TRAINER, 4)
    assert files_in(tmp_path / "a" / "restart_1") == {"mine.txt"}
    assert len(read_trace(tmp_path / "a").steps) == 8


def test_the_exit_code_of_a_training_that_failed_is_kept(tmp_path: Path) -> None:
    ran = overlapscope_process("record", "-o", tmp_path / "a", "--", sys.executable, "-c", TRAINER + "sys.exit(42)", 2)
    assert ran.returncode == 42
    assert " 2 ranks, 2 steps, " in ran.stderr


def test_a_child_killed_by_a_signal_gives_128_and_its_number(tmp_path: Path) -> None:
    suicide = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
    assert overlapscope("record", "-o", tmp_path / "a", "--", sys.executable, "-c", suicide).returncode == 137


PATIENT = """
import signal, sys, time
def stop(number, frame):
    print("stopped by", number, flush=True)
    time.sleep(0.3)
    print("tidied up", flush=True)
    sys.exit(20 + number)
signal.signal(signal.SIGTERM, stop)
signal.signal(signal.SIGINT, stop)
print("ready", flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_and_sigterm_let_the_child_end_in_its_own_way(tmp_path: Path, number: signal.Signals) -> None:
    command = [*COMMAND, "record", "-o", str(tmp_path / "a"), "--", sys.executable, "-c", PATIENT]
    recording = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=REPOSITORY, start_new_session=True
    )
    assert recording.stdout is not None
    assert recording.stdout.readline() == "ready\n"
    if number == signal.SIGINT:
        os.killpg(recording.pid, number)  # as a terminal does
    else:
        recording.send_signal(number)
    output, errors = recording.communicate(timeout=30)
    assert output == f"stopped by {int(number)}\ntidied up\n"
    assert recording.returncode == 20 + number
    assert "Traceback" not in errors


def test_a_training_in_the_background_ignores_ctrl_c_as_nohup_wants_it(tmp_path: Path) -> None:
    show = [sys.executable, "-c", "import signal; print(signal.getsignal(signal.SIGINT).name)"]
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        ran = overlapscope("record", "-o", tmp_path / "a", "--", *show)
    finally:
        signal.signal(signal.SIGINT, before)
    assert ran.stdout == "SIG_IGN\n"


def test_an_earlier_recording_is_not_touched_without_force(tmp_path: Path) -> None:
    write_recording(tmp_path, ranks=1, steps=9)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    ran = overlapscope("record", "-o", tmp_path, "--", *TRAIN, 1)
    assert (ran.returncode, ran.stdout) == (1, "")
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before


def test_force_replaces_the_recording_and_no_other_file(tmp_path: Path) -> None:
    write_recording(tmp_path, ranks=4, steps=9)
    read_trace(tmp_path)
    (tmp_path / "rank_2" / "incident_1.log").write_bytes(b"")
    (tmp_path / "exits_node0_1.jsonl").write_bytes(b"")
    theirs = {"notes.md", "rank_3/core.1234", "tables/mine.csv", "rank_nine/events.log", "rank_7/events.txt"}
    for name in theirs:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    ran = overlapscope("record", "-o", tmp_path, "--force", "--", *TRAIN, 2)
    assert ran.returncode == 0
    assert " 2 ranks, 2 steps, " in ran.stderr
    recorded = {name for name in files_in(tmp_path) if name.startswith(("rank_0/", "rank_1/", "exits_"))}
    assert "exits_node0_1.jsonl" not in recorded
    assert files_in(tmp_path) - recorded == theirs
    assert all((tmp_path / name).read_text() == name for name in theirs)
    assert "rank_0/events.log" in recorded


def test_an_earlier_recording_stays_if_there_is_no_command_to_replace_it(tmp_path: Path) -> None:
    write_recording(tmp_path, ranks=1)
    before = files_in(tmp_path)
    assert overlapscope("record", "-o", tmp_path, "--force", "--", "no-such-program").returncode == 1
    assert files_in(tmp_path) == before


def test_a_folder_of_other_files_may_be_recorded_into(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("")
    assert overlapscope("record", "-o", tmp_path, "--", *TRAIN, 1).returncode == 0
    assert (tmp_path / "train.py").exists()


def test_a_program_beside_this_python_needs_no_activated_environment(tmp_path: Path) -> None:
    name = Path(sys.executable).name
    ran = overlapscope(
        "record", "-o", tmp_path / "a", "--", name, "-c", "import sys; print(sys.prefix)", PATH="/nowhere"
    )
    assert ran.stdout == f"{sys.prefix}\n"


def test_which_recorder_has_recorded_is_said_and_why_it_was_not_the_one_in_c(
    golden: Callable[[str, str], None],
) -> None:
    in_c, in_python = (
        {"recorder": {"language": "C"}},
        {"recorder": {"language": "Python", "why": "there was no compiler"}},
    )
    unset = {"recorder": {"language": "Python", "why": "OVERLAPSCOPE_NATIVE=0 is set"}}
    jobs: list[list[dict[str, object]]] = [
        [in_c, in_c],
        [in_python, in_python],
        [in_c, in_python, in_python, unset],
        [{}, {}],  # an older version has recorded
    ]
    said = ["\n".join(describe_recorders(dict(enumerate(runs)))) for runs in jobs]
    golden("cli/record_recorders", "\n\n".join(said))
    assert said[-1] == ""
