"""``manifest.json`` says what there was: what is not as it says is named, once and with its file."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from overlapscope.errors import Problem
from overlapscope.trace.json_files import write_json
from overlapscope.trace.manifest import Manifest, write_manifest
from overlapscope.trace.schema import MANIFEST_FILE
from tests.trace.logs import make_log


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "alive.bin").write_bytes(b"12345678")
    make_log(tmp_path / "events.log", 40)
    (tmp_path / "training.log").write_text("not ours")
    (tmp_path / "run.json.part").write_text("a draft")
    write_manifest(tmp_path)
    return tmp_path


def said_of(folder: Path) -> list[str]:
    problems: list[Problem] = []
    Manifest(folder, problems).report(problems)
    return [str(problem).removeprefix(f"{folder}/") for problem in problems]


def test_nothing_is_said_of_what_is_as_it_was_or_was_never_promised(folder: Path) -> None:
    (folder / "run.json.part").unlink()
    (folder / "calibration.json").write_text("{}")
    assert said_of(folder) == []
    assert said_of(folder.parent) == [], "without a manifest nothing is promised"


def test_what_is_gone_cut_short_or_changed_is_named(folder: Path, golden: Callable[[str, str], None]) -> None:
    (folder / "events.log").unlink()
    (folder / "alive.bin").write_bytes(b"123")
    said = said_of(folder)
    assert [line.partition(":")[0] for line in said] == ["alive.bin", "events.log"]
    (folder / "alive.bin").write_bytes(b"12345679")
    golden("recording/manifest", "\n".join([*said, said_of(folder)[0]]))
    assert Manifest(folder, []).is_damaged("alive.bin")


def test_what_came_later_is_no_damage(folder: Path) -> None:
    """A process may still crash when its recording is complete, and faulthandler writes that down."""
    with (folder / "alive.bin").open("ab") as file:
        file.write(b" and more")
    assert said_of(folder) == []


def test_a_log_from_before_the_end_is_not_the_one_that_is_listed(
    folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Copied while the job ran, beside files that were copied later."""
    listed = (folder / "events.log").read_bytes()
    stale = make_log(tmp_path_factory.mktemp("before") / "events.log", 40, capacity=80, close=False).path.read_bytes()
    for content in (stale, stale[: len(listed)]):
        (folder / "events.log").write_bytes(content)
        assert said_of(folder) == ["events.log: an older copy, from before the log was closed"]
    (folder / "events.log").write_bytes(listed)
    (folder / "training.log").write_text("not ours, and it went on")
    assert said_of(folder) == []


def test_of_a_log_that_could_not_be_closed_nothing_is_promised(tmp_path: Path) -> None:
    make_log(tmp_path / "events.log", 40, capacity=80, close=False)
    write_manifest(tmp_path)
    assert said_of(tmp_path) == []


@pytest.mark.parametrize("name", ["{outside}", "../outside", "..", "", ".", "a\0b"])
def test_only_names_of_files_are_looked_at(folder: Path, tmp_path_factory: pytest.TempPathFactory, name: str) -> None:
    outside = tmp_path_factory.mktemp("outside") / "file"
    write_json(folder / MANIFEST_FILE, {"files": {name.format(outside=outside): {"bytes": 1}}})
    assert said_of(folder) == ["manifest.json: damaged; it lists files outside of its folder"]


def test_a_pipe_is_not_read(folder: Path) -> None:
    (folder / "alive.bin").unlink()
    os.mkfifo(folder / "alive.bin")
    assert said_of(folder) == ["alive.bin: not a file"]


def test_nothing_is_said_twice_of_a_file(folder: Path) -> None:
    (folder / "alive.bin").write_bytes(b"12345679")
    problems = [Problem("error", f"{folder / 'alive.bin'}: damaged; it says nothing")]
    Manifest(folder, problems).report(problems)
    assert len(problems) == 1


@pytest.mark.parametrize("content", ["", "[]", '{"files": 3}', '{"files": {"alive.bin": 3}}', '{"files": {"a": {}}}'])
def test_a_manifest_that_makes_no_sense_raises_nothing(folder: Path, content: str) -> None:
    (folder / MANIFEST_FILE).write_text(content)
    assert all("\n" not in text for text in said_of(folder))
