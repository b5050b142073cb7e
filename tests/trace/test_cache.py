"""The Parquet tables: the same content, made again when logs have changed, resumed after an interruption."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import fields
from pathlib import Path

import pandas as pd
import pytest

from overlapscope.errors import OverlapScopeError
from overlapscope.trace import cache, load
from overlapscope.trace import rank_folder as rank_files
from overlapscope.trace.cache import ConvertedShards
from overlapscope.trace.folders import STAGING_PREFIX, try_lock
from overlapscope.trace.load import _ShardTask
from overlapscope.trace.recording import Trace, open_recording, read_trace
from overlapscope.trace.runs import RunNotes, write_notes
from overlapscope.trace.schema import RUN_FILE, TABLES_FOLDER, rank_folder
from overlapscope.trace.tables import TABLES
from tests.synthetic import US, make_rank, write_recording, write_step
from tests.trace.test_clock_alignment import edit_json, on_another_host

NOBODY = 65534


def assert_same(left: Trace, right: Trace) -> None:
    for field in fields(Trace):
        ours, theirs = getattr(left, field.name), getattr(right, field.name)
        if isinstance(ours, pd.DataFrame):
            pd.testing.assert_frame_equal(ours, theirs, obj=field.name)
        else:
            assert ours == theirs, field.name


@pytest.fixture
def logs_may_not_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("the logs were read, although the tables are up to date")

    monkeypatch.setattr(rank_files, "read_log", refuse)


def test_tables_hold_exactly_what_the_logs_hold(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    write_recording(tmp_path, ranks=2, world_size=3, close=False)
    from_logs = read_trace(tmp_path)
    request.getfixturevalue("logs_may_not_be_read")
    from_tables = read_trace(tmp_path)
    assert_same(from_logs, from_tables)
    assert len(from_tables.problems) == 3


def test_a_live_log_is_read_again_after_every_record(tmp_path: Path) -> None:
    log = make_rank(tmp_path, 0, world_size=1)
    for step in range(4):
        write_step(log, step, begin_ns=step * 10_000 * US)
        assert read_trace(tmp_path).steps["step"].tolist() == list(range(step + 1))
    assert read_trace(tmp_path).ranks["closed"].tolist() == [False]
    log.close()
    assert read_trace(tmp_path).ranks["closed"].tolist() == [True]


def test_a_live_ring_is_read_again_although_its_size_stays(tmp_path: Path) -> None:
    log = make_rank(tmp_path, 0, world_size=1, limit_bytes=40_000)
    for step in range(40):
        write_step(log, step, begin_ns=step * 10_000 * US)
        assert read_trace(tmp_path).steps["step"].max() == step


def test_a_rank_that_appears_later_is_read(tmp_path: Path) -> None:
    make_rank(tmp_path, 0, world_size=2).close()
    assert len(read_trace(tmp_path).ranks) == 1
    make_rank(tmp_path, 1, world_size=2).close()
    trace = read_trace(tmp_path)
    assert len(trace.ranks) == 2
    assert trace.problems == ()


def test_a_changed_side_file_is_read_again(tmp_path: Path) -> None:
    write_recording(tmp_path, ranks=1)
    read_trace(tmp_path)
    (rank_folder(tmp_path, 0) / RUN_FILE).write_text('{"world_size": 1, "backend": "nccl"}')
    assert read_trace(tmp_path).run["backend"] == "nccl"


@pytest.mark.parametrize("damage", ["half a table", "no table", "other JSON", "no contents"])
def test_damaged_tables_are_made_again(tmp_path: Path, damage: str) -> None:
    fresh = read_trace(write_recording(tmp_path, ranks=1))
    tables = tmp_path / TABLES_FOLDER
    steps = tables / "steps" / "0000.parquet"
    if damage == "half a table":
        steps.write_bytes(steps.read_bytes()[:200])
    elif damage == "no table":
        steps.unlink()
    elif damage == "other JSON":
        (tables / "contents.json").write_text("[]")
    else:
        (tables / "contents.json").unlink()
    assert_same(read_trace(tmp_path), fresh)
    assert steps.stat().st_size > 200


def test_a_damaged_table_is_made_again(tmp_path: Path) -> None:
    write_recording(tmp_path, ranks=1)
    read_trace(tmp_path)
    for name in ("steps/0000.parquet", "ranks.parquet", "contents.json"):
        path = tmp_path / TABLES_FOLDER / name
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 0x04
        path.write_bytes(content)
        assert len(read_trace(tmp_path).steps) == 5
        assert path.read_bytes() != content


def test_nothing_but_the_tables_is_left_beside_the_ranks(tmp_path: Path) -> None:
    write_recording(tmp_path, ranks=1)
    read_trace(tmp_path)
    read_trace(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rank_0", TABLES_FOLDER]


def test_tables_that_cannot_be_replaced_are_done_without(tmp_path: Path) -> None:
    write_recording(tmp_path, ranks=1)
    (tmp_path / TABLES_FOLDER).write_text("a file of the user's in the way")
    assert len(read_trace(tmp_path).steps) == 5
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rank_0", TABLES_FOLDER]


def test_a_file_of_the_users_among_the_tables_stays_there(tmp_path: Path) -> None:
    read_trace(write_recording(tmp_path, ranks=1))
    (tmp_path / TABLES_FOLDER / "mine.csv").write_text("1,2")
    (rank_folder(tmp_path, 0) / RUN_FILE).write_text('{"world_size": 1, "backend": "nccl"}')
    for _ in range(2):
        assert read_trace(tmp_path).run["backend"] == "nccl"
    assert (tmp_path / TABLES_FOLDER / "mine.csv").read_text() == "1,2"


@contextmanager
def as_someone_else() -> Iterator[None]:
    """Root, whom no file mode stops, becomes nobody for the while."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(0)


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that nobody can reach, as those of ``tmp_path`` are not."""
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o755)
    yield folder
    folder.chmod(0o755)
    shutil.rmtree(folder)


@pytest.mark.parametrize("umask", [0o077, 0o027])
def test_others_may_read_no_more_than_the_umask_lets_them(tmp_path: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        folder = write_recording(tmp_path / "run", ranks=1)
        read_trace(folder)
        write_notes(folder, RunNotes(note="for us alone"))
    finally:
        os.umask(before)
    written = [folder, *folder.rglob("*")]
    assert {path.name for path in written} >= {"events.log", TABLES_FOLDER, "notes.json"}
    assert [path for path in written if path.stat().st_mode & umask] == []


def test_a_folder_that_may_not_be_written_is_read_without_tables(open_folder: Path) -> None:
    write_recording(open_folder, ranks=1)
    open_folder.chmod(0o555)
    with as_someone_else():
        for _ in range(2):
            assert len(read_trace(open_folder).steps) == 5
    assert [path.name for path in open_folder.iterdir()] == ["rank_0"]


def test_a_folder_that_may_not_be_read_is_one_line(open_folder: Path) -> None:
    write_recording(open_folder / "run", ranks=1)
    open_folder.chmod(0o600)
    with as_someone_else(), pytest.raises(OverlapScopeError, match=r"can't be read \(Permission denied\)"):
        read_trace(open_folder / "run")
    open_folder.chmod(0o755)


def test_a_rank_that_may_not_be_read_is_named_and_the_others_are_shown(open_folder: Path) -> None:
    write_recording(open_folder, ranks=2)
    hidden = rank_folder(open_folder, 1)
    hidden.chmod(0o600)
    with as_someone_else():
        trace = read_trace(open_folder)
    hidden.chmod(0o755)
    assert trace.steps["rank"].unique().tolist() == [0]
    assert [str(problem) for problem in trace.errors] == [f"{hidden}/events.log: can't be read (Permission denied)"]


def test_a_staged_file_that_is_renamed_while_the_folder_is_listed_is_no_error(tmp_path: Path) -> None:
    """Played by a link to nowhere: listed, and not there when it is asked for."""
    write_recording(tmp_path, ranks=1)
    (rank_folder(tmp_path, 0) / "run.json.part").symlink_to("nowhere")
    assert read_trace(tmp_path).problems == ()


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


def shards_read(path: Path, *, at: int | None = None, error: BaseException | None = None) -> list[int]:
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


def staging_dirs_in(path: Path) -> list[Path]:
    return list(path.glob(f"{STAGING_PREFIX}*"))


def test_what_was_read_before_ctrl_c_is_not_read_again_and_the_tables_are_the_same(recording: Path) -> None:
    assert shards_read(recording) == ALL
    expected = open_recording(recording)
    files = sorted(path.relative_to(recording) for path in recording.rglob("*"))
    shutil.rmtree(recording / TABLES_FOLDER)
    assert shards_read(recording, at=2, error=KeyboardInterrupt()) == [0, 1]
    assert shards_read(recording, at=2, error=KeyboardInterrupt()) == []
    assert shards_read(recording) == [2]
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
    assert shards_read(recording) == [1, 2]
    assert staging_dirs_in(recording) == []


@pytest.mark.parametrize("name", ["0000.json", "0000-0-ranks.parquet", "0000-0-links.parquet", "0000-clock-0.parquet"])
def test_a_part_that_is_damaged_is_read_again(recording: Path, name: str) -> None:
    shards_read(recording, at=2, error=KeyboardInterrupt())
    (staging,) = staging_dirs_in(recording)
    damaged = staging / "checkpoints" / name
    content = bytearray(damaged.read_bytes())
    content[len(content) // 2] ^= 0x04
    damaged.write_bytes(content)
    assert shards_read(recording) == [0, 2]


def test_a_recording_that_has_changed_since_is_read_as_it_is_now(recording: Path) -> None:
    shards_read(recording, at=2, error=KeyboardInterrupt())
    edit_json(rank_folder(recording, 0) / RUN_FILE, backend="nccl")
    assert shards_read(recording) == ALL
    assert staging_dirs_in(recording) == []
    assert open_recording(recording).run["backend"] == "nccl"


def test_on_a_full_disk_nothing_is_left(recording: Path) -> None:
    assert shards_read(recording, at=2, error=OSError("no space left")) == [0, 1]
    assert staging_dirs_in(recording) == []


def test_where_nothing_may_be_written_logs_are_read_and_earlier_tables(recording: Path) -> None:
    before = sorted(recording.rglob("*"))
    logs = open_recording(recording, write_tables=False)
    assert sorted(recording.rglob("*")) == before
    tables = open_recording(recording)
    pd.testing.assert_frame_equal(logs.trace().collectives, tables.trace().collectives)
    assert isinstance(open_recording(recording, write_tables=False).events, cache.StoredTables)


def test_what_another_process_is_making_is_left_to_it(recording: Path) -> None:
    shards_read(recording, at=2, error=KeyboardInterrupt())
    (staging,) = staging_dirs_in(recording)
    lock = try_lock(staging)
    assert lock is not None
    assert shards_read(recording) == ALL
    assert staging_dirs_in(recording) == [staging]
    os.close(lock)
