"""Damaged entries of a collective log are left out; a time that was being added is no damage."""

from __future__ import annotations

from pathlib import Path

import pytest

from overlapscope.trace.collective_log import (
    ENTRY_BYTES,
    ENTRY_DTYPE,
    REACHED,
    UNREACHED,
    CollectiveLogHeader,
    CollectiveLogWriter,
)
from overlapscope.trace.collective_log_reader import CollectiveLogFile
from overlapscope.trace.schema import HEADER_BYTES
from tests.ordered import all_reduce


def write_log(folder: Path, *, close: bool) -> Path:
    log = CollectiveLogWriter(folder / "group_0.log", CollectiveLogHeader(name="0", ranks=(0, 1), rank=0))
    for number in range(1, 6):
        log.announce(1, all_reduce(), now_ns=number, step=number)
        if number < 5:
            log.launched(number, 10 * number)
            log.completed(number, 100 * number, failed=number == 2)
    if close:
        log.close()
    return log.path


def flip(path: Path, number: int, place: int) -> None:
    content = bytearray(path.read_bytes())
    content[HEADER_BYTES + (number - 1) * ENTRY_BYTES + place] ^= 0x80
    path.write_bytes(content)


@pytest.mark.parametrize("place", range(4, ENTRY_BYTES))
def test_an_entry_with_a_damaged_byte_is_left_out_and_noted_once(tmp_path: Path, place: int) -> None:
    path = write_log(tmp_path, close=True)
    flip(path, 3, place)
    file = CollectiveLogFile(path)
    for _ in range(2):
        assert file.read(1, 5)["number"].tolist() == [1, 2, 4, 5]
    assert [str(problem) for problem in file.problems] == [
        f"{path}: entry 3 is damaged, and perhaps others; damaged entries are left out"
    ]


def test_entries_of_a_log_that_is_not_closed_are_checked_as_well(tmp_path: Path) -> None:
    path = write_log(tmp_path, close=False)
    flip(path, 3, 30)
    assert CollectiveLogFile(path).read(1, 5)["number"].tolist() == [1, 2, 4, 5]


def test_a_number_that_is_damaged_is_noted(tmp_path: Path) -> None:
    path = write_log(tmp_path, close=True)
    flip(path, 3, 0)
    file = CollectiveLogFile(path)
    assert file.read(1, 5)["number"].tolist() == [1, 2, 4, 5]
    assert [str(problem) for problem in file.problems if problem.severity == "error"] in (
        [f"{path}: one entry is lost or damaged; the others are used"],
        [],  # the search for the newest entry did not come by, and nobody misses it
    )


@pytest.mark.parametrize("close", [False, True])
def test_a_time_that_was_being_added_is_taken_out(tmp_path: Path, *, close: bool) -> None:
    """Its process died between the time and the check, or a Ctrl-C came there and the log was closed in the end."""
    path = write_log(tmp_path, close=close)
    content = bytearray(path.read_bytes())
    at = HEADER_BYTES + 4 * ENTRY_BYTES + ENTRY_DTYPE.fields["completed_ns"][1]
    content[at : at + 8] = (77).to_bytes(8, "little")
    path.write_bytes(content)
    (latest,) = CollectiveLogFile(path).read(5, 5)
    assert (latest["number"], latest["completed_ns"], latest["announced_ns"]) == (5, 0, 5)


@pytest.mark.parametrize("flag", [REACHED, UNREACHED])
def test_so_is_what_was_being_noted_of_its_device(tmp_path: Path, flag: int) -> None:
    path = write_log(tmp_path, close=False)
    content = bytearray(path.read_bytes())
    content[HEADER_BYTES + 4 * ENTRY_BYTES + ENTRY_DTYPE.fields["flags"][1]] |= flag
    path.write_bytes(content)
    (latest,) = CollectiveLogFile(path).read(5, 5)
    assert (latest["number"], latest["flags"]) == (5, 0)
