"""Ring log: fixed-size slots after a header page, in a memory-mapped file that survives the death of its process.

Stored data is in the page cache at once, so SIGKILL, SIGABRT and SIGSTOP lose nothing. The file is sparse at its full
size and its blocks are allocated ahead of use, a chunk at a time: so a full disk shows as an error of
``posix_fallocate``, where the ring can be made smaller, and not as SIGBUS in the middle of backward.
"""

from __future__ import annotations

import mmap
import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import ClassVar, Generic, Protocol, TypeVar

from overlapscope.errors import OverlapScopeError
from overlapscope.trace.schema import HEADER_BYTES


class RingHeader(Protocol):
    """Common interface of the headers of event logs and collective logs."""

    @property
    def closed(self) -> bool:
        """Return whether the log is complete and truncated to its content."""

    @property
    def full_bytes(self) -> int:
        """Return the size of the file until it is closed."""


Header = TypeVar("Header", bound=RingHeader)


def read_header_and_size(fd: int, path: Path, unpack: Callable[[bytes, Path], Header]) -> tuple[Header, int]:
    """Read the header and the file's size, consistently.

    Both are read again if they don't match: the log may just have been closed, which changes one after the other.

    Args:
        fd: descriptor of the open file.
        unpack: parses a header from the first page.

    Raises:
        OverlapScopeError: the page is not a valid header.
    """
    with suppress(OverlapScopeError):
        header, size = unpack(os.pread(fd, HEADER_BYTES, 0), path), os.fstat(fd).st_size
        if header.closed or size >= header.full_bytes:
            return header, size
    return unpack(os.pread(fd, HEADER_BYTES, 0), path), os.fstat(fd).st_size


def find_last_in_order(number_at: Callable[[int], int], first: int, end: int) -> int:
    """Return the last slot of a ring up to which numbers go up by one from slot to slot, by bisection.

    Example: slots 2 to 7 hold the numbers 9, 10, 5, 6, 7, 8. The numbers go up by one as far as slot 3, which holds the
    latest item; the oldest is in the slot after it.

    Args:
        number_at: reads the number in a slot.
        first: first slot of the ring.
        end: slot after the last one that is used.
    """
    number, low, high = number_at(first), first, end
    while high - low > 1:
        middle = (low + high) // 2
        if number_at(middle) == number + middle - first:
            low = middle
        else:
            high = middle
    return low


class SlotStore:
    """Writer of slots in a mapped buffer. What is derived from it has a twin in C, see ``instrumented_ddp.native``.

    Args:
        buffer: the mapped file, with its header.
        make_room: returns the file offset of an item that is beyond what is allocated.
    """

    def __init__(self, buffer: mmap.mmap, make_room: Callable[[int], int]) -> None:
        self._buffer: mmap.mmap | None = buffer
        self._make_room = make_room
        self.latest = 0
        """Number of the latest item; 0 before the first."""
        self.capacity = 0
        """Number of slots in the file when it is full; reduced once the disk is full."""
        self.allocated = 0
        """Number up to which slots are allocated, and item n is in slot n - 1 without wrapping around."""
        self.pinned = 0
        """Number of first slots that the ring never overwrites."""

    def replace_buffer(self, buffer: mmap.mmap) -> None:
        """Store in another buffer from now on."""
        self._buffer = buffer

    def close(self) -> None:
        """Release the buffer. What is stored from now on is discarded, and allocates nothing."""
        self._buffer = None


Store = TypeVar("Store", bound=SlotStore)


