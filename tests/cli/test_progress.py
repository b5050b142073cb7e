"""What commands say while they are busy."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest

from overlapscope import console
from overlapscope.console import Progress
from tests.cli.command_line import overlapscope
from tests.synthetic import write_recording


class Overdue:
    """A timer whose time is up at once: every phase takes long."""

    daemon = False

    def __init__(
        self, _seconds: float, act: Callable[..., None], args: Sequence[object], kwargs: Mapping[str, object]
    ) -> None:
        self._act = lambda: act(*args, **kwargs)

    def start(self) -> None:
        self._act()

    def cancel(self) -> None:
        pass


READING = "overlapscope: reading logs ..."


@pytest.mark.parametrize(
    ("command", "phases"),
    [
        ("summary", [READING, "overlapscope: dividing steps ..."]),
        ("stragglers", [READING, "overlapscope: dividing steps ...", "overlapscope: looking for stragglers ..."]),
        ("recommend", [READING, "overlapscope: predicting other settings ..."]),
        ("diagnose", [READING]),
    ],
)
def test_in_a_pipe_each_slow_phase_is_a_line_on_stderr(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str, phases: list[str]
) -> None:
    folder = write_recording(tmp_path / "traces", steps=30)
    quiet = overlapscope(command, folder)
    monkeypatch.setattr(console, "Timer", Overdue)
    ran = overlapscope(command, folder)
    assert ran.stderr.splitlines()[: len(phases)] == phases
    assert ran.stdout == quiet.stdout


def test_a_line_comes_by_itself_while_a_phase_goes_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(console, "FIRST_LINE_AFTER_S", 0.0)
    with Progress() as shown:
        shown.begin("something slow")
        said, deadline_s = "", time.monotonic() + 60
        while "something slow ..." not in said and time.monotonic() < deadline_s:
            said += capsys.readouterr().err
    assert said.count("something slow ...") == 1


def test_a_phase_that_is_over_in_time_says_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(console, "FIRST_LINE_AFTER_S", 1_000.0)
    with Progress() as shown:
        shown.begin("something quick")
        shown.count(1, 2)
    assert capsys.readouterr().err == ""
