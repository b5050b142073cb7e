"""``overlapscope lab cluster``: what it refuses, in one line, before anything is made."""

from __future__ import annotations

from pathlib import Path

import pytest

from overlapscope.cli import lab_cluster
from overlapscope.cli.main import main


@pytest.fixture(autouse=True)
def _nothing_is_missing_and_nothing_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lab_cluster, "find_missing_requirement", lambda _: None)
    monkeypatch.delattr(lab_cluster, "make_linked_hosts")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "no command to run; give one after '--'"),
        (["--rate", "fast", "--", "true"], "fast: not a rate; write it as tc does"),
        (["--latency", "2", "--", "true"], "2: not a latency; write it as tc does"),
        (["--hosts", "1", "--", "true"], "--hosts 1: give 2 to 64"),
        (["--hosts", "65", "--", "true"], "--hosts 65: give 2 to 64"),
        (["--", "no-such-program"], "no-such-program: no such command"),
        (["--", "torchrun", "--standalone", "train.py"], "torchrun --standalone would train on each host alone"),
    ],
)
def test_what_makes_no_sense_is_one_line(arguments, said, capsys):
    assert main(["lab", "cluster", *arguments]) == 1
    printed = capsys.readouterr()
    assert printed.out == ""
    (line,) = printed.err.splitlines()
    assert line.startswith(f"overlapscope lab: {said}")


def test_what_the_machine_lacks_is_one_line(monkeypatch, capsys):
    monkeypatch.setattr(lab_cluster, "find_missing_requirement", lambda _: "there is no program tc")
    assert main(["lab", "cluster", "--", "true"]) == 1
    assert capsys.readouterr().err == "overlapscope lab: there is no program tc\n"


def test_an_earlier_recording_is_not_overwritten(tmp_path: Path, capsys):
    (tmp_path / "rank_0").mkdir()
    (tmp_path / "rank_0" / "events.log").touch()
    assert main(["lab", "cluster", "-o", str(tmp_path), "--", "true"]) == 1
    assert "already holds a recording" in capsys.readouterr().err


def test_its_help_has_an_example_and_says_what_a_latency_is(capsys):
    with pytest.raises(SystemExit) as left:
        main(["lab", "cluster", "--help"])
    assert left.value.code == 0
    printed = capsys.readouterr().out
    assert "lab cluster --hosts 2 --rate 1gbit --latency 2ms -- torchrun train.py" in printed
    assert "one-way" in printed
