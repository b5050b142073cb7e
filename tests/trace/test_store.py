"""The Parquet tables: the same content, made again when the logs have changed, and never a reason to fail."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path

import pandas as pd
import pytest

from overlapscope.errors import OverlapScopeError
from overlapscope.trace import rank_folder as rank_files
from overlapscope.trace.recording import Trace, read_trace
from overlapscope.trace.schema import RUN_FILE, TABLES_FOLDER, rank_folder
from tests.synthetic import US, make_rank, write_recording, write_step

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


def test_a_draft_that_is_renamed_while_the_folder_is_listed_is_no_error(tmp_path: Path) -> None:
    """Played by a link to nowhere: listed, and not there when it is asked for."""
    write_recording(tmp_path, ranks=1)
    (rank_folder(tmp_path, 0) / "run.json.part").symlink_to("nowhere")
    assert read_trace(tmp_path).problems == ()
