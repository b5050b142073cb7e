"""Event log of one rank: an append-only file that survives the death of its process, and its readers.

Readers return complete records only, in the order they were written.
"""

from __future__ import annotations

import itertools
import mmap
import os
import sys
from collections.abc import Callable
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, Final
from zlib import crc32

import numpy as np
import numpy.typing as npt

from overlapscope.errors import NotClosed, OverlapScopeError, Problem
from overlapscope.text import count_of
from overlapscope.trace.regular_file import open_regular_file, parse_once
from overlapscope.trace.ring_log import RingLog, SlotStore, find_last_in_order, read_header_and_size
from overlapscope.trace.schema import (
    CHECKED_RECORD,
    DEFAULT_LIMIT_BYTES,
    DTYPES,
    HEADER_BYTES,
    OPS,
    PINNED_SHARE,
    RECORD,
    RECORD_BYTES,
    RECORD_FIELDS,
    Kind,
    LogHeader,
    Phase,
)

_SMALLEST_CAPACITY: Final = 64
_FIRST_OFFSET: Final = HEADER_BYTES - RECORD_BYTES  # because records are numbered from 1


class RecordStore(SlotStore):
    """Writer of records. ``append`` may be called from several threads: its slot is drawn from an atomic counter."""

    def __init__(self, buffer: mmap.mmap, make_room: Callable[[int], int]) -> None:
        super().__init__(buffer, make_room)
        self._pack: Callable[..., bytes] = RECORD.pack
        self._store: Callable[..., None] = CHECKED_RECORD.pack_into
        self._sequence = itertools.count(1)

    def append(self, body: bytes, step: int, start_ns: int, end_ns: int, end_uncertainty_ns: int = 0) -> None:
        """Store one record. The hot path: no lock, no system call, no allocation kept.

        Args:
            body: description of the event, from ``schema.pack_body``.
            end_uncertainty_ns: the true end is at most this long before ``end_ns``; below 2**32.
        """
        sequence = next(self._sequence)
        record = self._pack(start_ns, end_ns, step, end_uncertainty_ns, body, sequence)
        self._store(
            self._buffer,
            _FIRST_OFFSET + sequence * RECORD_BYTES if sequence <= self.allocated else self._make_room(sequence),
            crc32(record),
            record,
        )
        if sequence > self.latest:  # another thread may have stored a later one since this number was drawn
            self.latest = sequence

    def close(self) -> None:
        """Release the buffer. What is stored from now on is discarded, and allocates nothing."""
        self._store, self.allocated = _discard, sys.maxsize
        super().close()


