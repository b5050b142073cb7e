"""``overlapscope report``: one file to keep, which overwrites none, or text to paste."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from overlapscope.text import format_share, format_value
from tests.cli.command_line import overlapscope, overlapscope_process
from tests.synthetic import write_recording

LARGEST_BYTES = 3_000_000


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_recording(tmp_path / "traces", steps=100)


def test_it_writes_one_file_of_moderate_size_and_says_where(folder: Path, tmp_path: Path) -> None:
    output = tmp_path / "report.html"
    ran = overlapscope_process("report", folder, "-o", output)
    assert (ran.returncode, ran.stderr) == (0, "")
    size = output.stat().st_size
    assert ran.stdout == f"{output}: {size / 1000:,.0f} kB\n"
    assert size < LARGEST_BYTES
    assert output.read_text().startswith("<!DOCTYPE html>")


def test_it_has_the_figures_of_the_summary(folder: Path, tmp_path: Path) -> None:
    overlapscope("report", folder, "-o", tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text().replace("\N{NO-BREAK SPACE}", " ")
    said = json.loads(overlapscope("summary", folder, "--json").stdout)
    assert said["sentence"] in page
    assert format_share(said["breakdown"]["overlap_ratio"]) in page
    for block in said["breakdown"]["blocks_ns"].values():
        assert not block["value"] or f"<td>{format_value(block['value'], 'ms')}</td>" in page


def test_markdown_goes_to_stdout_or_to_a_file(folder: Path, tmp_path: Path) -> None:
    ran = overlapscope("report", folder, "--format", "md")
    assert (ran.returncode, ran.stderr) == (0, "")
    assert ran.stdout.startswith("# OverlapScope: traces\n")
    overlapscope("report", folder, "-o", tmp_path / "report.md")
    written = (tmp_path / "report.md").read_text()
    assert written.splitlines()[:-1] == ran.stdout.splitlines()[:-1], "but for the minute in which it was made"


def test_what_is_missing_is_said_and_the_rest_reported(tmp_path: Path) -> None:
    folder = write_recording(tmp_path / "traces", world_size=4, steps=12)
    ran = overlapscope("report", folder, "-o", tmp_path / "report.html")
    assert ran.returncode == 1
    (error,) = ran.stderr.splitlines()
    said = error.removeprefix(f"error: {folder}: ")
    assert said != error
    assert said in (tmp_path / "report.html").read_text()
