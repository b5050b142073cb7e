"""Recordings that are larger than the memory of whoever looks at them."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from overlapscope.errors import OverlapScopeError
from overlapscope.trace import cache, table_file
from overlapscope.trace.folders import find_rank_folders
from overlapscope.trace.load import staging_dir
from overlapscope.trace.recording import open_recording, read_trace
from overlapscope.trace.schema import EVENTS_FILE
from overlapscope.trace.tables import TABLES
from tests.synthetic import write_recording

MB = 1024**2


def with_free(monkeypatch: pytest.MonkeyPatch, free_bytes: int | None) -> None:
    monkeypatch.setattr(table_file, "free_bytes", lambda: free_bytes)


def test_a_recording_that_does_not_fit_is_one_clear_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, golden: Callable[[str, str], None]
) -> None:
    folder = write_recording(tmp_path / "traces", steps=200)
    with_free(monkeypatch, MB // 4)
    with pytest.raises(OverlapScopeError) as refused:
        read_trace(folder)
    golden("recording/too_large", str(refused.value).replace(str(tmp_path), "FOLDER"))
    with_free(monkeypatch, 1024 * MB)
    assert len(read_trace(folder).steps) == 400


def test_of_a_recording_that_does_not_fit_some_steps_can_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_recording(tmp_path / "traces", steps=200)
    read_trace(folder)  # makes its tables
    with_free(monkeypatch, MB // 4)
    assert read_trace(folder, steps=(100, 105)).steps["step"].unique().tolist() == [*range(100, 105)]
    with pytest.raises(OverlapScopeError, match="choose fewer"):
        read_trace(folder, steps=(0, 199))


def test_where_free_memory_is_unknown_everything_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with_free(monkeypatch, None)
    assert len(read_trace(write_recording(tmp_path / "traces", steps=3)).steps) == 6


def test_a_log_that_claims_to_be_huge_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_recording(tmp_path / "traces", steps=3)
    with (folder / "rank_0" / EVENTS_FILE).open("r+b") as log:
        log.truncate(100_000 * MB)  # a hole
    with_free(monkeypatch, 20_000 * MB)
    with pytest.raises(OverlapScopeError, match="takes about 586 GB of memory"):
        read_trace(folder)


def test_a_run_that_has_just_begun_takes_little(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_recording(tmp_path / "traces", ranks=4, steps=2, close=False)
    with_free(monkeypatch, 100 * MB)
    assert len(read_trace(folder).steps)


def test_tables_that_grow_beyond_the_memory_are_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_recording(tmp_path / "traces", steps=3)
    trace = read_trace(folder)
    bomb = {name: pd.DataFrame() for name in TABLES} | {"steps": pd.DataFrame({"step": np.zeros(20_000_000, "int8")})}
    fingerprint = cache.compute_fingerprint(find_rank_folders(folder))
    stored = cache.load_tables(folder, fingerprint)
    assert stored is not None
    with staging_dir(folder) as staging:
        files = cache.write_shard(staging, 0, bomb, [])
        cache.publish_tables(staging, folder, fingerprint, stored.read_unsplit(), {}, [], [], [files])
    with_free(monkeypatch, 100 * MB)
    with pytest.raises(cache.DamagedTables):
        open_recording(folder).trace()
    assert len(read_trace(folder).steps) == len(trace.steps)


def test_the_memory_that_is_free_is_a_part_of_this_machines() -> None:
    free = table_file.free_bytes()
    assert free is not None
    assert 10 * MB < free <= os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