class EventLogWriter(RingLog[RecordStore]):
    """Writer of fixed-size records; when the log is full, the first steps and a ring of the latest records are kept.

    Args:
        path: the file to create; it must not exist.
        limit_bytes: maximum size of the file.
        make_store: ``RecordStore``, or its twin in C.

    Raises:
        OverlapScopeError: the file exists, or can't be created or written.
    """

    slot_bytes = RECORD_BYTES
    chunk_slots = 16 * 1024

    def __init__(
        self, path: Path, limit_bytes: int = DEFAULT_LIMIT_BYTES, make_store: type[RecordStore] = RecordStore
    ) -> None:
        capacity = (limit_bytes - HEADER_BYTES) // RECORD_BYTES
        if capacity < _SMALLEST_CAPACITY:
            smallest = HEADER_BYTES + _SMALLEST_CAPACITY * RECORD_BYTES
            raise OverlapScopeError(f"{path}: a log of {limit_bytes} bytes is too small; give at least {smallest}")
        self._incidents = 0
        super().__init__(path, capacity, make_store)
        self.append = self.store.append
        """See ``RecordStore.append``."""

    def reserve(self) -> None:
        """Allocate disk blocks ahead of need. Called between steps, where a system call does no harm."""
        if self.store.allocated < min(self.latest + self.chunk_slots // 2, self.capacity):
            with self._lock:
                self._allocate()

    @property
    def incidents(self) -> int:
        """Return how often ``preserve`` was called."""
        return self._incidents

    def preserve(self, record_count: int = 4096) -> int:
        """Copy the latest records into an ``incident_*.log`` next to this log, where no ring overwrites them.

        If the disk has no room for it, or the log is closed, there is no such file: during an incident no further error
        must be raised.

        Returns:
            The number of the incident, from 1.
        """
        with self._lock:
            self._incidents += 1
            number = self._incidents
        if self.closed:
            return number
        first = max(1, self.latest - record_count + 1)
        records = b"".join(self._read(sequence) for sequence in range(first, self.latest + 1))
        count = len(records) // RECORD_BYTES
        header = LogHeader(capacity_records=count, pinned_records=count, written_records=count, closed=True)
        path = self.path.parent / f"incident_{number}.log"
        try:
            path.write_bytes(header.pack() + records)
        except OSError:
            path.unlink(missing_ok=True)
        return number

    def _pinned_of(self, capacity: int) -> int:
        return capacity // PINNED_SHARE

    def _header(self, *, closed: bool) -> bytes:
        return LogHeader(
            capacity_records=self.capacity,
            pinned_records=self.store.pinned,
            written_records=self.latest if closed else 0,
            closed=closed,
        ).pack()

    def _read(self, sequence: int) -> bytes:
        begin = self._offset(sequence)
        return self._buffer[begin : begin + RECORD_BYTES]


def _discard(*_: object) -> None:
    """Do nothing, in place of ``CHECKED_RECORD.pack_into`` of a closed log."""


_CHECKSUM_BYTES: Final = 4
"""Number of bytes at the beginning of a record that hold the CRC of the rest."""
_WORD: Final = np.dtype("<u2")
_WORDS: Final = RECORD_BYTES // _WORD.itemsize
_FIRST_WORD: Final = _CHECKSUM_BYTES // _WORD.itemsize
_FEW_RECORDS: Final = 64
"""Number of records below which ``zlib`` is quicker than tables."""
_BLOCK_RECORDS: Final = 8192
"""Number of records per block, whose words stay in a processor's caches."""


def compute_record_checksums(records: npt.NDArray[Any]) -> npt.NDArray[np.uint32]:
    """Compute the CRC-32 of each record of ``RECORD_BYTES`` without its leading checksum, shape (N,).

    ``zlib`` would compute them one by one. For messages of one length, the contribution of a bit to the CRC does not
    depend on the other bits: ``crc(a ^ b) = crc(a) ^ crc(b) ^ crc(0)``. So the CRC of a record is the XOR of one number
    per word, from a table by position and value of the word. Of a few records ``zlib`` is quicker.
    """
    if len(records) < _FEW_RECORDS:
        rows = np.ascontiguousarray(records).view(f"V{RECORD_BYTES}").ravel()
        return np.array([crc32(row.tobytes()[_CHECKSUM_BYTES:]) for row in rows], dtype=np.uint32)
    words = np.ascontiguousarray(records).view(_WORD).reshape(-1, _WORDS)
    checksums = np.full(len(words), _crc_of_zeros(), dtype=np.uint32)
    tables = _tables() if len(words) else ()
    for begin in range(0, len(words), _BLOCK_RECORDS):
        some = checksums[begin : begin + _BLOCK_RECORDS]
        columns = np.ascontiguousarray(words[begin : begin + _BLOCK_RECORDS, _FIRST_WORD:].T)
        for table, column in zip(tables, columns, strict=True):
            some ^= table.take(column)
    return checksums


def _crc_of_zeros() -> int:
    return crc32(bytes(RECORD_BYTES - _CHECKSUM_BYTES))


@lru_cache(maxsize=1)
def _tables() -> npt.NDArray[np.uint32]:
    """Return the contribution to the CRC of each word, shape (words, values of a word).

    A value with several bits set is combined from smaller ones: the entry of 0b101 is that of 0b100 XOR that of 0b001.
    """
    bits = 8 * _WORD.itemsize
    tables = np.zeros((_WORDS - _FIRST_WORD, 1 << bits), dtype=np.uint32)
    for bit in range(bits):
        for index, table in enumerate(tables):
            message = bytearray(RECORD_BYTES - _CHECKSUM_BYTES)
            message[index * _WORD.itemsize + bit // 8] = 1 << bit % 8
            table[1 << bit : 2 << bit] = table[: 1 << bit] ^ np.uint32(crc32(message) ^ _crc_of_zeros())
    return tables


RECORD_DTYPE: Final = np.dtype([(name, kind) for name, kind in RECORD_FIELDS])
"""Numpy type of a record."""

Records = npt.NDArray[Any]
"""A structured array of ``RECORD_DTYPE``."""

_HIGHEST_SEQUENCE: Final = 2**40
"""Higher sequence numbers are treated as damage: at 1,000 records a second they take 35 years."""

_PROBE_RECORDS: Final = 16
"""Number of records read to find a complete one: the latest may be half written, and if several threads write, its
neighbors too."""

_LIVE_RECORDS: Final = 250_000
"""Number of the latest records of all ranks that are read of a running recording: reading them takes about a second."""
_MIN_RECORDS_PER_RANK: Final = 2_000
"""Minimum number of those of each rank."""

_MAX_HOLE_RECORDS: Final = 1024
"""Length of a run of zero slots that marks the end of a log: more than a lost page holds, or threads are apart."""


def read_log(path: Path) -> tuple[LogHeader, Records, list[Problem]]:
    """Read one event log.

    Returns:
        The header, the complete records sorted by sequence number, and the problems with the file.

    Raises:
        OverlapScopeError: nothing of the file can be read (missing, not a log, a newer format, no header).
    """
    try:
        with open_regular_file(path) as file:
            header, size = read_header_and_size(file.fileno(), path, LogHeader.unpack)
            slots = _read_slots(file.fileno(), 0, _slots_to_read(file.fileno(), header, size))
    except OSError as error:
        raise OverlapScopeError(f"{path}: can't be read ({error.strerror})") from None

    problems: list[Problem] = []
    is_whole = is_complete(slots)
    known = is_whole & _is_known(slots)
    records = _sort_by_sequence(slots, known)

    # One record may be half written at the moment of death. More than one, or one of an unknown kind, is damage.
    damaged = np.flatnonzero(_is_used(slots) & ~known)
    torn_at_death = len(damaged) == 1 and not header.closed and not is_whole[damaged[0]]
    if len(damaged) and not torn_at_death:
        offset = HEADER_BYTES + int(damaged[0]) * RECORD_BYTES
        problems.append(_report_damage(path, len(damaged), f"at offset {offset}"))
    problems += _missing_records(path, header, size, records, len(slots), len(damaged))
    return header, records, problems


def count_record_bytes(path: Path) -> int:
    """Return the size of the part of a log that holds records; 0 if unreadable. Files of open logs are larger."""
    return parse_once("bytes of records", path, partial(_count_record_bytes, path))


def _count_record_bytes(path: Path) -> int:
    try:
        with open_regular_file(path) as file:
            header, size = read_header_and_size(file.fileno(), path, LogHeader.unpack)
            return RECORD_BYTES * _slots_to_read(file.fileno(), header, size)
    except (OSError, OverlapScopeError):
        return 0


def read_latest_step(path: Path) -> int | None:
    """Return the latest step of a recording, cheaply enough to poll while it runs; None before its first record."""
    latest = read_latest_records(path, _PROBE_RECORDS)
    return int(latest["step"][-1]) if len(latest) else None


def read_step_bounds(path: Path) -> list[int]:
    """Return the first step that is still in a log and the latest one; an empty list if there is none."""
    latest = read_latest_step(path)
    try:
        with open_regular_file(path) as file:
            read_header_and_size(file.fileno(), path, LogHeader.unpack)
            first = _read_slots(file.fileno(), 0, _PROBE_RECORDS)
    except (OSError, OverlapScopeError):
        return []
    begun = first["step"][_is_used(first)]
    return [] if latest is None or not len(begun) else [min(int(begun.min()), latest), latest]


def is_closed(path: Path) -> bool:
    """Return whether a log was closed, as at the end of its process."""
    try:
        with open_regular_file(path) as file:
            return read_header_and_size(file.fileno(), path, LogHeader.unpack)[0].closed
    except (OSError, OverlapScopeError):
        return False


def read_log_position(path: Path) -> tuple[int, int]:
    """Return the size in bytes and the latest sequence number, which grows with every record; (0, 0) if unreadable."""
    try:
        size = path.stat().st_size
    except OSError:
        return 0, 0
    latest = read_latest_records(path, _PROBE_RECORDS)
    return size, int(latest["sequence"][-1]) if len(latest) else 0


def live_record_limit(ranks: int) -> int:
    """Return how many of the latest records of each rank to read of a running recording, however long it is."""
    return max(_MIN_RECORDS_PER_RANK, _LIVE_RECORDS // max(1, ranks))


def read_latest_records(
    path: Path, count: int, problems: list[Problem] | None = None, *, is_over: bool = False
) -> Records:
    """Read the latest complete records of a log, in order, without reading the others; empty if there are none.

    Args:
        problems: receives problems with these records.
        is_over: true if nothing more will be written.
    """
    problems = [] if problems is None else problems
    try:
        with open_regular_file(path) as file:
            fd, page = file.fileno(), file.read(HEADER_BYTES)
            if not any(page) and not is_over:  # just created, and its header is about to be written
                return np.empty(0, dtype=RECORD_DTYPE)
            header, size = read_header_and_size(fd, path, LogHeader.unpack)
            used = _used_slots(fd, size)
            begin = header.pinned_records
            if used <= begin or _sequence_at(fd, begin) == begin + 1:
                slots = _read_slots(fd, max(0, used - count), used)
            else:
                end = find_last_in_order(partial(_sequence_at, fd), begin, used) + 1
                latest = _read_slots(fd, max(begin, end - count), end)
                slots = np.concatenate([_read_slots(fd, max(end, used - count + len(latest)), used), latest])
    except FileNotFoundError:
        return np.empty(0, dtype=RECORD_DTYPE)
    except (OSError, OverlapScopeError) as error:
        text = str(error) if isinstance(error, OverlapScopeError) else f"{path}: can't be read ({error.strerror})"
        problems.append(Problem("error", text))
        return np.empty(0, dtype=RECORD_DTYPE)
    known = is_complete(slots) & _is_known(slots)
    damaged = int((_is_used(slots) & ~known).sum())
    if damaged > (0 if header.closed else 1):  # one may be half written at the moment of death, or just now
        problems.append(_report_damage(path, damaged, "near the end"))
    return _sort_by_sequence(slots, known)


def _slots_to_read(fd: int, header: LogHeader, size: int) -> int:
    return max(0, (size - HEADER_BYTES) // RECORD_BYTES if header.closed else _used_slots(fd, size))


def _report_damage(path: Path, records: int, where: str) -> Problem:
    what = f"one record is damaged, {where}" if records == 1 else f"{records} records are damaged, the first {where}"
    return Problem("error", f"{path}: {what}; {'it is' if records == 1 else 'they are'} skipped")


def _sequence_at(fd: int, slot: int) -> int:
    return int.from_bytes(os.pread(fd, 8, HEADER_BYTES + (slot + 1) * RECORD_BYTES - 8), "little")


def _read_slots(fd: int, first: int, end: int) -> Records:
    data = os.pread(fd, (end - first) * RECORD_BYTES, HEADER_BYTES + first * RECORD_BYTES)
    return np.frombuffer(data[: len(data) // RECORD_BYTES * RECORD_BYTES], dtype=RECORD_DTYPE)


def _used_slots(fd: int, size: int) -> int:
    """Return the number of slots up to the last used one, by bisection, because the rest of an open log is zeros.

    A bisection may end at a hole of zeros instead (a page that was lost), so slots are checked after it until there are
    ``_MAX_HOLE_RECORDS`` zero slots in a row.
    """
    total = max(0, size - HEADER_BYTES) // RECORD_BYTES
    used, end = 0, total
    while used < end:
        middle = (used + end) // 2
        if any(os.pread(fd, RECORD_BYTES, HEADER_BYTES + middle * RECORD_BYTES)):
            used = middle + 1
        else:
            end = middle
    while used < total:
        ahead = _read_slots(fd, used, min(used + _MAX_HOLE_RECORDS, total))
        begun = np.flatnonzero(_is_used(ahead))
        if not len(begun):
            break
        used += int(begun[-1]) + 1
    return used


def _sort_by_sequence(slots: Records, known: npt.NDArray[np.bool_]) -> Records:
    """Return the known records sorted by sequence number; without copying in the common case that they already are."""
    records = slots if known.all() else slots[known]
    sequence = records["sequence"]
    is_in_order = bool((sequence[1:] > sequence[:-1]).all())
    return records if is_in_order else records[np.argsort(sequence, kind="stable")]


def _is_used(slots: Records) -> npt.NDArray[np.bool_]:
    return (slots["sequence"] != 0) | (slots["crc32"] != 0)


def is_complete(slots: Records) -> npt.NDArray[np.bool_]:
    """Return which slots hold a record that was written to its end, and not changed since."""
    is_written = (slots["sequence"] != 0) & (slots["sequence"] <= _HIGHEST_SEQUENCE)
    return is_written & (slots["crc32"] == compute_record_checksums(slots))


def _is_known(slots: Records) -> npt.NDArray[np.bool_]:
    """Return whether every number in these records has a meaning."""
    kind = slots["kind"]
    is_phase = (kind == Kind.PHASE_BEGIN) | (kind == Kind.PHASE)
    known_phase = ~is_phase | (slots["index"] <= max(Phase))
    in_range = (kind >= min(Kind)) & (kind <= max(Kind)) & (slots["op"] < len(OPS)) & (slots["dtype"] < len(DTYPES))
    return in_range & known_phase


def _missing_records(
    path: Path, header: LogHeader, size: int, records: Records, slots: int, damaged: int
) -> list[Problem]:
    """Return problems with records that the header or the sequence numbers imply and the file lacks."""
    kept = len(records)
    promised = min(header.written_records, header.capacity_records) if header.closed else header.capacity_records
    if size < HEADER_BYTES + promised * RECORD_BYTES:
        shown = (
            "the one complete record before it is used"
            if kept == 1
            else f"the {kept} complete records before it are used"
        )
        return [Problem("error", f"{path}: cut short at offset {size}; {shown}")]
    problems: list[Problem] = []
    if not header.closed:
        message = f"{path}: not closed; its process was killed or is running"
        problems.append(NotClosed("note", message))
    if not kept:
        return problems
    is_incident = header.pinned_records == header.capacity_records
    first, latest = int(records["sequence"][0]) if is_incident else 1, int(records["sequence"][-1])
    lost = latest - first + 1 - kept - damaged
    if latest > slots and not is_incident:
        lost_ones = f"{count_of(lost, 'record')} between the first and the latest steps overwritten"
        problems.append(Problem("note", f"{path}: at its size limit; {lost_ones}"))
    elif lost > (0 if header.closed else 1):
        # One may be missing at death: its number was assigned, and another thread's record was written before it.
        problems.append(Problem("error", f"{path}: {count_of(lost, 'record')} missing; the others are used"))
    return problems


def serialize_event_log(records: Records) -> bytes:
    """Serialize a closed event log that holds these records, for recordings made without a training run."""
    count = len(records)
    written = records.copy()
    written["crc32"] = compute_record_checksums(written)
    header = LogHeader(capacity_records=count, pinned_records=count, written_records=count, closed=True)
    return header.pack() + written.tobytes()
