"""The event log: nothing stored is lost but what the ring overwrites, and damage costs only what it hits."""

from __future__ import annotations

import os
import struct
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from zlib import crc32

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from overlapscope.errors import OverlapScopeError, Problem
from overlapscope.trace.event_log import (
    RECORD_DTYPE,
    EventLogWriter,
    Records,
    compute_record_checksums,
    read_latest_records,
    read_latest_step,
    read_log,
    read_log_position,
)
from overlapscope.trace.schema import HEADER_BYTES, RECORD_BYTES
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


def test_a_full_ring_keeps_the_first_steps_and_the_latest(tmp_path: Path) -> None:
    make_log(tmp_path / "log", 1000, capacity=80)
    kept = sequences(tmp_path / "log")
    assert kept == [*range(1, 11), *range(931, 1001)]
    assert (tmp_path / "log").stat().st_size == bytes_for(80)


@pytest.mark.parametrize("count", [79, 80, 81, 150, 151])
def test_the_ring_wraps_without_losing_its_neighbors(tmp_path: Path, count: int) -> None:
    make_log(tmp_path / "log", count, capacity=80)
    expected = range(1, count + 1) if count <= 80 else [*range(1, 11), *range(count - 69, count + 1)]
    assert sequences(tmp_path / "log") == list(expected)


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
    store, overtaken = log.store._store, False

    def overtaking_store(*args: object) -> None:
        nonlocal overtaken
        if not overtaken:
            overtaken = True
            log.append(PHASE_BEGIN, 2, 2, 2)
        store(*args)

    log.store._store = overtaking_store
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


@pytest.mark.parametrize("limit_bytes", [0, 4096, bytes_for(64) - 1])
def test_a_limit_without_room_for_a_step_is_an_error(tmp_path: Path, limit_bytes: int) -> None:
    with pytest.raises(OverlapScopeError, match=f"give at least {4096 + 64 * RECORD_BYTES}"):
        EventLogWriter(tmp_path / "log", limit_bytes)
    assert not (tmp_path / "log").exists()


def test_a_folder_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(OverlapScopeError, match="can't be created"):
        EventLogWriter(tmp_path / "missing" / "log")


def image(records: int, *, capacity: int, close: bool) -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "log"
        make_log(path, records, capacity=capacity, close=close)
        return path.read_bytes()


IMAGES = {
    "closed": image(40, capacity=80, close=True),
    "not closed": image(40, capacity=80, close=False),
    "closed ring": image(200, capacity=80, close=True),
    "ring that is not closed": image(200, capacity=80, close=False),
}


def put(folder: Path, content: bytes) -> Path:
    path = folder / "events.log"
    path.write_bytes(content)
    return path


def spoil(content: bytes, record: int, replacement: bytes, at: int = 0) -> bytes:
    begin = HEADER_BYTES + record * RECORD_BYTES + at
    return content[:begin] + replacement + content[begin + len(replacement) :]


@pytest.mark.parametrize("name", IMAGES)
@given(data=st.data())
def test_a_log_cut_at_any_byte_gives_whole_records_or_one_clear_line(name: str, data: st.DataObject) -> None:
    content = IMAGES[name]
    length = data.draw(st.integers(0, len(content) - 1))
    with tempfile.TemporaryDirectory() as folder:
        path = put(Path(folder), content[:length])
        try:
            _, records, problems = read_log(path)
        except OverlapScopeError as error:
            refusal = str(error)
            assert length < HEADER_BYTES
            assert refusal.startswith(f"{path}: ")
            return
        whole = {record for record in range(80) if bytes_for(record + 1) <= length}
        assert len(records) <= len(whole)
        # Every record of this log tells its own number three times over.
        assert records["start_ns"].tolist() == records["step"].tolist() == records["sequence"].tolist()
        assert any(problem.severity == "error" and f"at offset {length}" in str(problem) for problem in problems)


@pytest.mark.parametrize("name", IMAGES)
@given(data=st.data())
def test_a_flipped_sequence_number_costs_that_record_only(name: str, data: st.DataObject) -> None:
    whole = IMAGES[name]
    slots = 40 if "ring" not in name else 80
    slot = data.draw(st.integers(0, slots - 1))
    with tempfile.TemporaryDirectory() as folder:
        intact = read_log(put(Path(folder), whole))[1]
        path = put(Path(folder), spoil(whole, slot, b"\xff\xff\xff", at=RECORD_BYTES - 3))
        _, records, problems = read_log(path)
        assert len(records) == len(intact) - 1
        assert set(records["sequence"]) < set(intact["sequence"])
        said = [str(problem) for problem in problems if problem.severity == "error"]
        if "not closed" in name:
            assert said == []  # as death leaves it: one record torn
        else:
            assert len(said) == 1
            assert said[0].startswith(f"{path}: one record is damaged")
            assert f"at offset {bytes_for(slot)};" in said[0]


