"""Collective logs read back: complete ones, and those of processes and disks that came to a bad end."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from overlapscope.trace.collective_log import (
    ENTRY_BYTES,
    ENTRY_DTYPE,
    REACHED,
    UNREACHED,
    CollectiveLogHeader,
    CollectiveLogWriter,
    group_file,
)
from overlapscope.trace.collective_log_reader import CollectiveLogFile, open_collective_logs
from overlapscope.trace.folders import find_rank_folders
from overlapscope.trace.schema import HEADER_BYTES, PLANS_FILE, SIGNATURES_FILE, rank_folder
from tests.ordered import all_reduce, bucket, steps, write_order


def write_log(folder: Path, entries: int, capacity: int = 16, *, close: bool = False) -> Path:
    path = folder / group_file(0)
    header = CollectiveLogHeader(name="default", ranks=(0, 1), rank=0)
    log = CollectiveLogWriter(path=path, header=header, limit_bytes=HEADER_BYTES + capacity * ENTRY_BYTES)
    for number in range(1, entries + 1):
        log.announce(1, all_reduce(), now_ns=number, step=number)
    if close:
        log.close()
    return path


def tear(path: Path, slot: int, content: bytes = bytes(4)) -> None:
    """As an entry that was being written when its process died: the number is missing."""
    with path.open("r+b") as file:
        file.seek(HEADER_BYTES + slot * ENTRY_BYTES)
        file.write(content)


def numbers(file: CollectiveLogFile) -> list[int]:
    return [int(number) for number in file.read(0, 10**6)["number"]]


@given(entries=st.integers(0, 70), capacity=st.integers(16, 24), close=st.booleans())
def test_the_latest_entries_are_there_however_often_the_ring_came_round(
    tmp_path_factory: pytest.TempPathFactory, entries: int, capacity: int, close: bool
) -> None:
    file = CollectiveLogFile(write_log(tmp_path_factory.mktemp("log"), entries, capacity, close=close))
    assert numbers(file) == list(range(max(1, entries - capacity + 1), entries + 1))
    assert file.latest == entries
    assert [int(number) for number in file.read(entries - 2, entries - 1)["number"]] == [
        number for number in (entries - 2, entries - 1) if number >= 1
    ]


@pytest.mark.parametrize("entries", [1, 5, 16, 17, 20, 32, 33, 40])
def test_an_entry_that_was_being_written_is_left_out_silently(tmp_path: Path, entries: int) -> None:
    path = write_log(tmp_path, entries)
    tear(path, entries % 16)  # the one after the latest
    file = CollectiveLogFile(path)
    kept = list(range(max(1, entries - 16 + 1), entries + 1))
    assert numbers(file) == (kept[1:] if entries >= 16 else kept)
    assert [problem for problem in file.problems if problem.severity == "error"] == []


def test_lost_entries_are_counted_and_the_others_used(tmp_path: Path) -> None:
    path = write_log(tmp_path, 12)
    for slot in (0, 1, 2, 7):
        tear(path, slot)
    file = CollectiveLogFile(path)
    assert numbers(file) == [4, 5, 6, 7, 9, 10, 11, 12]
    assert f"{path}: 4 entries are lost or damaged; the others are used" in map(str, file.problems)


def test_a_log_that_was_cut_short_gives_what_is_left_of_it(tmp_path: Path) -> None:
    path = write_log(tmp_path, 12)
    os.truncate(path, HEADER_BYTES + 5 * ENTRY_BYTES + 30)
    file = CollectiveLogFile(path)
    assert numbers(file) == [1, 2, 3, 4, 5]
    assert any("cut short at offset" in str(problem) for problem in file.problems)


@pytest.mark.parametrize("is_torn", [False, True])
def test_a_log_that_is_closed_while_it_is_opened_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, is_torn: bool
) -> None:
    path = write_log(tmp_path, 5, close=True)
    header = replace(
        CollectiveLogHeader.unpack(path.read_bytes()[:HEADER_BYTES], path), closed=False, written=None
    ).pack()
    pages = [header[:-4] + bytes(4) if is_torn else header]

    def pread(fd: int, size: int, at: int) -> bytes:
        return pages.pop() if pages and at == 0 else read(fd, size, at)

    read = os.pread
    monkeypatch.setattr(os, "pread", pread)
    file = CollectiveLogFile(path)
    assert (numbers(file), file.problems, file.header.closed) == ([1, 2, 3, 4, 5], [], True)


def test_an_open_log_is_worth_a_note(tmp_path: Path) -> None:
    (problem,) = CollectiveLogFile(write_log(tmp_path, 3)).problems
    assert (problem.severity, "not closed" in problem.message) == ("note", True)


@given(st.data())
def test_damage_anywhere_never_raises_and_never_invents_entries(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    path = write_log(tmp_path_factory.mktemp("log"), data.draw(st.integers(0, 40)))
    size = path.stat().st_size
    for _ in range(data.draw(st.integers(1, 4))):
        with path.open("r+b") as file:
            file.seek(data.draw(st.integers(HEADER_BYTES, size - 1)))
            file.write(data.draw(st.binary(min_size=1, max_size=80)))
    found = numbers(CollectiveLogFile(path))
    assert found == sorted(set(found))


def test_one_bad_log_is_named_and_the_others_are_read(tmp_path: Path) -> None:
    write_order(tmp_path, {0: steps(2), 1: steps(2), 2: steps(2)})
    (rank_folder(tmp_path, 1) / group_file(0)).write_bytes(b"nonsense")
    logs = open_collective_logs(find_rank_folders(tmp_path))
    ((files),) = logs.groups.values()
    assert sorted(files) == [0, 2]
    assert [str(problem) for problem in logs.problems] == [
        f"{rank_folder(tmp_path, 1) / group_file(0)}: not a collective log (offset 0: no OVLGROUP mark)"
    ]


def test_the_log_of_another_rank_is_left_out(tmp_path: Path) -> None:
    write_order(tmp_path, {0: steps(1), 1: steps(1)})
    stray = rank_folder(tmp_path, 1) / group_file(3)
    stray.write_bytes((rank_folder(tmp_path, 0) / group_file(0)).read_bytes())
    logs = open_collective_logs(find_rank_folders(tmp_path))
    assert [str(problem) for problem in logs.problems] == [
        f"{stray}: this is the log of rank 0, in the folder of rank 1; it is skipped"
    ]


def test_equal_signatures_of_many_ranks_are_kept_once(tmp_path: Path) -> None:
    write_order(tmp_path, {0: steps(1), 1: steps(1)})
    logs = open_collective_logs(find_rank_folders(tmp_path))
    assert logs.signatures(0)[1] is logs.signatures(1)[1]
    assert logs.signatures(0)[3] == bucket(2)


def test_a_line_of_signatures_that_was_cut_short_is_left_out(tmp_path: Path) -> None:
    write_order(tmp_path, {0: steps(1)})
    path = rank_folder(tmp_path, 0) / SIGNATURES_FILE
    path.write_text(path.read_text()[:-20])
    logs = open_collective_logs(find_rank_folders(tmp_path))
    assert sorted(logs.signatures(0)) == [1, 2]


def test_a_bucket_is_named_by_the_plan_of_any_rank(tmp_path: Path) -> None:
    unnamed = replace(bucket(1), names=())
    write_order(tmp_path, {0: [unnamed], 1: [unnamed]})
    buckets = [{"parameters": [{"name": "a"}]}, {"parameters": [{"name": "b"}, {"name": "c"}]}]
    (rank_folder(tmp_path, 0) / PLANS_FILE).write_text(json.dumps({"hash": "plan", "buckets": buckets}) + "\n")
    logs = open_collective_logs(find_rank_folders(tmp_path))
    assert logs.named(0, unnamed).names == ("b", "c")
    assert logs.named(1, unnamed).names == ("b", "c")
    assert logs.named(1, replace(unnamed, plan_hash="another")).names == ()


def write_finished_log(folder: Path, *, close: bool) -> Path:
    log = CollectiveLogWriter(folder / "group_0.log", CollectiveLogHeader(name="0", ranks=(0, 1), rank=0))
    for number in range(1, 6):
        log.announce(1, all_reduce(), now_ns=number, step=number)
        if number < 5:
            log.launched(number, 10 * number)
            log.completed(number, 100 * number, failed=number == 2)
    if close:
        log.close()
    return log.path


def flip(path: Path, number: int, offset: int) -> None:
    content = bytearray(path.read_bytes())
    content[HEADER_BYTES + (number - 1) * ENTRY_BYTES + offset] ^= 0x80
    path.write_bytes(content)


def test_an_entry_with_any_damaged_byte_is_left_out_and_noted_once(tmp_path: Path) -> None:
    path = write_finished_log(tmp_path, close=True)
    for offset in range(4, ENTRY_BYTES):
        flip(path, 3, offset)
        file = CollectiveLogFile(path)
        for _ in range(2):
            assert file.read(1, 5)["number"].tolist() == [1, 2, 4, 5], offset
        assert [str(problem) for problem in file.problems] == [
            f"{path}: entry 3 is damaged, and perhaps others; damaged entries are left out"
        ]
        flip(path, 3, offset)  # back


def test_entries_of_a_log_that_is_not_closed_are_checked_as_well(tmp_path: Path) -> None:
    path = write_finished_log(tmp_path, close=False)
    flip(path, 3, 30)
    assert CollectiveLogFile(path).read(1, 5)["number"].tolist() == [1, 2, 4, 5]


def test_a_number_that_is_damaged_is_noted(tmp_path: Path) -> None:
    path = write_finished_log(tmp_path, close=True)
    flip(path, 3, 0)
    file = CollectiveLogFile(path)
    assert file.read(1, 5)["number"].tolist() == [1, 2, 4, 5]
    assert [str(problem) for problem in file.problems if problem.severity == "error"] in (
        [f"{path}: one entry is lost or damaged; the others are used"],
        [],  # the search for the latest entry did not come by, and nobody misses it
    )


@pytest.mark.parametrize("close", [False, True])
def test_a_time_that_was_being_added_is_taken_out(tmp_path: Path, *, close: bool) -> None:
    """Its process died between the time and the check, or a Ctrl-C came there and the log was closed in the end."""
    path = write_finished_log(tmp_path, close=close)
    content = bytearray(path.read_bytes())
    at = HEADER_BYTES + 4 * ENTRY_BYTES + ENTRY_DTYPE.fields["completed_ns"][1]
    content[at : at + 8] = (77).to_bytes(8, "little")
    path.write_bytes(content)
    (latest,) = CollectiveLogFile(path).read(5, 5)
    assert (latest["number"], latest["completed_ns"], latest["announced_ns"]) == (5, 0, 5)


@pytest.mark.parametrize("flag", [REACHED, UNREACHED])
def test_so_is_what_was_being_noted_of_its_device(tmp_path: Path, flag: int) -> None:
    path = write_finished_log(tmp_path, close=False)
    content = bytearray(path.read_bytes())
    content[HEADER_BYTES + 4 * ENTRY_BYTES + ENTRY_DTYPE.fields["flags"][1]] |= flag
    path.write_bytes(content)
    (latest,) = CollectiveLogFile(path).read(5, 5)
    assert (latest["number"], latest["flags"]) == (5, 0)
