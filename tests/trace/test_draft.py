"""Tables of a large recording whose making is interrupted: the next process goes on with what is left."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pandas as pd
import pytest

from overlapscope.trace import load
from overlapscope.trace.cache import ConvertedShards
from overlapscope.trace.load import _ShardTask
from overlapscope.trace.recording import open_recording
from overlapscope.trace.schema import RUN_FILE, TABLES_FOLDER, rank_folder
from overlapscope.trace.small_files import STAGING_PREFIX, try_lock
from overlapscope.trace.tables import TABLES
from tests.synthetic import write_recording
from tests.trace.test_reader_clocks import edit_json, on_another_host

UNTIL_KILLED = """
import os, signal, sys
from pathlib import Path
from overlapscope.trace import load
from overlapscope.trace.recording import open_recording

load._RECORDS_PER_SHARD, load._RECORDS_PER_RANGE = 1, 600
convert = load._convert
load._convert = lambda task: os.kill(os.getpid(), signal.SIGKILL) if task.number == 1 else convert(task)
open_recording(Path(sys.argv[1]))
"""
ALL = [0, 1, 2]
"""Parts: each rank is one."""


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load, "_RECORDS_PER_SHARD", 1)
    monkeypatch.setattr(load, "_RECORDS_PER_RANGE", 600)


@pytest.fixture
def recording(tmp_path: Path) -> Path:
    write_recording(tmp_path, ranks=3, steps=24)
    for rank in (1, 2):
        on_another_host(tmp_path, rank, shift_ns=700)
    (rank_folder(tmp_path, 1) / RUN_FILE).write_text("{")  # a problem of the first part
    return tmp_path


def parts_read(path: Path, *, at: int | None = None, error: BaseException | None = None) -> list[int]:
    """Open a recording, and have an error come instead of reading one part. Returns those that were read."""
    read: list[int] = []
    convert = load._convert

    def watched(task: _ShardTask) -> ConvertedShards:
        if task.number == at and error is not None:
            raise error
        read.append(task.number)
        return convert(task)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(load, "_convert", watched)
        with suppress(KeyboardInterrupt, OSError):
            open_recording(path)
    return read


def drafts_in(path: Path) -> list[Path]:
    return list(path.glob(f"{STAGING_PREFIX}*"))


def test_what_was_read_before_ctrl_c_is_not_read_again_and_the_tables_are_the_same(recording: Path) -> None:
    assert parts_read(recording) == ALL
    expected = open_recording(recording)
    files = sorted(path.relative_to(recording) for path in recording.rglob("*"))
    shutil.rmtree(recording / TABLES_FOLDER)
    assert parts_read(recording, at=2, error=KeyboardInterrupt()) == [0, 1]
    assert parts_read(recording, at=2, error=KeyboardInterrupt()) == []
    assert parts_read(recording) == [2]
    found = open_recording(recording)
    assert sorted(path.relative_to(recording) for path in recording.rglob("*")) == files
    assert (found.run, found.problems) == (expected.run, expected.problems)
    assert len(found.problems) > 0
    for name, table in expected.unsplit.items():
        pd.testing.assert_frame_equal(found.unsplit[name], table, obj=name)
    for name in TABLES:
        pd.testing.assert_frame_equal(getattr(found.trace(), name), getattr(expected.trace(), name), obj=name)


def test_what_was_read_before_the_process_was_killed_is_not_read_again(recording: Path) -> None:
    killed = subprocess.run([sys.executable, "-c", UNTIL_KILLED, recording], timeout=60, check=False)
    assert killed.returncode == -signal.SIGKILL
    assert parts_read(recording) == [1, 2]
    assert drafts_in(recording) == []


@pytest.mark.parametrize("name", ["0000.json", "0000-0-ranks.parquet", "0000-0-links.parquet", "0000-clock-0.parquet"])
def test_a_part_that_is_damaged_is_read_again(recording: Path, name: str) -> None:
    parts_read(recording, at=2, error=KeyboardInterrupt())
    (draft,) = drafts_in(recording)
    damaged = draft / "parts" / name
    content = bytearray(damaged.read_bytes())
    content[len(content) // 2] ^= 0x04
    damaged.write_bytes(content)
    assert parts_read(recording) == [0, 2]


def test_a_recording_that_has_changed_since_is_read_as_it_is_now(recording: Path) -> None:
    parts_read(recording, at=2, error=KeyboardInterrupt())
    edit_json(rank_folder(recording, 0) / RUN_FILE, backend="nccl")
    assert parts_read(recording) == ALL
    assert drafts_in(recording) == []
    assert open_recording(recording).run["backend"] == "nccl"


def test_on_a_full_disk_nothing_is_left(recording: Path) -> None:
    assert parts_read(recording, at=2, error=OSError("no space left")) == [0, 1]
    assert drafts_in(recording) == []


def test_what_another_process_is_making_is_left_to_it(recording: Path) -> None:
    parts_read(recording, at=2, error=KeyboardInterrupt())
    (draft,) = drafts_in(recording)
    lock = try_lock(draft)
    assert lock is not None
    assert parts_read(recording) == ALL
    assert drafts_in(recording) == [draft]
    os.close(lock)
