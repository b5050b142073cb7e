"""Small files of a recording: read once by a reader that asks for it, and by all others each time."""

from __future__ import annotations

import os
from pathlib import Path
from threading import Thread

import pytest
from hypothesis import given
from hypothesis import strategies as st

from overlapscope.trace.regular_file import match_files, read_regular_file, remember_small_files
from overlapscope.trace.schema import GROUP_PATTERN, INCIDENT_PATTERN, POINT_TO_POINT_PATTERN


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
        other = Thread(target=lambda: seen.append(read_regular_file(file)))
        other.start()
        other.join()
    assert seen == [b"second"]
    assert [read_regular_file(each) for each in (file, late)] == [b"second", b"late"]
    assert sorted(match_files(tmp_path, "*.json")) == [late, file]


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


names = st.sampled_from(["group_0.log", "group_12.log", "group_x", "p2p_0.log", "incident_3.log", ".group_0.log", "a"])


@given(found=st.sets(names))
def test_names_match_as_in_a_glob(found: set[str], tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("rank")
    for name in found:
        (folder / name).touch()
    for pattern in (GROUP_PATTERN, POINT_TO_POINT_PATTERN, INCIDENT_PATTERN):
        assert sorted(match_files(folder, pattern)) == sorted(folder.glob(pattern))
    assert match_files(folder / "none", GROUP_PATTERN) == match_files(folder / "a", GROUP_PATTERN) == []
