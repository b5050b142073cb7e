"""What programs are given is what docs/json.md says."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from overlapscope.cli.main import main
from tests.synthetic import write_recording, write_straggling_recording

DOCUMENT = Path(__file__).parents[2] / "docs" / "json.md"


def documented(heading: str, table: int) -> list[str]:
    """The keys of a table, from 0, below a heading."""
    section = DOCUMENT.read_text().partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    rows = re.findall(r"(?:^\| `.*\n)+", section, re.MULTILINE)[table].splitlines()
    return [key for row in rows for key in re.findall(r"`(\w+)`", row.split("|")[1])]


def test_summary(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["summary", str(write_recording(tmp_path, steps=9)), "--json"]) == 0
    content = json.loads(capsys.readouterr().out)
    figures = {"rank", *documented("`overlapscope summary`", 2)}
    assert set(content) == set(documented("`overlapscope summary`", 0))
    assert set(content["breakdown"]) == set(documented("`overlapscope summary`", 1))
    assert set(content["ranks"][0]) == figures | {"steps_counted"}
    assert set(content["steps"][0]) == figures | {"step", "is_counted"}
    assert set(content["breakdown"]["step_ns"]) == {"value", "low", "high"}
    assert set(content["breakdown"]["excluded"][0]) == {"why", "steps", "block"}


def test_stragglers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_straggling_recording(tmp_path, late_us=lambda rank, _: 3_000 * (rank == 2), ranks=8, steps=40)
    assert main(["stragglers", str(folder), "--json"]) == 0
    content = json.loads(capsys.readouterr().out)
    assert set(content) == set(documented("`overlapscope stragglers`", 0))
    (finding,) = content["findings"]
    assert set(finding) == set(documented("`overlapscope stragglers`", 1))
    for saving in (*content["what_if"].values(), finding["saving"]):
        blocks = [each["value"] for each in saving["blocks_ns"].values()]
        assert sum(blocks) == pytest.approx(saving["step_ns"]["value"])


def test_compare(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base, new = (str(write_recording(tmp_path / name, steps=20)) for name in ("base", "new"))
    assert main(["compare", base, new, "--json"]) == 0
    content = json.loads(capsys.readouterr().out)
    heading = "`overlapscope compare`"
    assert set(content) == set(documented(heading, 0))
    assert set(content["base"]) == set(content["new"]) == set(documented(heading, 1))
    assert set(content["parts"]["step"]) == set(documented(heading, 2))
    assert set(content["parts"]["step"]["mean"]) == set(documented(heading, 3))


def test_recommend(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recommend", str(write_recording(tmp_path, steps=20)), "--json"]) == 0
    content = json.loads(capsys.readouterr().out)
    assert set(content) == set(documented("`overlapscope recommend`", 0))
    for prediction in (content["now"], content["best"], *content["sizes"]):
        assert set(prediction) == set(documented("`overlapscope recommend`", 1))
    summary = json.loads(said_of(tmp_path, "summary", capsys))
    assert content["now"]["step_ns"] == content["now"]["recorded_ns"] == summary["breakdown"]["step_ns"]


def said_of(folder: Path, command: str, capsys: pytest.CaptureFixture[str]) -> str:
    assert main([command, str(folder), "--json"]) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("command", ["summary", "stragglers", "recommend", "diagnose", "compare"])
def test_every_object_says_by_which_schema_it_is_to_be_read(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = str(write_straggling_recording(tmp_path, late_us=lambda *_: 0, ranks=2, steps=40))
    sides = [folder, "--base-steps", ":20", "--new-steps", "20:"] if command == "compare" else []
    main([command, folder, *sides, "--json"])
    assert json.loads(capsys.readouterr().out)["schema"] == 1
