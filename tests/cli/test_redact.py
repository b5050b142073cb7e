"""``overlapscope redact``: commands show the copy as they show the original, and what is for its owner is private."""

from __future__ import annotations

import json
import re
import secrets
from pathlib import Path

import pytest

from tests.cli.command_line import overlapscope
from tests.redact.copies import read_bytes
from tests.synthetic import write_straggling_recording

COMMANDS = (
    ("summary",),
    ("summary", "--json"),
    ("stragglers",),
    ("stragglers", "--json"),
    ("diagnose",),
    ("diagnose", "--json"),
    ("recommend",),
    ("fleet", "--no-cache"),
)

MARKS = (", names are pseudonyms", '"confidential": true,')
"""What says of a copy that it is one."""


@pytest.fixture
def traces(tmp_path: Path) -> Path:
    """A recording in which rank 3 of two hosts is late."""
    return write_straggling_recording(tmp_path / "traces", late_us=lambda rank, _: 1000 * (rank == 3), ranks_per_host=2)


@pytest.mark.slow
def test_all_commands_say_the_same_of_a_copy_but_for_names(traces: Path, tmp_path: Path) -> None:
    names = tmp_path / "names.json"
    ran = overlapscope("redact", traces, "-o", tmp_path / "copy", "--names", names)
    assert (ran.returncode, ran.stdout) == (0, "")
    assert ran.stderr.count("\n") == 1
    known = json.loads(names.read_text())
    assert {"node0", "node1", "train.py", "body"} <= {*known.values()}
    for command in COMMANDS:
        said = [overlapscope(*command, folder) for folder in (traces, tmp_path / "copy")]
        assert said[0].returncode == said[1].returncode
        translated = re.sub(r"([a-z]+_[0-9a-f]{8})(\.py)?", lambda found: known[found[1]], said[1].stdout)
        for of_copy, of_original in (("/copy", "/traces"), *((mark, "") for mark in MARKS)):
            translated = translated.replace(of_copy, of_original)
        assert shorten(translated) == shorten(said[0].stdout), command
    assert b"node0" not in read_bytes(tmp_path / "copy")


def shorten(text: str) -> str:
    """A text without what depends on how long names are, and without hashes."""
    return re.sub(r"[\s─━│┃]+", " ", text)


def test_names_and_key_are_for_their_owner_alone(traces: Path, tmp_path: Path) -> None:
    names, key = tmp_path / "names.json", tmp_path / "key"
    assert overlapscope("redact", traces, "-o", tmp_path / "a", "--names", names, "--key", key).returncode == 0
    assert [path.stat().st_mode & 0o777 for path in (names, key)] == [0o600, 0o600]
    assert overlapscope("redact", traces, "-o", tmp_path / "b", "--key", key).returncode == 0
    assert overlapscope("redact", traces, "-o", tmp_path / "c").returncode == 0
    a, b, c = (read_bytes(tmp_path / name) for name in "abc")
    assert a == b != c
    assert key.read_text().strip().encode() not in a


def test_copies_with_one_key_can_be_compared(traces: Path, tmp_path: Path) -> None:
    write_straggling_recording(tmp_path / "later", late_us=lambda *_: 0, ranks_per_host=2)
    for name in ("traces", "later"):
        overlapscope("redact", tmp_path / name, "-o", tmp_path / f"copy of {name}", "--key", tmp_path / "key")
    said = [
        json.loads(overlapscope("compare", tmp_path / f"{prefix}traces", tmp_path / f"{prefix}later", "--json").stdout)
        for prefix in ("", "copy of ")
    ]
    assert said[0]["outcomes"] == said[1]["outcomes"]


@pytest.mark.slow
def test_a_report_of_a_copy_says_that_names_are_pseudonyms(traces: Path, tmp_path: Path) -> None:
    overlapscope("redact", traces, "-o", tmp_path / "copy")
    ran = overlapscope("report", tmp_path / "copy", "-o", tmp_path / "report.html")
    assert ran.returncode == 0
    page = (tmp_path / "report.html").read_text()
    assert "pseudonyms" in page
    assert "node0" not in page


def test_a_key_that_is_none_is_refused(traces: Path, tmp_path: Path) -> None:
    (tmp_path / "key").write_text(secrets.token_hex(8))
    ran = overlapscope("redact", traces, "-o", tmp_path / "copy", "--key", tmp_path / "key")
    assert ran.returncode == 1
    assert not (tmp_path / "copy").exists()
