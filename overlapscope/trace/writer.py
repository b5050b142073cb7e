"""The event log of one rank: an append-only, memory-mapped file that survives the death of its process.

A stored record is in the page cache the moment ``append`` returns, so SIGKILL, SIGABRT and SIGSTOP lose nothing.
The file is sparse at its full size and its blocks are allocated ahead of use, a chunk at a time: a full disk is
met in ``reserve``, where it can be answered, and not as SIGBUS in the middle of backward.
"""

from __future__ import annotations

import itertools
import mmap
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Final

from overlapscope.errors import OverlapScopeError
from overlapscope.trace.format import HEADER_BYTES, PINNED_SHARE, RECORD, RECORD_BYTES, LogHeader

DEFAULT_LIMIT_BYTES: Final = 64 * 1024**2
"""Disk space of one rank's log unless the user says otherwise: about a million records."""

_CHUNK_RECORDS: Final = 16 * 1024
_SMALLEST_CAPACITY: Final = 64
_SEQUENCE_LOW: Final = 0xFFFFFFFF


class EventLog:
    """Fixed-size records in a memory-mapped file; when full, the newest are kept as a ring.

    ``append`` is safe to call from several threads under the GIL: the slot is drawn from an atomic counter.

    Args:
        path: the file to make; it must not exist.
        limit_bytes: the file never grows beyond this.

    Raises:
        OverlapScopeError: the file exists, or can't be made or written.
    """

    def __init__(self, path: Path, limit_bytes: int = DEFAULT_LIMIT_BYTES) -> None:
        capacity = (limit_bytes - HEADER_BYTES) // RECORD_BYTES
        if capacity < _SMALLEST_CAPACITY:
            smallest = HEADER_BYTES + _SMALLEST_CAPACITY * RECORD_BYTES
            raise OverlapScopeError(f"{path}: a log of {limit_bytes} bytes is too small; give at least {smallest}")
        self.path = path
        self._header = LogHeader(capacity_records=capacity, pinned_records=capacity // PINNED_SHARE)
        try:
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o644)
        except FileExistsError:
            raise OverlapScopeError(f"{path}: already holds a recording; move it away or record elsewhere") from None
        except OSError as error:
            raise OverlapScopeError(f"{path}: can't be made ({error.strerror})") from None
        try:
            os.ftruncate(self._fd, HEADER_BYTES + capacity * RECORD_BYTES)
            os.posix_fallocate(self._fd, 0, HEADER_BYTES)
            self._buffer = mmap.mmap(self._fd, 0)
        except (OSError, ValueError) as error:
            os.close(self._fd)
            path.unlink(missing_ok=True)
            raise OverlapScopeError(f"{path}: can't be written ({error})") from None
        self._buffer[:HEADER_BYTES] = self._header.pack()
        self._pack: Callable[..., None] = RECORD.pack_into
        self._sequence = itertools.count(1)
        self._newest = 0
        # Reentrant: a garbage collection may begin while it is held, and the pause is recorded on the same thread.
        self._lock = threading.RLock()
        self._incidents = 0
        self._allocated_records = 0
        self._straight_records = 0  # records up to here go into the slot of their number
        self._full = False
        self._allocate()
        if not self._allocated_records:
            self.close()
            path.unlink()
            raise OverlapScopeError(f"{path}: no space left on the disk for a recording")

    def append(self, body: bytes, step: int, start_ns: int, end_ns: int, end_uncertainty_ns: int = 0) -> None:
        """Store one record. The hot path: no lock, no system call, nothing kept.

        Args:
            body: what happened, from ``format.pack_body``.
            end_uncertainty_ns: the true end lies at most so long before ``end_ns``; below 2**32.
        """
        sequence = next(self._sequence)
        slot = sequence - 1 if sequence <= self._straight_records else self._slot_beyond_allocation(sequence)
        self._pack(
            self._buffer,
            HEADER_BYTES + slot * RECORD_BYTES,
            sequence & _SEQUENCE_LOW,
            start_ns,
            end_ns,
            step,
            end_uncertainty_ns,
            body,
            sequence,
        )
        if sequence > self._newest:  # another thread may have stored a newer one since this number was drawn
            self._newest = sequence

    def reserve(self) -> None:
        """Allocate disk blocks ahead of need. Called between steps, where a system call hurts nobody."""
        if not self._full and self._straight_records - self._newest < _CHUNK_RECORDS // 2:
            with self._lock:
                self._allocate()

    @property
    def newest(self) -> int:
        """Number of the newest record, from 1; 0 if there is none."""
        return self._newest

    @property
    def disk_is_full(self) -> bool:
        """The ring is smaller than asked for, because the disk had no more room."""
        return self._full and self._allocated_records < self._header.capacity_records

    @property
    def closed(self) -> bool:
        """``close`` has been called; what is appended from now on is dropped."""
        return self._buffer.closed

    @property
    def incidents(self) -> int:
        """How often ``preserve`` has been called."""
        return self._incidents

    def preserve(self, newest_records: int = 4096) -> int:
        """Copy the newest records into an ``incident_*.log`` beside this one, where no ring overwrites them.

        If the disk has no room for it, or the log is closed, there is no such file: an incident is no time to raise
        another error.

        Returns:
            The number of the incident, from 1.
        """
        with self._lock:
            self._incidents += 1
            number = self._incidents
        if self.closed:
            return number
        first = max(1, self._newest - newest_records + 1)
        records = b"".join(self._read(sequence) for sequence in range(first, self._newest + 1))
        count = len(records) // RECORD_BYTES
        header = LogHeader(capacity_records=count, pinned_records=count, written_records=count, closed=True)
        path = self.path.parent / f"incident_{number}.log"
        try:
            path.write_bytes(header.pack() + records)
        except OSError:
            path.unlink(missing_ok=True)
        return number

    def close(self) -> None:
        """Note in the header that the log is complete, and give unused disk space back. May be called twice."""
        if self.closed:
            return
        used = min(self._newest, self._allocated_records)
        closed = LogHeader(
            capacity_records=self._allocated_records if self._full else self._header.capacity_records,
            pinned_records=self._pinned,
            written_records=self._newest,
            closed=True,
        )
        # Who still appends, as a training that goes on after its recording, does not fail and allocates nothing.
        self._pack, self._straight_records = _discard, sys.maxsize
        self._buffer[:HEADER_BYTES] = closed.pack()
        self._buffer.close()
        os.ftruncate(self._fd, HEADER_BYTES + used * RECORD_BYTES)
        os.close(self._fd)

    def _allocate(self) -> None:
        """Give the next chunk of the file disk blocks, or settle for a ring within what there is."""
        capacity = self._header.capacity_records
        wanted = min(self._allocated_records + _CHUNK_RECORDS, capacity)
        begin = HEADER_BYTES + self._allocated_records * RECORD_BYTES
        try:
            os.posix_fallocate(self._fd, begin, HEADER_BYTES + wanted * RECORD_BYTES - begin)
        except OSError:
            self._full = True
        else:
            self._allocated_records = self._straight_records = wanted
            self._full = wanted == capacity

    def _slot_beyond_allocation(self, sequence: int) -> int:
        with self._lock:
            while sequence > self._straight_records and not self._full:
                self._allocate()
        return self._slot(sequence)

    def _slot(self, sequence: int) -> int:
        if sequence <= self._straight_records:
            return sequence - 1
        pinned = self._pinned
        return pinned + (sequence - 1 - pinned) % (self._allocated_records - pinned)

    @property
    def _pinned(self) -> int:
        return (self._allocated_records if self._full else self._header.capacity_records) // PINNED_SHARE

    def _read(self, sequence: int) -> bytes:
        begin = HEADER_BYTES + self._slot(sequence) * RECORD_BYTES
        return self._buffer[begin : begin + RECORD_BYTES]


def _discard(*_: object) -> None:
    """Take the place of ``RECORD.pack_into`` in a closed log."""
