"""Slots of one size behind a header page, in a memory-mapped file that survives the death of its process.

What is stored is in the page cache at once, so SIGKILL, SIGABRT and SIGSTOP lose nothing. The file is sparse at its
full size and its blocks are allocated ahead of use, a chunk at a time: a full disk is met in ``posix_fallocate``, where
it can be answered with a smaller ring, and not as SIGBUS in the middle of backward.
"""

from __future__ import annotations

import mmap
import os
import threading
from abc import ABC, abstractmethod
from pathlib import Path
from typing import ClassVar

from overlapscope.errors import OverlapScopeError
from overlapscope.trace.format import HEADER_BYTES


class RingLog(ABC):
    """The file. Numbers of what is stored go up from 1; when it is full, the first stay and the newest are a ring.

    Args:
        path: the file to make; it must not exist.
        capacity: slots, if the disk has room for them.

    Raises:
        OverlapScopeError: the file exists, or can't be made or written.
    """

    slot_bytes: ClassVar[int]
    chunk_slots: ClassVar[int]
    """Allocated at a time."""

    def __init__(self, path: Path, capacity: int) -> None:
        self.path = path
        self.newest = 0
        """Number of the newest that is stored; 0 before the first."""
        self.capacity = capacity
        """Slots in the file when it is full; fewer once the disk has no room for more."""
        self._wanted = capacity
        self._straight = 0
        """Up to this number the slots are allocated, and the slot is that of the number."""
        # Reentrant: a garbage collection may begin while it is held, and the pause is recorded on the same thread.
        self._lock = threading.RLock()
        self._fd, self._buffer = _make(path, HEADER_BYTES + capacity * self.slot_bytes)
        self._allocate()
        if not self._straight:
            self._buffer.close()
            os.close(self._fd)
            path.unlink()
            raise OverlapScopeError(f"{path}: no space left on the disk for a recording")
        self._write_header()

    @property
    def closed(self) -> bool:
        """``close`` has been called; what is stored from now on is dropped."""
        return self._buffer.closed

    @property
    def disk_is_full(self) -> bool:
        """The ring is smaller than asked for, because the disk had no more room."""
        return self.capacity < self._wanted

    def close(self) -> None:
        """Note in the header that the log is complete, and give unused disk space back. May be called twice."""
        with self._lock:
            if self.closed:
                return
            self._write_header(closed=True)
            self._buffer.close()
            os.ftruncate(self._fd, HEADER_BYTES + min(self.newest, self.capacity) * self.slot_bytes)
            os.close(self._fd)

    def forget(self) -> None:
        """In a forked process: the file stays its parent's, and what is written here goes nowhere."""
        self._lock = threading.RLock()  # another thread of the parent's may have held it
        self._buffer, self._straight = mmap.mmap(-1, len(self._buffer)), self.capacity

    @property
    def _pinned(self) -> int:
        """The first slots, which the ring never overwrites."""
        return 0

    @abstractmethod
    def _header(self, *, closed: bool) -> bytes:
        """The header page as it is to be now."""

    def _write_header(self, *, closed: bool = False) -> None:
        self._buffer[:HEADER_BYTES] = self._header(closed=closed)

    def _offset(self, number: int) -> int:
        """Where a number is stored."""
        slot = number - 1
        if number > self._straight:
            slot = self._pinned + (slot - self._pinned) % (self.capacity - self._pinned)
        return HEADER_BYTES + slot * self.slot_bytes

    def _make_room(self, number: int) -> int:
        """The same of a number that is about to be stored and may need disk blocks first."""
        with self._lock:
            while self._straight < min(number, self.capacity):
                self._allocate()
        return self._offset(number)

    def _allocate(self) -> None:
        """Give the next chunk disk blocks, or settle for a ring within what there is."""
        wanted = min(self._straight + self.chunk_slots, self.capacity)
        begin = HEADER_BYTES + self._straight * self.slot_bytes
        try:
            os.posix_fallocate(self._fd, begin, (wanted - self._straight) * self.slot_bytes)
        except OSError:
            self.capacity = self._straight
            if self._straight:
                self._write_header()
        else:
            self._straight = wanted


def _make(path: Path, size: int) -> tuple[int, mmap.mmap]:
    """The file, sparse but for its header, and its memory."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o644)
    except FileExistsError:
        raise OverlapScopeError(f"{path}: already holds a recording; move it away or record elsewhere") from None
    except OSError as error:
        raise OverlapScopeError(f"{path}: can't be created ({error.strerror})") from None
    try:
        os.ftruncate(fd, size)
        os.posix_fallocate(fd, 0, HEADER_BYTES)
        return fd, mmap.mmap(fd, 0)
    except (OSError, ValueError) as error:
        os.close(fd)
        path.unlink(missing_ok=True)
        raise OverlapScopeError(f"{path}: can't be written ({error})") from None
