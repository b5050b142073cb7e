"""The collective log of one group: what is in the file, when, and for how long."""

from __future__ import annotations

import os
import signal
import threading
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory
from zlib import adler32

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from overlapscope.errors import OverlapScopeError
from overlapscope.trace.collective_log import (
    ENTRY_BYTES,
    ENTRY_DTYPE,
    FAILED,
    REACHED,
    UNEVEN_INPUTS,
    UNREACHED,
    CollectiveLogHeader,
    CollectiveLogWriter,
    Entries,
    Signature,
    oldest_incomplete,
)
from overlapscope.trace.collective_log_reader import CollectiveLogFile
from overlapscope.trace.schema import HEADER_BYTES, add_page_checksum

HEADER = CollectiveLogHeader(name="0", ranks=(0, 1), rank=0)
BUCKET = Signature(op="all_reduce", dtype="float32", elements=10, role="bucket", plan_hash="ab", bucket=0)
LOSS = Signature(op="all_reduce", reduce_op="sum", dtype="float32", elements=1, names=("loss",))


def entries_in(path: Path) -> Entries:
    entries = np.frombuffer(path.read_bytes()[HEADER_BYTES:], dtype=ENTRY_DTYPE)
    return entries[entries["number"] > 0]


def sums(folder: Path, name: str, signatures: list[Signature], step: int = 0, flags: int = 0) -> list[int]:
    log = CollectiveLogWriter(folder / name, HEADER)
    for signature in signatures:
        log.announce(1, signature, now_ns=1, step=step, flags=flags)
    log.close()
    return [int(number) for number in entries_in(folder / name)["hash"]]


def test_an_entry_is_in_the_file_before_its_collective_is_launched(tmp_path):
    log = CollectiveLogWriter(tmp_path / "group_0.log", HEADER)
    number = log.announce(3, LOSS, now_ns=100, step=7, call_site=2, batch=5, phase=1)
    (entry,) = entries_in(tmp_path / "group_0.log")
    assert [int(entry[name]) for name in ("number", "signature", "call_site", "step", "batch", "phase")] == [
        number,
        *(3, 2, 7, 5, 1),
    ]
    assert [int(entry[name]) for name in ("announced_ns", "launched_ns", "completed_ns")] == [100, 0, 0]


@given(st.lists(st.sampled_from(["open", "over", "failed"]), max_size=20), st.integers(0, 300))
def test_the_oldest_that_is_not_over_is_found_however_far_hosts_are_ahead(states, ahead):
    with TemporaryDirectory() as folder:
        log = CollectiveLogWriter(Path(folder) / "group_0.log", HEADER)
        states = [*states, *["open"] * ahead]
        for state in states:
            number = log.announce(1, LOSS, now_ns=1, step=0)
            if state != "over":
                continue
            log.completed(number, 2)
        for number, state in enumerate(states, start=1):
            if state == "failed":
                log.completed(number, 2, failed=True)
        is_open = [state != "over" for state in states]
        expected = [is_open.index(True) + 1] if is_open and is_open[-1] else []
        assert oldest_incomplete(log)["number"].tolist() == expected
        log.close()


def test_what_was_never_seen_to_end_long_ago_is_not_what_is_waited_for(tmp_path):
    log = CollectiveLogWriter(tmp_path / "group_0.log", HEADER)
    numbers = [log.announce(1, LOSS, now_ns=1, step=0) for _ in range(200)]
    for number in numbers[1:-1]:
        log.completed(number, 2)
    assert oldest_incomplete(log)["number"].tolist() == [numbers[-1]]


