"""Random-access reader of one collective log file.

The latest entry is found by bisection, because entry numbers go up by one from slot to slot, except where the ring
wraps around. Only a log in which this does not hold, because part of it is lost, is read completely.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import numpy as np

from overlapscope.errors import OverlapScopeError
from overlapscope.trace.entry_check import verify_entries
from overlapscope.trace.format import FIRST_VERSION_WITH_CHECKSUMS, HEADER_BYTES
from overlapscope.trace.group_log import ENTRY_BYTES, ENTRY_DTYPE, CollectiveLogHeader, Entries
from overlapscope.trace.log import Problem
from overlapscope.trace.ring_header import read_header_and_size

_PROBED_ENTRIES: Final = 1024
"""Number of slots checked after the latest entry: entries there mean that some before them are lost."""


class CollectiveLogFile:
    """Collective log of one group on one rank, as a file.

    Args:
        path: the file; it may be written to at the same time.
        problems: receives problems with the file, also those found when entries are read.

    Raises:
        OverlapScopeError: the file can't be read, or not as a collective log.
    """

    def __init__(self, path: Path, problems: list[Problem] | None = None) -> None:
        self.path = path
        self.problems: list[Problem] = [] if problems is None else problems
        self._has_damage = False
        try:
            with self._opened() as fd:
                self.header, size = read_header_and_size(fd, path, CollectiveLogHeader.unpack)
                self._capacity = self.header.capacity
                self._slots = min(max(0, size - HEADER_BYTES) // ENTRY_BYTES, self._capacity)
                self.oldest, self.latest = self._range(fd)
        except OSError as error:
            raise OverlapScopeError(f"{path}: can't be read ({error.strerror})") from None
        if not self.header.closed:
            self.problems.append(Problem("note", f"{path}: not closed; its process was killed or is running"))
            if self._slots < self._capacity:
                self.problems.append(Problem("error", f"{path}: cut short at offset {size}; what is left is used"))
        elif self.header.written is not None and self.latest != self.header.written:
            text = f"{path}: {self.header.written} entries were written, and only those up to {self.latest} are left"
            self.problems.append(Problem("error", text))

    def read(self, first: int, last: int) -> Entries:
        """Read the complete entries with the numbers ``first`` to ``last`` that are still there, in order."""
        first, last = max(first, self.oldest), min(last, self.latest)
        if first > last:
            return np.empty(0, dtype=ENTRY_DTYPE)
        begin = (first - 1) % self._capacity
        of_ring = min(last - first + 1, self._capacity - begin)
        try:
            with self._opened() as fd:
                parts = [self._read_valid(fd, begin, first, of_ring)]
                if first + of_ring <= last:
                    parts.append(self._read_valid(fd, 0, first + of_ring, last - first + 1 - of_ring))
        except OSError:
            return np.empty(0, dtype=ENTRY_DTYPE)
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    @contextmanager
    def _opened(self) -> Iterator[int]:
        fd = os.open(self.path, os.O_RDONLY)
        try:
            yield fd
        finally:
            os.close(fd)

    def _read_valid(self, fd: int, slot: int, first: int, count: int) -> Entries:
        """Read entries from a slot on, without those that are damaged or have unexpected numbers."""
        entries = self._read_slots(fd, slot, slot + count)
        is_in_place = entries["number"] == np.arange(first, first + len(entries))
        entries = entries if is_in_place.all() else entries[is_in_place]
        if self.header.version < FIRST_VERSION_WITH_CHECKSUMS:
            return entries
        entries, is_intact = verify_entries(entries)
        if is_intact.all():
            return entries
        if not self._has_damage:
            self._has_damage = True
            number = int(entries["number"][~is_intact][0])
            text = f"{self.path}: entry {number} is damaged, and perhaps others; damaged entries are left out"
            self.problems.append(Problem("error", text))
        return entries[is_intact]

    def _read_slots(self, fd: int, begin: int, end: int) -> Entries:
        data = os.pread(fd, max(0, end - begin) * ENTRY_BYTES, HEADER_BYTES + begin * ENTRY_BYTES)
        return np.frombuffer(data[: len(data) // ENTRY_BYTES * ENTRY_BYTES], dtype=ENTRY_DTYPE)

    def _range(self, fd: int) -> tuple[int, int]:
        """Find the numbers of the oldest and the latest entry; 1 and 0 if the log is empty.

        Example: a ring of 4 slots holds the numbers 9, 10, 7, 8. Slot 1 holds 9 + 1, slot 2 does not hold 9 + 2, so the
        latest entry is 10, and the oldest is 10 - 4 + 1 = 7, in the slot after it.
        """
        first = self._number_at(fd, 0)
        if (first - 1) % max(1, self._capacity):
            return self._find_range_damaged(fd)
        low, high = 0, self._slots
        while high - low > 1:
            middle = (low + high) // 2
            if self._number_at(fd, middle) == first + middle:
                low = middle
            else:
                high = middle
        latest = first + low
        ahead = self._read_slots(fd, low + 1, min(low + 1 + _PROBED_ENTRIES, self._slots))["number"]
        is_first_round = first == 1
        if is_first_round:
            return self._find_range_damaged(fd) if ahead.any() else (1, latest)
        # After the latest entry come the oldest of the ring, the first of which may be about to be overwritten.
        oldest = latest - self._capacity + 1
        if len(ahead) and ahead[0] == 0:
            oldest += 1
            ahead = ahead[1:]
        expected = oldest + np.arange(len(ahead))
        return (oldest, latest) if (ahead == expected).all() else self._find_range_damaged(fd)

    def _number_at(self, fd: int, slot: int) -> int:
        return int.from_bytes(os.pread(fd, 4, HEADER_BYTES + slot * ENTRY_BYTES), "little")

    def _find_range_damaged(self, fd: int) -> tuple[int, int]:
        """Find the numbers of the oldest and the latest entry that are in their own slots, in a damaged log."""
        number = self._read_slots(fd, 0, self._slots)["number"].astype(np.int64)
        slots = np.arange(len(number))
        used = number != 0
        in_place = used & ((number - 1) % max(1, self._capacity) == slots)
        if not in_place.any():
            if used.any():
                self.problems.append(Problem("error", f"{self.path}: none of its entries is where it belongs"))
            return 1, 0
        latest = int(number[in_place].max())
        oldest = max(1, latest - self._capacity + 1)
        kept = number[in_place & (number >= oldest)]
        lost, misplaced = latest - oldest + 1 - len(kept), int((used & ~in_place).sum())
        # One may be missing while the process runs, or since its death: it was being written.
        if lost > (0 if self.header.closed else 1) or misplaced:
            count = max(lost, misplaced)
            what = "one entry is" if count == 1 else f"{count} entries are"
            self.problems.append(Problem("error", f"{self.path}: {what} lost or damaged; the others are used"))
        return int(kept.min()), latest
