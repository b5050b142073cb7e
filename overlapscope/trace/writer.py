"""Event log of one rank: an append-only file that survives the death of its process."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Final
from zlib import crc32

from overlapscope.errors import OverlapScopeError
from overlapscope.trace.format import CHECKED_RECORD, HEADER_BYTES, PINNED_SHARE, RECORD, RECORD_BYTES, LogHeader
from overlapscope.trace.ring_log import RingLog

DEFAULT_LIMIT_BYTES: Final = 64 * 1024**2
"""Default size of one rank's log: about a million records."""

_SMALLEST_CAPACITY: Final = 64
_FIRST_OFFSET: Final = HEADER_BYTES - RECORD_BYTES  # because records are numbered from 1


class EventLogWriter(RingLog):
    """Writer of fixed-size records; when the log is full, the first steps and a ring of the latest records are kept.

    ``append`` is safe to call from several threads under the GIL: the slot is drawn from an atomic counter.

    Args:
        path: the file to create; it must not exist.
        limit_bytes: maximum size of the file.

    Raises:
        OverlapScopeError: the file exists, or can't be created or written.
    """

    slot_bytes = RECORD_BYTES
    chunk_slots = 16 * 1024

    def __init__(self, path: Path, limit_bytes: int = DEFAULT_LIMIT_BYTES) -> None:
        capacity = (limit_bytes - HEADER_BYTES) // RECORD_BYTES
        if capacity < _SMALLEST_CAPACITY:
            smallest = HEADER_BYTES + _SMALLEST_CAPACITY * RECORD_BYTES
            raise OverlapScopeError(f"{path}: a log of {limit_bytes} bytes is too small; give at least {smallest}")
        self._pack: Callable[..., bytes] = RECORD.pack
        self._store: Callable[..., None] = CHECKED_RECORD.pack_into
        self._sequence = itertools.count(1)
        self._incidents = 0
        super().__init__(path, capacity)

    def append(self, body: bytes, step: int, start_ns: int, end_ns: int, end_uncertainty_ns: int = 0) -> None:
        """Store one record. The hot path: no lock, no system call, no allocation kept.

        Args:
            body: description of the event, from ``format.pack_body``.
            end_uncertainty_ns: the true end is at most this long before ``end_ns``; below 2**32.
        """
        sequence = next(self._sequence)
        record = self._pack(start_ns, end_ns, step, end_uncertainty_ns, body, sequence)
        self._store(
            self._buffer,
            _FIRST_OFFSET + sequence * RECORD_BYTES if sequence <= self._allocated else self._make_room(sequence),
            crc32(record),
            record,
        )
        if sequence > self.latest:  # another thread may have stored a later one since this number was drawn
            self.latest = sequence

    def reserve(self) -> None:
        """Allocate disk blocks ahead of need. Called between steps, where a system call does no harm."""
        if self._allocated < min(self.latest + self.chunk_slots // 2, self.capacity):
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

    def close(self) -> None:
        """Mark the log as complete in its header, and free unused disk space. May be called twice."""
        # Later calls of ``append``, as when training continues after the recording, do nothing and allocate nothing.
        self._store, self._allocated = _discard, sys.maxsize
        super().close()

    @property
    def _pinned(self) -> int:
        return self.capacity // PINNED_SHARE

    def _header(self, *, closed: bool) -> bytes:
        return LogHeader(
            capacity_records=self.capacity,
            pinned_records=self._pinned,
            written_records=self.latest if closed else 0,
            closed=closed,
        ).pack()

    def _read(self, sequence: int) -> bytes:
        begin = self._offset(sequence)
        return self._buffer[begin : begin + RECORD_BYTES]


def _discard(*_: object) -> None:
    """Do nothing, in place of ``CHECKED_RECORD.pack_into`` of a closed log."""