@given(st.binary(min_size=1, max_size=2000), st.integers(0, 79))
def test_garbage_among_the_records_never_raises(garbage: bytes, record: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = put(Path(folder), spoil(IMAGES["ring that is not closed"], record, garbage))
        _, records, _ = read_log(path)
        assert len(records) >= 80 - (len(garbage) // RECORD_BYTES + 2)


def test_a_record_of_a_kind_that_is_not_known_is_damage(tmp_path: Path) -> None:
    path = put(tmp_path, spoil(IMAGES["closed"], 7, b"\xc8", at=28))
    _, records, problems = read_log(path)
    assert 8 not in records["sequence"]
    assert [problem.severity for problem in problems] == ["error"]


def test_a_page_of_zeros_within_a_log_hides_nothing_after_it(
    tmp_path: Path, golden: Callable[[str, str], None]
) -> None:
    """As a file system may leave it after a power cut."""
    path = tmp_path / "events.log"
    make_log(path, 500, capacity=1000, close=False)
    path.write_bytes(spoil(path.read_bytes(), 200, bytes(4096)))
    _, records, problems = read_log(path)
    assert records["sequence"].tolist() == [*range(1, 201), *range(265, 501)]
    (error,) = [problem.message for problem in problems if problem.severity == "error"]
    assert error.startswith(f"{path}: 64 records missing")
    golden("recording/missing_records", error.replace(str(tmp_path), "FOLDER"))


def test_what_the_ring_dropped_is_a_note_not_an_error(tmp_path: Path) -> None:
    _, _, problems = read_log(put(tmp_path, IMAGES["closed ring"]))
    assert [(problem.severity, "120 records" in str(problem)) for problem in problems] == [("note", True)]


@pytest.mark.parametrize("is_torn", [False, True])
def test_a_log_that_is_closed_while_it_is_opened_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, is_torn: bool
) -> None:
    path = put(tmp_path, IMAGES["closed"])
    page = IMAGES["not closed"][:HEADER_BYTES]
    pages = [page[:-4] + bytes(4) if is_torn else page]

    def pread(fd: int, size: int, at: int) -> bytes:
        return pages.pop() if pages and at == 0 else read(fd, size, at)

    read = os.pread
    monkeypatch.setattr(os, "pread", pread)
    header, records, problems = read_log(path)
    assert (header.closed, len(records), problems) == (True, 40, [])


def test_a_log_that_was_not_closed_is_a_note(tmp_path: Path) -> None:
    _, records, problems = read_log(put(tmp_path, IMAGES["not closed"]))
    assert len(records) == 40
    assert [problem.severity for problem in problems] == ["note"]
    assert "not closed" in str(problems[0])


def test_a_missing_log_is_one_clear_line(tmp_path: Path) -> None:
    with pytest.raises(OverlapScopeError, match=r"events.log: can't be read \(No such file"):
        read_log(tmp_path / "events.log")


@pytest.mark.parametrize("count", [1, 2, 79, 80, 81, 200])
def test_the_latest_step_and_position_follow_the_log_through_its_ring(tmp_path: Path, count: int) -> None:
    log = EventLogWriter(tmp_path / "log", bytes_for(80))
    assert (read_latest_step(log.path), read_log_position(log.path)) == (None, (bytes_for(80), 0))
    append_numbered(log, count)
    assert (read_latest_step(log.path), read_log_position(log.path)) == (count, (bytes_for(80), count))


def test_the_latest_step_of_a_ring_is_found_without_the_checksums_of_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = make_log(tmp_path / "log", 5000, capacity=3000, close=False).path
    checked: list[int] = []

    def counted(records: Records) -> npt.NDArray[np.uint32]:
        checked.append(len(records))
        return compute_record_checksums(records)

    monkeypatch.setattr("overlapscope.trace.event_log.compute_record_checksums", counted)
    assert read_latest_step(path) == 5000
    assert sum(checked) < 100
    content = bytearray(path.read_bytes())
    content[content.index(struct.pack("<qq", 5000, 5005))] ^= 1  # its times
    path.write_bytes(content)
    assert read_latest_step(path) == 4999


def test_a_record_with_any_damaged_byte_is_left_out_and_noted(
    tmp_path: Path, golden: Callable[[str, str], None]
) -> None:
    offset = HEADER_BYTES + 20 * RECORD_BYTES
    for at in range(RECORD_BYTES):
        content = bytearray(IMAGES["closed"])
        content[offset + at] ^= 0x10
        path = put(tmp_path, bytes(content))
        _, records, problems = read_log(path)
        assert records["start_ns"].tolist() == [number for number in range(1, 41) if number != 21], at
        assert f"at offset {offset};" in problems[0].message
        noted: list[Problem] = []
        assert len(read_latest_records(path, 40, noted)) == 39
        golden("recording/damaged_record", "\n".join(map(str, [*problems, *noted])).replace(str(tmp_path), "FOLDER"))


def test_a_damaged_header_is_one_clear_line(tmp_path: Path) -> None:
    content = bytearray(IMAGES["closed"])
    content[2000] ^= 1
    path = put(tmp_path, bytes(content))
    with pytest.raises(OverlapScopeError, match=r"events.log: damaged header \(its checksum is wrong\)"):
        read_log(path)


def test_the_latest_step_of_a_log_that_is_not_there_yet(tmp_path: Path) -> None:
    assert read_latest_step(tmp_path / "log") is None
    assert read_log_position(tmp_path / "log") == (0, 0)


@given(content=st.binary(min_size=RECORD_BYTES, max_size=20 * RECORD_BYTES))
def test_they_are_those_of_zlib(content: bytes) -> None:
    records = np.frombuffer(content[: len(content) // RECORD_BYTES * RECORD_BYTES], dtype=RECORD_DTYPE)
    assert compute_record_checksums(records).tolist() == [crc32(record.tobytes()[4:]) for record in records]


@pytest.mark.parametrize("count", [0, 1, 8192, 8193, 20_000])
def test_of_any_number_of_records(count: int) -> None:
    records = np.zeros(count, dtype=RECORD_DTYPE)
    records["sequence"] = np.arange(count)
    assert compute_record_checksums(records).tolist() == [crc32(record.tobytes()[4:]) for record in records]


def test_records_need_not_lie_side_by_side() -> None:
    records = np.zeros(100, dtype=RECORD_DTYPE)
    records["sequence"] = np.arange(100)
    assert compute_record_checksums(records[::7]).tolist() == compute_record_checksums(records)[::7].tolist()
