"""``overlapscope lab``: lists faults, runs one, and says whether the diagnosis is the truth."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest

from overlapscope.cli import child_process
from overlapscope.cli.main import main
from tests.cli.command_line import overlapscope_process


def test_without_torch_it_says_how_to_get_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(child_process, "find_spec", lambda _: None)
    assert main(["lab", "fault", "jitter"]) == 1
    assert "pip install 'overlapscope[torch]'" in capsys.readouterr().err


@pytest.mark.parametrize(("printed", "times"), [("Rank 1 hangs.", 1), ("Rank 1 may hang.", 2)])
def test_a_report_that_the_watchdog_has_printed_is_not_printed_again(
    printed: str, times: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    @contextmanager
    def play(*_: object, on_line: Callable[[int, str], None], **__: object) -> Iterator[SimpleNamespace]:
        for line in (printed, "", "Evidence:"):
            on_line(0, line)
        yield SimpleNamespace(wait=lambda **_: None, ends=list)

    monkeypatch.setattr("overlapscope.lab.jobs.run_fault_job", play)
    monkeypatch.setattr("overlapscope.lab.jobs.diagnose", lambda _: (None, "Rank 1 hangs.\n\nEvidence:"))
    monkeypatch.setattr("overlapscope.lab.truth.check_verdict", lambda *_: [])
    assert main(["lab", "fault", "missing-branch", "-o", str(tmp_path / "traces")]) == 0
    out = capsys.readouterr().out
    assert out.count("Evidence:") == times
    assert "Rank 1 hangs." in out


@pytest.mark.cluster
@pytest.mark.slow
def test_a_fault_is_explained_run_diagnosed_and_compared_with_the_truth(tmp_path: Path) -> None:
    ran = overlapscope_process("lab", "fault", "failed-rank", "--ranks", "2", "-o", tmp_path)
    assert "[rank 1] IndexError: Target 10 is out of bounds." in ran.stdout.replace("[rank1]: ", "")
    assert "rank 1: exit code 1" in ran.stdout
    assert f"overlapscope serve {tmp_path}" in ran.stdout
    assert ran.returncode == 0


@pytest.mark.cluster
@pytest.mark.nightly
def test_stock_shows_what_one_sees_without_us(tmp_path: Path) -> None:
    ran = overlapscope_process("lab", "fault", "failed-rank", "--ranks", "2", "--stock")
    assert ran.returncode == 0
    assert "IndexError: Target 10 is out of bounds." in ran.stdout
    assert "truth" not in ran.stdout
