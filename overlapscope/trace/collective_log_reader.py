"""Collective logs of all ranks of a recording: the groups, and random access to their entries.

Groups of different ranks are the same if their names and members are, whatever the numbers of their files.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar

import numpy as np
import numpy.typing as npt

from overlapscope.errors import NotClosed, OverlapScopeError, Problem
from overlapscope.trace.collective_log import (
    ENTRY_BYTES,
    ENTRY_DTYPE,
    FAILED,
    REACHED,
    UNREACHED,
    CollectiveLogHeader,
    Entries,
    ProcessGroup,
    Signature,
)
from overlapscope.trace.folders import has_finished_recording
from overlapscope.trace.json_files import from_dict, read_lines
from overlapscope.trace.regular_file import match_files, open_descriptor, open_regular_file
from overlapscope.trace.ring_log import find_last_in_order, read_header_and_size
from overlapscope.trace.schema import (
    CALL_SITES_FILE,
    GROUP_PATTERN,
    HEADER_BYTES,
    NO_BUCKET,
    PLANS_FILE,
    POINT_TO_POINT_PATTERN,
    SIGNATURES_FILE,
)

T = TypeVar("T")

_ADLER: Final = 65521
_CHECK_AT: Final = int(ENTRY_DTYPE.fields["check"][1])  # type: ignore[index]
_WEIGHTS: Final = np.arange(ENTRY_BYTES, 0, -1, dtype=np.float32)
"""Weight of each byte of an entry in the upper half of its Adler-32: its distance from the end. The upper half is the
weighted sum plus the number of bytes (bytes 3, 5: 2 * 3 + 1 * 5 + 2 = 13); below 2**24, so exact as float32."""
_WEIGHTS[_CHECK_AT : _CHECK_AT + 2] = 0
_UNFINISHED_UPDATES: Final = (
    (("completed_ns",), FAILED),
    (("launched_ns",), 0),
    (("completed_ns", "launched_ns"), FAILED),
    ((), REACHED),
    ((), UNREACHED),
)
"""Times and flags that may have been added to an entry since its check was last updated."""


def verify_entries(entries: Entries) -> tuple[Entries, npt.NDArray[np.bool_]]:
    """Return the entries in their last consistent state, and a mask of those that are intact; at once, for long logs.

    A process may die, be interrupted, or be read by others between an addition to an entry and the update of its check:
    such an addition is undone.
    """
    is_intact = _is_intact(entries)
    if is_intact.all():
        return entries, is_intact
    entries = entries.copy()
    for times, flag in _UNFINISHED_UPDATES:
        damaged = np.flatnonzero(~is_intact)
        before = entries[damaged]
        for name in times:
            before[name] = 0
        before["flags"] &= ~np.uint8(flag)
        is_undone = _is_intact(before)
        entries[damaged[is_undone]], is_intact[damaged[is_undone]] = before[is_undone], True
    return entries, is_intact


def _is_intact(entries: Entries) -> npt.NDArray[np.bool_]:
    is_intact: npt.NDArray[np.bool_] = compute_entry_checks(entries) == entries["check"]
    return is_intact


def compute_entry_checks(entries: Entries) -> npt.NDArray[np.uint16]:
    """Compute the check of each entry from its other fields, shape (N,)."""
    data = np.frombuffer(entries.tobytes(), dtype=np.uint8).reshape(-1, ENTRY_BYTES)
    sums = (data.astype(np.float32) @ _WEIGHTS).astype(np.int64)
    return ((sums + ENTRY_BYTES) % _ADLER).astype(np.uint16)


_PROBED_ENTRIES: Final = 1024
"""Number of slots checked after the latest entry: entries there mean that some before them are lost."""


class CollectiveLogFile:
    """Collective log of one group on one rank, as a file with random access.

    The latest entry is found by bisection, because entry numbers go up by one from slot to slot, except where the ring
    wraps around. Only a log in which this does not hold, because part of it is lost, is read completely.

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
        self.is_end_lost = False
        """True if there may have been later entries: the file is cut short, damaged, or its last entry incomplete."""
        try:
            with self._opened() as fd:
                self.header, size = read_header_and_size(fd, path, CollectiveLogHeader.unpack)
                self._capacity = self.header.capacity
                self._slots = min(max(0, size - HEADER_BYTES) // ENTRY_BYTES, self._capacity)
                self.oldest, self.latest = self._range(fd)
        except OSError as error:
            raise OverlapScopeError(f"{path}: can't be read ({error.strerror})") from None
        if not self.header.closed:
            message = f"{path}: not closed; its process was killed or is running"
            self.problems.append(NotClosed("note", message))
            if self._slots < self._capacity:
                self.is_end_lost = True
                self.problems.append(Problem("error", f"{path}: cut short at offset {size}; what is left is used"))
        elif self.header.written is not None and self.latest != self.header.written:
            self.is_end_lost = True
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
        fd = open_descriptor(self.path)
        try:
            yield fd
        finally:
            os.close(fd)

    def _read_valid(self, fd: int, slot: int, first: int, count: int) -> Entries:
        """Read entries from a slot on, without those that are damaged or have unexpected numbers."""
        entries = self._read_slots(fd, slot, slot + count)
        is_in_place = entries["number"] == np.arange(first, first + len(entries))
        entries = entries if is_in_place.all() else entries[is_in_place]
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
        """Find the numbers of the oldest and the latest entry; 1 and 0 if the log is empty."""
        first = self._number_at(fd, 0)
        if (first - 1) % max(1, self._capacity):
            return self._find_range_damaged(fd)
        end = find_last_in_order(partial(self._number_at, fd), 0, self._slots) + 1
        latest = first + end - 1
        self.is_end_lost = self._is_begun(fd, end)
        ahead = self._read_slots(fd, end, min(end + _PROBED_ENTRIES, self._slots))["number"]
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

    def _is_begun(self, fd: int, slot: int) -> bool:
        """Return whether a slot without a number holds anything, because an entry was being written or has lost it."""
        data = os.pread(fd, ENTRY_BYTES, HEADER_BYTES + slot * ENTRY_BYTES) if slot < self._slots else b""
        return not any(data[:4]) and any(data)

    def _number_at(self, fd: int, slot: int) -> int:
        return int.from_bytes(os.pread(fd, 4, HEADER_BYTES + slot * ENTRY_BYTES), "little")

    def _find_range_damaged(self, fd: int) -> tuple[int, int]:
        """Find the numbers of the oldest and the latest entry that are in their own slots, in a damaged log."""
        number = self._read_slots(fd, 0, self._slots)["number"].astype(np.int64)
        slots = np.arange(len(number))
        used = number != 0
        in_place = used & ((number - 1) % max(1, self._capacity) == slots)
        if not in_place.any():
            self.is_end_lost = bool(used.any()) or self._is_begun(fd, 0)
            if used.any():
                self.problems.append(Problem("error", f"{self.path}: damaged; none of its entries is in its slot"))
            return 1, 0
        latest = int(number[in_place].max())
        oldest = max(1, latest - self._capacity + 1)
        kept = number[in_place & (number >= oldest)]
        lost, misplaced = latest - oldest + 1 - len(kept), int((used & ~in_place).sum())
        # One may be missing while the process runs, or since its death: it was being written.
        self.is_end_lost = bool(lost or misplaced) or self._is_begun(fd, latest % max(1, self._capacity))
        if lost > (0 if self.header.closed else 1) or misplaced:
            count = max(lost, misplaced)
            what = "one entry is" if count == 1 else f"{count} entries are"
            self.problems.append(Problem("error", f"{self.path}: {what} lost or damaged; the others are used"))
        return int(kept.min()), latest


@dataclass
class CollectiveLogs:
    """Collective logs of all ranks, and the lines that the numbers in their entries refer to."""

    folders: dict[int, Path]
    groups: dict[ProcessGroup, dict[int, CollectiveLogFile]] = field(default_factory=dict)
    """Logs of each group, by rank."""
    problems: list[Problem] = field(default_factory=list)
    _signatures: dict[int, dict[int, Signature]] = field(default_factory=dict)
    _known_signatures: dict[bytes, list[tuple[int, Signature]]] = field(default_factory=dict)
    """The same by content of the files, most of which are the same on all ranks."""
    _call_sites: dict[int, dict[int, tuple[str, int, str]]] = field(default_factory=dict)
    _names: dict[tuple[str, int], tuple[str, ...]] = field(default_factory=dict)
    """Names of the parameters of a bucket, by plan hash and bucket number."""
    _plans_read: set[int] = field(default_factory=set)
    _interned: dict[Any, Any] = field(default_factory=dict)

    def intern(self, thing: T) -> T:
        """Return the first object that is equal to this one: most groups and lines are the same on all ranks."""
        return self._interned.setdefault(thing, thing)

    def signatures(self, rank: int) -> dict[int, Signature]:
        """Return a rank's signatures by number."""
        if rank not in self._signatures:

            def row(line: Any) -> list[tuple[int, Signature]]:
                signature = from_dict(Signature, line)
                return [(int(line["signature"]), self.intern(signature))]

            path = self.folders[rank] / SIGNATURES_FILE
            self._signatures[rank] = dict(read_lines(path, self.problems, row, known=self._known_signatures))
        return self._signatures[rank]

    def named(self, rank: int, signature: Signature) -> Signature:
        """Return a bucket's signature with the names of its parameters, if the rank has recorded the bucket's plan."""
        if signature.bucket == NO_BUCKET or signature.names:
            return signature
        key = signature.plan_hash, signature.bucket
        if key not in self._names and rank not in self._plans_read:
            self._plans_read.add(rank)
            read_lines(self.folders[rank] / PLANS_FILE, self.problems, self._note_plan)
        names = self._names.get(key)
        return signature if names is None else replace(signature, names=names)

    def _note_plan(self, plan: Any) -> list[None]:
        for number, bucket in enumerate(plan["buckets"]):
            names = tuple(str(parameter["name"]) for parameter in bucket["parameters"])
            self._names[str(plan["hash"]), number] = names
        return []

    def call_sites(self, rank: int) -> dict[int, tuple[str, int, str]]:
        """Return a rank's call sites by number: file, line, function."""
        if rank not in self._call_sites:

            def row(line: Any) -> list[tuple[int, tuple[str, int, str]]]:
                site = str(line["file"]), int(line["line"]), str(line["function"])
                return [(int(line["call_site"]), self.intern(site))]

            path = self.folders[rank] / CALL_SITES_FILE
            self._call_sites[rank] = dict(read_lines(path, self.problems, row))
        return self._call_sites[rank]


def open_collective_logs(
    folders: dict[int, Path], progress: Callable[[int, int], None] | None = None
) -> CollectiveLogs:
    """Open the collective logs of all ranks.

    Args:
        folders: rank folders by rank.
        progress: called with (number of ranks done, number of ranks).
    """
    logs = CollectiveLogs(folders)
    for done, (rank, folder) in enumerate(folders.items()):
        if progress:
            progress(done, len(folders))
        paths = match_files(folder, GROUP_PATTERN, POINT_TO_POINT_PATTERN)
        for path in sorted(paths, key=lambda path: (len(path.name), path.name)):
            _add(logs, rank, path)
    if progress:
        progress(len(folders), len(folders))
    return logs


def _add(logs: CollectiveLogs, rank: int, path: Path) -> None:
    try:
        file = CollectiveLogFile(path, logs.problems)
    except OverlapScopeError as error:
        if has_finished_recording(path.parent) or not _was_just_made(path):
            logs.problems.append(Problem("error", str(error)))
        return
    header = file.header
    if header.rank != rank:
        text = f"{path}: this is the log of rank {header.rank}, in the folder of rank {rank}; it is skipped"
        logs.problems.append(Problem("error", text))
        return
    group = logs.intern(header.group)
    files = logs.groups.setdefault(group, {})
    if rank in files:
        text = f"{path}: a second log of group {header.name}, after {files[rank].path.name}; it is skipped"
        logs.problems.append(Problem("error", text))
        return
    file.header = replace(header, ranks=group.ranks)  # so that a thousand ranks share one list of a thousand members
    files[rank] = file


def _was_just_made(path: Path) -> bool:
    """Return whether a log has its full size, but no header or entry yet: its process is about to write them."""
    try:
        with open_regular_file(path) as file:
            begin = file.read(HEADER_BYTES + ENTRY_BYTES)
    except OSError:
        return False
    return len(begin) == HEADER_BYTES + ENTRY_BYTES and not any(begin)