class RingLog(ABC, Generic[Store]):
    """Log of numbered items, from 1; once the file is full, the first items stay and the rest is a ring of the latest.

    Args:
        path: the file to create; it must not exist.
        capacity: number of slots, if the disk has room for them.
        make_store: type of the store.

    Raises:
        OverlapScopeError: the file exists, or can't be created or written.
    """

    slot_bytes: ClassVar[int]
    chunk_slots: ClassVar[int]
    """Number of slots allocated at a time."""

    def __init__(
        self, path: Path, capacity: int, make_store: Callable[[mmap.mmap, Callable[[int], int]], Store]
    ) -> None:
        self.path = path
        self._requested_capacity = capacity
        # Reentrant: a garbage collection may begin while it is held, and the pause is recorded on the same thread.
        self._lock = threading.RLock()
        self._fd, self._buffer = _make(path, HEADER_BYTES + capacity * self.slot_bytes)
        self.store = make_store(self._buffer, self._make_room)
        """Writer of the slots."""
        self._set_capacity(capacity)
        self._allocate()
        if not self.store.allocated:
            self.store.close()
            self._buffer.close()
            os.close(self._fd)
            path.unlink()
            raise OverlapScopeError(f"{path}: no space left on the disk for a recording")
        self._write_header()

    @property
    def latest(self) -> int:
        """Return the number of the latest item; 0 before the first."""
        return self.store.latest

    @property
    def capacity(self) -> int:
        """Return the number of slots in the file when it is full; reduced once the disk is full."""
        return self.store.capacity

    @property
    def closed(self) -> bool:
        """Return whether ``close`` has been called; items stored from now on are dropped."""
        return self._buffer.closed

    @property
    def is_disk_full(self) -> bool:
        """Return whether the ring is smaller than requested, because the disk is full."""
        return self.capacity < self._requested_capacity

    def close(self) -> None:
        """Mark the log as complete in its header, and free unused disk space. May be called twice."""
        self.store.close()
        with self._lock:
            if self.closed:
                return
            self._write_header(closed=True)
            self._buffer.close()
            os.ftruncate(self._fd, HEADER_BYTES + min(self.latest, self.capacity) * self.slot_bytes)
            os.close(self._fd)

    def discard(self) -> None:
        """Detach a forked process from the file, which stays its parent's: items stored here are discarded."""
        self._lock = threading.RLock()  # another thread of the parent may have held it
        self._buffer = mmap.mmap(-1, len(self._buffer))
        self.store.replace_buffer(self._buffer)
        self.store.allocated = self.capacity

    def _pinned_of(self, capacity: int) -> int:  # noqa: ARG002
        """Return the number of first slots that a ring of this capacity never overwrites."""
        return 0

    def _set_capacity(self, capacity: int) -> None:
        self.store.capacity, self.store.pinned = capacity, self._pinned_of(capacity)

    @abstractmethod
    def _header(self, *, closed: bool) -> bytes:
        """Return the current header page."""

    def _write_header(self, *, closed: bool = False) -> None:
        self._buffer[:HEADER_BYTES] = self._header(closed=closed)

    def _offset(self, number: int) -> int:
        """Return the file offset of the item with this number.

        Example: with 16 slots, of which 2 are pinned, item 16 is in slot 15, and item 17 wraps around to slot 2 + (16 -
        2) % 14 = 2.
        """
        slot = number - 1
        if number > self.store.allocated:
            pinned = self.store.pinned
            slot = pinned + (slot - pinned) % (self.capacity - pinned)
        return HEADER_BYTES + slot * self.slot_bytes

    def _make_room(self, number: int) -> int:
        """Return the file offset of an item that is about to be stored, after allocating disk blocks if needed."""
        with self._lock:
            while self.store.allocated < min(number, self.capacity) and not self.closed:
                self._allocate()
        return self._offset(number)

    def _allocate(self) -> None:
        """Allocate disk blocks for the next chunk, or reduce the ring to the allocated slots if the disk is full."""
        store = self.store
        wanted = min(store.allocated + self.chunk_slots, store.capacity)
        begin = HEADER_BYTES + store.allocated * self.slot_bytes
        try:
            os.posix_fallocate(self._fd, begin, (wanted - store.allocated) * self.slot_bytes)
        except OSError:
            self._set_capacity(store.allocated)
            if store.allocated:
                self._write_header()
        else:
            store.allocated = wanted


def _make(path: Path, size: int) -> tuple[int, mmap.mmap]:
    """Create the file, sparse except for its header, and map it into memory."""
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
