"""``overlapscope lab``: lists faults, runs one, and says whether the diagnosis is the truth."""

from __future__ import annotations

from pathlib import Path

import pytest

from overlapscope.cli import lab
from overlapscope.cli.main import main
from overlapscope.lab.catalog import FAULTS
from tests.cli.command_line import overlapscope_process


def test_without_a_command_it_shows_its_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["lab"]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("usage: overlapscope lab")
    assert "faults" in printed


def test_the_list_has_a_line_for_each_fault(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["lab", "faults"]) == 0
    lines = capsys.readouterr().out.splitlines()
    for fault in FAULTS:
        assert sum(line.split()[:1] == [fault.name] for line in lines) == 1


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("missing-brunch", "did you mean missing-branch"),
        ("skipped_batch", "did you mean skipped-batch"),
        ("zzz", "see 'overlapscope lab faults'"),
    ],
)
def test_an_unknown_name_is_one_line_with_the_nearest(name: str, hint: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["lab", "fault", name]) == 1
    printed = capsys.readouterr()
    assert printed.out == ""
    (line,) = printed.err.splitlines()
    assert line.startswith(f"overlapscope lab: {name}: no such fault; {hint}")


def test_a_number_of_ranks_that_makes_no_sense_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["lab", "fault", "missing-member", "--ranks", "2"]) == 1
    assert capsys.readouterr().err == "overlapscope lab: missing-member: runs with 3 or 4 ranks, not with 2\n"


def test_without_torch_it_says_how_to_get_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(lab, "find_spec", lambda _: None)
    assert main(["lab", "fault", "jitter"]) == 1
    assert capsys.readouterr().err == (
        "overlapscope lab: the lab needs PyTorch, which is missing; pip install 'overlapscope[torch]'\n"
    )


def test_an_earlier_recording_is_not_overwritten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "rank_0").mkdir()
    (tmp_path / "rank_0" / "events.log").touch()
    assert main(["lab", "fault", "jitter", "-o", str(tmp_path)]) == 1
    assert "already holds a recording" in capsys.readouterr().err


@pytest.mark.cluster
@pytest.mark.slow
def test_a_fault_is_explained_run_diagnosed_and_compared_with_the_truth(tmp_path: Path) -> None:
    ran = overlapscope_process("lab", "fault", "failed-rank", "--ranks", "2", "-o", tmp_path)
    assert "One rank ends with an exception." in ran.stdout
    assert "[rank 1] IndexError: Target 10 is out of bounds." in ran.stdout.replace("[rank1]: ", "")
    assert "rank 1: exit code 1" in ran.stdout
    assert "this is what was injected" in ran.stdout
    assert f"overlapscope serve {tmp_path}" in ran.stdout
    assert ran.returncode == 0


@pytest.mark.cluster
@pytest.mark.slow
def test_stock_shows_what_one_sees_without_us(tmp_path: Path) -> None:
    ran = overlapscope_process("lab", "fault", "failed-rank", "--ranks", "2", "--stock")
    assert ran.returncode == 0
    assert "IndexError: Target 10 is out of bounds." in ran.stdout
    assert "truth" not in ran.stdout