@given(st.integers(1, 40), st.integers(0, 60), st.integers(0, 60))
def test_entries_are_read_also_where_the_ring_has_begun_again(announced, first, last):
    with TemporaryDirectory() as folder:
        log = CollectiveLogWriter(Path(folder) / "group_0.log", HEADER, limit_bytes=0)
        for number in range(1, announced * log.capacity // 16 + 1):
            log.announce(1, LOSS, now_ns=number, step=0)
        kept = range(max(first, 1, log.latest - log.capacity + 1), min(last, log.latest) + 1)
        assert log.read(first, last)["number"].tolist() == list(kept)
        log.close()


def test_how_far_its_device_has_come_is_added_in_place(tmp_path):
    log = CollectiveLogWriter(tmp_path / "group_0.log", HEADER)
    number = log.announce(3, LOSS, now_ns=100, step=7, flags=UNEVEN_INPUTS)
    log.seen(number, UNREACHED)
    log.seen(number, REACHED)
    log.launched(number, 110)
    (entry,) = CollectiveLogFile(tmp_path / "group_0.log").read(1, 1)
    assert entry["flags"] == UNEVEN_INPUTS | UNREACHED | REACHED
    assert [int(entry[name]) for name in ("announced_ns", "launched_ns", "completed_ns")] == [100, 110, 0]


def test_what_becomes_of_it_is_added_in_place(tmp_path):
    log = CollectiveLogWriter(tmp_path / "group_0.log", HEADER)
    first, second = (log.announce(1, LOSS, now_ns=100, step=0) for _ in range(2))
    log.launched(first, 110)
    log.completed(second, 130, failed=True)
    one, two = log.read(1, 2)
    assert (one["launched_ns"], one["completed_ns"], one["flags"]) == (110, 0, 0)
    assert (two["launched_ns"], two["completed_ns"], two["flags"]) == (0, 130, FAILED)


@given(times=st.lists(st.integers(0, 2**63 - 1), min_size=2, max_size=2), failed=st.booleans())
def test_the_check_is_that_of_the_entry_without_it(tmp_path_factory, times, failed):
    log = CollectiveLogWriter(tmp_path_factory.mktemp("log") / "group_0.log", HEADER, HEADER_BYTES + 16 * ENTRY_BYTES)
    log.announce(1, LOSS, now_ns=100, step=0)
    log.launched(1, times[0])
    log.completed(1, times[1], failed=failed)
    (entry,) = entries_in(log.path).copy()
    check, entry["check"] = int(entry["check"]), 0
    assert check == adler32(entry.tobytes()) >> 16


def test_a_full_log_keeps_the_latest_entries_and_never_touches_an_overwritten_one(tmp_path):
    log = CollectiveLogWriter(tmp_path / "group_0.log", HEADER, limit_bytes=HEADER_BYTES + 20 * ENTRY_BYTES)
    for moment in range(50):
        log.announce(1, LOSS, now_ns=moment, step=0)
    log.completed(3, 999)  # its slot holds another one by now
    assert list(log.read(1, 50)["number"]) == list(range(31, 51))
    log.close()
    kept = entries_in(tmp_path / "group_0.log")
    assert sorted(kept["number"]) == list(range(31, 51))
    assert not kept["completed_ns"].any()
    assert (tmp_path / "group_0.log").stat().st_size == HEADER_BYTES + 20 * ENTRY_BYTES


def test_sums_agree_as_long_as_entries_do(tmp_path):
    one = sums(tmp_path, "a", [LOSS, BUCKET, LOSS])
    other = sums(tmp_path, "b", [LOSS, BUCKET, BUCKET])
    assert one[:2] == other[:2]
    assert one[2] != other[2]


def test_the_step_of_a_bucket_counts_but_not_inside_join_and_not_of_the_users_own(tmp_path):
    assert sums(tmp_path, "a", [BUCKET], step=1) != sums(tmp_path, "b", [BUCKET], step=2)
    assert sums(tmp_path, "c", [BUCKET], 1, UNEVEN_INPUTS) == sums(tmp_path, "d", [BUCKET], 2, UNEVEN_INPUTS)
    assert sums(tmp_path, "e", [LOSS], step=1) == sums(tmp_path, "f", [LOSS], step=2)


def test_names_have_a_sum_of_their_own(tmp_path):
    accuracy = Signature(op="all_reduce", reduce_op="sum", dtype="float32", elements=1, names=("accuracy",))
    assert sums(tmp_path, "a", [LOSS]) == sums(tmp_path, "b", [accuracy])
    assert entries_in(tmp_path / "a")["names_hash"] != entries_in(tmp_path / "b")["names_hash"]


kinds = st.builds(
    Signature,
    op=st.sampled_from(["all_reduce", "broadcast", "barrier"]),
    dtype=st.sampled_from(["float32", "int64"]),
    elements=st.integers(0, 3),
    peer=st.sampled_from([None, 0, 1]),
    bucket=st.integers(-1, 1),
)


@given(st.lists(kinds, max_size=8), st.lists(kinds, max_size=8))
def test_two_histories_of_equal_length_have_equal_sums_only_if_they_are_equal(tmp_path_factory, one, other):
    folder = tmp_path_factory.mktemp("sums")
    end, length = -1, min(len(one), len(other))
    here, there = sums(folder, "a", one[:length]), sums(folder, "b", other[:length])
    are_equal = [s.hash for s in one[:length]] == [s.hash for s in other[:length]]
    assert (here[end:] == there[end:]) == are_equal


def test_several_threads_may_announce_at_once(tmp_path):
    log = CollectiveLogWriter(tmp_path / "group_0.log", HEADER)

    def announce() -> None:
        for _ in range(500):
            log.announce(1, LOSS, now_ns=1, step=0)

    threads = [threading.Thread(target=announce) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    entries = log.read(1, 2000)
    assert list(entries["number"]) == list(range(1, 2001))
    assert log.hash == entries["hash"][-1]


def _die(path: str) -> None:
    log = CollectiveLogWriter(Path(path), HEADER)
    log.announce(1, LOSS, now_ns=1, step=0)
    os.kill(os.getpid(), signal.SIGKILL)


def test_entries_survive_the_death_of_the_process(tmp_path):
    process = get_context("spawn").Process(target=_die, args=(str(tmp_path / "group_0.log"),))
    process.start()
    process.join(30)
    assert process.exitcode == -signal.SIGKILL
    assert len(entries_in(tmp_path / "group_0.log")) == 1


def page_text(page: bytes) -> bytes:
    return page[36 : 36 + int.from_bytes(page[32:36], "little")]


def with_text(page: bytes, text: bytes) -> bytes:
    """The page of a header with another text, as of one who knows how to compute its checksum."""
    return add_page_checksum((page[:32] + len(text).to_bytes(4, "little") + text).ljust(HEADER_BYTES, b"\0"))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda page: page[:100], "cut short at offset 100"),
        (lambda page: b"x" + page[1:], "not a collective log"),
        (lambda page: page[:8] + b"\x09" + page[9:], "upgrade overlapscope"),
        (lambda page: page[:40] + b"\xff" + page[41:], "damaged header"),
        (lambda page: page[:12] + b"\0\0\0\0" + page[16:], "corrupt header"),
        (lambda page: with_text(page, b"[" * 3000), "corrupt header"),
        (lambda page: with_text(page, page_text(page).replace(b"[0,1]", b"[0,1e999]")), "corrupt header"),
    ],
)
def test_a_header_that_is_no_header_is_refused_with_a_sentence(tmp_path, damage, message):
    with pytest.raises(OverlapScopeError, match=message):
        CollectiveLogHeader.unpack(damage(HEADER.pack()), tmp_path / "group_0.log")
    assert CollectiveLogHeader.unpack(HEADER.pack(), tmp_path) == HEADER


def test_a_world_that_is_too_large_to_be_one_has_no_ranks(tmp_path):
    text = page_text(HEADER.pack()).replace(b'"ranks":[0,1],"world":2', b'"ranks":null,"world":1000000000000')
    assert CollectiveLogHeader.unpack(with_text(HEADER.pack(), text), tmp_path).ranks == ()
