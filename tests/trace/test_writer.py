"""The writer: nothing stored is lost but what the ring overwrites, and a full disk is survived."""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path

import pytest

from overlapscope.errors import OverlapScopeError
from overlapscope.trace.event_log import EventLogWriter, read_log
from overlapscope.trace.schema import RECORD_BYTES
from tests.trace.logs import PHASE_BEGIN, append_numbered, bytes_for, make_log


def sequences(path: Path) -> list[int]:
    _, records, _ = read_log(path)
    return records["sequence"].tolist()


def test_records_come_back_in_the_order_they_were_written(tmp_path: Path) -> None:
    make_log(tmp_path / "log", 100)
    header, records, problems = read_log(tmp_path / "log")
    assert problems == []
    assert (header.closed, header.written_records) == (True, 100)
    numbers = list(range(1, 101))
    assert records["sequence"].tolist() == records["start_ns"].tolist() == records["step"].tolist() == numbers
    assert records["end_ns"].tolist() == [number + 5 for number in numbers]
    assert set(records["end_uncertainty_ns"]) == {3}


def test_a_record_is_readable_at_once_by_someone_else(tmp_path: Path) -> None:
    log = EventLogWriter(tmp_path / "log")
    for number in range(1, 4):
        append_numbered(log, 1, first=number)
        assert sequences(log.path) == list(range(1, number + 1))


def test_a_full_ring_keeps_the_first_steps_and_the_newest(tmp_path: Path) -> None:
    make_log(tmp_path / "log", 1000, capacity=80)
    kept = sequences(tmp_path / "log")
    assert kept == [*range(1, 11), *range(931, 1001)]
    assert (tmp_path / "log").stat().st_size == bytes_for(80)


@pytest.mark.parametrize("count", [79, 80, 81, 150, 151])
def test_the_ring_wraps_without_losing_its_neighbors(tmp_path: Path, count: int) -> None:
    make_log(tmp_path / "log", count, capacity=80)
    expected = range(1, count + 1) if count <= 80 else [*range(1, 11), *range(count - 69, count + 1)]
    assert sequences(tmp_path / "log") == list(expected)


def test_closing_gives_unused_space_back_and_may_happen_twice(tmp_path: Path) -> None:
    log = make_log(tmp_path / "log", 3, capacity=10_000)
    log.close()
    assert log.closed
    assert log.path.stat().st_size == bytes_for(3)


def test_the_file_never_outgrows_its_limit(tmp_path: Path) -> None:
    limit = bytes_for(20_000) + 17
    log = EventLogWriter(tmp_path / "log", limit)
    append_numbered(log, 50_000)
    log.reserve()
    assert log.path.stat().st_blocks * 512 <= limit + 4096
    log.close()
    assert log.path.stat().st_size <= limit


def test_reserving_ahead_allocates_before_the_space_is_needed(tmp_path: Path) -> None:
    log = EventLogWriter(tmp_path / "log")
    before = log.path.stat().st_blocks
    append_numbered(log, 10_000)
    assert log.path.stat().st_blocks == before
    log.reserve()
    assert log.path.stat().st_blocks > before


def test_several_threads_append_without_losing_a_record(tmp_path: Path) -> None:
    threads, each = 6, 4000
    log = EventLogWriter(tmp_path / "log", bytes_for(threads * each))
    switch_interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        workers = [
            threading.Thread(target=append_numbered, args=(log, each), kwargs={"first": 1 + worker * each})
            for worker in range(threads)
        ]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
    finally:
        sys.setswitchinterval(switch_interval)
    log.close()
    _, records, problems = read_log(log.path)
    assert problems == []
    assert records["sequence"].tolist() == list(range(1, threads * each + 1))
    assert sorted(records["start_ns"].tolist()) == list(range(1, threads * each + 1))


def test_a_thread_that_stores_late_does_not_hide_a_newer_record(tmp_path: Path) -> None:
    """Thread A draws number 1, thread B draws and stores 2, then A stores: closing must keep both."""
    log = EventLogWriter(tmp_path / "log")
    store, overtaken = log._store, False

    def overtaking_store(*args: object) -> None:
        nonlocal overtaken
        if not overtaken:
            overtaken = True
            log.append(PHASE_BEGIN, 2, 2, 2)
        store(*args)

    log._store = overtaking_store
    log.append(PHASE_BEGIN, 1, 1, 1)
    log.close()
    header, records, problems = read_log(log.path)
    assert (header.written_records, problems) == (2, [])
    assert records["step"].tolist() == [1, 2]


def test_an_incident_survives_the_ring(tmp_path: Path) -> None:
    log = EventLogWriter(tmp_path / "events.log", bytes_for(80))
    append_numbered(log, 200)
    assert log.preserve(record_count=20) == 1
    append_numbered(log, 500, first=201)
    assert log.preserve(record_count=5) == 2
    log.close()
    assert 190 not in sequences(log.path)
    assert sequences(tmp_path / "incident_1.log") == list(range(181, 201))
    assert sequences(tmp_path / "incident_2.log") == list(range(696, 701))
    assert read_log(tmp_path / "incident_1.log")[2] == []


def test_an_incident_on_a_full_disk_raises_nothing_and_leaves_no_half_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = make_log(tmp_path / "events.log", 10, close=False)

    def full(path: Path, data: bytes) -> int:
        path.open("wb").write(data[:100])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    log.preserve()
    assert not (tmp_path / "incident_1.log").exists()


def test_after_the_end_nothing_is_recorded_and_nothing_raised(tmp_path: Path) -> None:
    log = make_log(tmp_path / "events.log", 10)
    append_numbered(log, 5, first=11)
    log.preserve()
    assert sequences(log.path) == list(range(1, 11))
    assert not (tmp_path / "incident_1.log").exists()


def test_a_full_disk_makes_a_smaller_ring_that_keeps_the_newest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk is replaced by one with room for 40,000 records: a real one this full needs root to set up."""
    room = bytes_for(40_000)
    fallocate = os.posix_fallocate

    def allocate(fd: int, offset: int, length: int) -> None:
        if offset + length > room:
            raise OSError(28, "No space left on device")
        fallocate(fd, offset, length)

    monkeypatch.setattr(os, "posix_fallocate", allocate)
    log = EventLogWriter(tmp_path / "log", bytes_for(100_000))
    assert not log.is_disk_full
    append_numbered(log, 90_000)
    assert log.is_disk_full
    chunks = 2 * 16 * 1024
    for closed in (False, True):
        if closed:
            log.close()
        kept = sequences(log.path)
        assert len(kept) == chunks
        assert kept[: chunks // 8] == list(range(1, chunks // 8 + 1))
        assert kept[chunks // 8 :] == list(range(90_001 - (chunks - chunks // 8), 90_001))
    header, _, problems = read_log(log.path)
    assert (header.capacity_records, header.pinned_records) == (chunks, chunks // 8)
    assert [problem.severity for problem in problems] == ["note"]
    assert log.path.stat().st_size == bytes_for(chunks)


@pytest.mark.parametrize("limit_bytes", [0, 4096, bytes_for(64) - 1])
def test_a_limit_without_room_for_a_step_is_an_error(tmp_path: Path, limit_bytes: int) -> None:
    with pytest.raises(OverlapScopeError, match=f"give at least {4096 + 64 * RECORD_BYTES}"):
        EventLogWriter(tmp_path / "log", limit_bytes)
    assert not (tmp_path / "log").exists()


def test_a_folder_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(OverlapScopeError, match="can't be created"):
        EventLogWriter(tmp_path / "missing" / "log")
