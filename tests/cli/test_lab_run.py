"""``overlapscope lab run`` and ``lab figures``: an experiment from its trials to its pictures, and what is refused."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from pathlib import Path

import pandas as pd
import pytest

from overlapscope.breakdown.breakdown import BLOCKS
from overlapscope.cli.main import main
from overlapscope.lab.experiments.results import RESULTS_FILE, Results, read_results
from overlapscope.lab.truth import find_experiment_script
from tests.cli.command_line import COMMAND, REPOSITORY, overlapscope
from tests.lab.experiments.rows import CONDITIONS, trial
from tests.lab.warm_ranks import WarmRank

TINY = ["lab", "run", "breakdown", "--model", "small-transformer", "--repetitions", "1", "--steps", "10"]
"""Two trials."""
TIME_LIMIT_S = 240
BLOCK_COLUMNS = [f"{name}_ns" for name in BLOCKS]


def test_under_a_launcher_the_number_of_ranks_is_the_launchers(monkeypatch, capsys):
    for name, value in {"RANK": "0", "WORLD_SIZE": "4", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    assert main(["lab", "run", "breakdown", "--ranks", "2"]) == 1
    assert capsys.readouterr().err.startswith("overlapscope lab: --ranks 2: the launcher has started 4")


def test_figures_say_what_holds_and_are_drawn_if_a_folder_is_given(tmp_path: Path, capsys, golden):
    results = Results(tmp_path / "experiments" / "breakdown")
    for repetition in range(3):
        for strategy, step_ns in (("bucketed", 100e6), ("overlapped", 80e6)):
            blocks = dict.fromkeys(BLOCK_COLUMNS, 0.0) | {"backward_ns": step_ns}
            results.add(trial(repetition, strategy=strategy), CONDITIONS, {**blocks, "step_ns": step_ns})
    assert main(["lab", "figures", str(tmp_path / "experiments"), "-o", str(tmp_path / "pictures")]) == 0
    golden("cli/lab_figures", capsys.readouterr().out.replace(f"{tmp_path}/", ""))
    assert {path.name for path in (tmp_path / "pictures").iterdir()} == {"breakdown.svg", "breakdown.png"}


@pytest.mark.cluster
@pytest.mark.nightly
def test_what_only_the_ranks_know_is_refused_by_them_in_one_line(tmp_path: Path):
    ran = subprocess.run(
        [*COMMAND, "lab", "run", "breakdown", "--backend", "foo", "-o", str(tmp_path)],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=TIME_LIMIT_S,
    )
    assert ran.returncode == 1
    (line,) = ran.stderr.splitlines()
    assert line.startswith("overlapscope lab: ")
    assert " foo: " in line
    assert not [*tmp_path.rglob("*.parquet")]


WITH_ARGUMENTS = """
import runpy, sys
sys.argv = {argv!r}
sys.path[0] = {folder!r}
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def run_ranks_alone(arguments: list[str], folder: Path) -> tuple[list[int], list[str]]:
    """The exit codes of both ranks of an experiment and what they say. They start at once, as nothing starts them."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(probe.getsockname()[1]), "WORLD_SIZE": "2"}
    rank = find_experiment_script("rank.py")
    script = folder / "rank_with_arguments.py"
    script.write_text(WITH_ARGUMENTS.format(argv=[str(rank), *arguments], folder=str(rank.parent)))
    ranks = [WarmRank(script, {**os.environ, **meeting, "RANK": str(number)}) for number in range(2)]
    until = time.monotonic() + TIME_LIMIT_S
    try:
        while any(each.poll() is None for each in ranks):
            assert time.monotonic() < until
            time.sleep(0.05)
    finally:
        for each in ranks:
            each.kill()
    said = [line for each in ranks if each.stdout for line in each.stdout.read().splitlines()]
    return [each.wait() for each in ranks], said


@pytest.mark.cluster
@pytest.mark.slow
@pytest.mark.parametrize(("option", "name"), [("--model", "resnet-9000"), ("--strategy", "wishes")])
def test_names_that_only_the_ranks_know_are_refused_by_them_in_one_line(option, name, tmp_path):
    codes, (line,) = run_ranks_alone(["breakdown", option, name, "-o", str(tmp_path)], tmp_path)
    assert codes == [1, 0]
    assert line.startswith(f"overlapscope lab: {name}: no such ")
    assert not [*tmp_path.rglob("*.parquet")]


@pytest.mark.cluster
@pytest.mark.nightly
def test_an_experiment_that_was_interrupted_goes_on_where_it_was(tmp_path: Path):
    path = tmp_path / "breakdown" / RESULTS_FILE
    started = subprocess.Popen(
        [*COMMAND, *TINY, "-o", str(tmp_path)],
        cwd=REPOSITORY,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    until = time.monotonic() + TIME_LIMIT_S
    while not path.exists():
        assert time.monotonic() < until
        time.sleep(0.05)
    os.killpg(started.pid, signal.SIGINT)  # as a terminal does
    _, errors = started.communicate(timeout=TIME_LIMIT_S)
    assert started.returncode == 130
    assert "Traceback" not in errors
    kept = read_results(path.parent)
    assert len(kept) == 1

    again = subprocess.run(
        [*COMMAND, *TINY, "-o", str(tmp_path)], cwd=REPOSITORY, capture_output=True, text=True, timeout=TIME_LIMIT_S
    )
    assert again.returncode == 0, again.stderr
    assert again.stderr.count(" of 2: ") == 1
    rows = read_results(path.parent)
    assert rows["failure"].tolist() == [""] * 2
    assert rows["trial"].is_unique
    pd.testing.assert_frame_equal(rows[: len(kept)][["trial", "step_ns"]], kept[["trial", "step_ns"]])
    assert rows[BLOCK_COLUMNS].sum(axis=1).to_numpy() == pytest.approx(rows["step_ns"].to_numpy())
    assert all(len(losses) == 10 for losses in rows["losses"])

    # A number is what every other command says of the same recording.
    summary = overlapscope("summary", path.parent / rows["recording"][0], "--json")
    assert str(int(rows["step_ns"][0]))[:6] in summary.stdout

    codes, said = run_ranks_alone([*TINY[2:], "-o", str(tmp_path)], tmp_path)
    assert (codes, len(said)) == ([0, 0], 1)
