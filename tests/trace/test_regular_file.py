"""Small files of a recording: read once by a reader that asks for it, and by all others each time."""

from __future__ import annotations

import os
from pathlib import Path
from threading import Thread

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from overlapscope.trace.rank_folder import RankFolder
from overlapscope.trace.regular_file import has_file, match_files, read_regular_file, remember_small_files
from overlapscope.trace.schema import (
    EVENTS_FILE,
    GROUP_PATTERN,
    INCIDENT_PATTERN,
    POINT_TO_POINT_PATTERN,
    RECORD_BYTES,
    rank_folder,
)
from tests.synthetic import write_recording


def test_a_reader_that_remembers_sees_what_it_saw_first_and_others_what_is_there(tmp_path: Path) -> None:
    file, late = tmp_path / "run.json", tmp_path / "late.json"
    file.write_bytes(b"first")
    seen: list[bytes] = []
    with remember_small_files():
        assert read_regular_file(file) == b"first"
        with pytest.raises(FileNotFoundError):
            read_regular_file(late)
        assert match_files(tmp_path, "*.json") == [file]
        file.write_bytes(b"second")
        late.write_bytes(b"late")
        assert read_regular_file(file) == b"first"
        with pytest.raises(FileNotFoundError, match=r"late\.json"):
            read_regular_file(late)
        assert match_files(tmp_path, "*.json") == [file]
        assert not has_file(tmp_path, late.name)
        other = Thread(target=lambda: seen.append(read_regular_file(file)))
        other.start()
        other.join()
    assert seen == [b"second"]
    assert [read_regular_file(each) for each in (file, late)] == [b"second", b"late"]
    assert sorted(match_files(tmp_path, "*.json")) == [late, file]
    assert has_file(tmp_path, late.name)


def test_a_large_file_is_not_remembered_and_a_pipe_not_read(tmp_path: Path) -> None:
    large, pipe = tmp_path / "large", tmp_path / "pipe"
    large.write_bytes(bytes(100_000))
    os.mkfifo(pipe)
    with remember_small_files():
        assert len(read_regular_file(large)) == 100_000
        large.write_bytes(b"small")
        assert read_regular_file(large) == b"small"
        for _ in range(2):
            with pytest.raises(OSError, match="not a file"):
                read_regular_file(pipe)


@pytest.mark.parametrize("is_damaged", [False, True])
def test_the_end_of_a_log_is_the_same_whether_or_not_it_was_read_whole_before(
    tmp_path: Path, *, is_damaged: bool
) -> None:
    folder = rank_folder(write_recording(tmp_path, ranks=1, steps=200), 0)
    if is_damaged:
        log = folder / EVENTS_FILE
        log.write_bytes(log.read_bytes()[:-RECORD_BYTES] + bytes(range(RECORD_BYTES)))
    with remember_small_files():
        whole = RankFolder(folder)
        _, records = whole.events()
        found = [RankFolder(folder), RankFolder(folder)]
        ends = [each.latest_events() for each in found]
    alone = RankFolder(folder)
    assert np.array_equal(ends[0], alone.latest_events())
    assert np.array_equal(ends[1], ends[0])
    assert np.array_equal(ends[0], records[-len(ends[0]) :])
    assert found[0].problems == found[1].problems == alone.problems
    assert bool(alone.problems) == is_damaged


names = st.sampled_from(["group_0.log", "group_12.log", "group_x", "p2p_0.log", "incident_3.log", ".group_0.log", "a"])


@given(found=st.sets(names))
def test_names_match_as_in_a_glob(found: set[str], tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("rank")
    for name in found:
        (folder / name).touch()
    for pattern in (GROUP_PATTERN, POINT_TO_POINT_PATTERN, INCIDENT_PATTERN):
        assert sorted(match_files(folder, pattern)) == sorted(folder.glob(pattern))
    assert match_files(folder / "none", GROUP_PATTERN) == match_files(folder / "a", GROUP_PATTERN) == []
