"""The collective log of one process group on one rank: each collective in the order in which it was announced.

A file per group, memory-mapped like the event log, so that it survives SIGKILL and SIGABRT: an entry is on disk
*before* its collective is launched. Entry ``n`` (from 1) is in slot ``(n - 1) % capacity``; times are added in place,
so an entry's state is which of its times are there.

Each entry holds two running sums over all entries so far, ``hash`` and ``names_hash``. Ranks agree up to an entry if
and only if their sums there are equal, so who looks for the first difference asks for the logarithm of the length of
the log. They are sums, not chains, so that what two ranks have done *between* two entries can be compared as well.
"""

from __future__ import annotations

import json
import mmap
import os
import struct
import threading
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from overlapscope.errors import OverlapScopeError
from overlapscope.trace.signature import NO_BUCKET, Signature

GROUP_VERSION: Final = 1
GROUP_MAGIC: Final = b"OVLGROUP"
HEADER_BYTES: Final = 4096
ENTRY_BYTES: Final = 64

UNKNOWN: Final = 0xFFFFFFFF
"""``batch`` where nobody knows which batch of its data a rank is at."""
UNKNOWN_PHASE: Final = 0xFF

UNEVEN_INPUTS: Final = 1
"""Flag: launched inside ``join()``, where ranks may be at different steps."""
SHADOW: Final = 2
"""Flag: launched by a rank that has joined, in the place of one of the others'."""
FAILED: Final = 4
"""Flag: completed with an error."""

DEFAULT_LIMIT_BYTES: Final = 8 * 1024**2

ENTRY_FIELDS: Final = (
    ("number", "<u4"),
    ("signature", "<u4"),
    ("call_site", "<u4"),
    ("step", "<u4"),
    ("batch", "<u4"),
    ("phase", "u1"),
    ("flags", "u1"),
    ("reserved", "<u2"),
    ("hash", "<u8"),
    ("names_hash", "<u8"),
    ("announced_ns", "<i8"),
    ("launched_ns", "<i8"),
    ("completed_ns", "<i8"),
)
ENTRY_DTYPE: Final = np.dtype([(name, kind) for name, kind in ENTRY_FIELDS])
"""An entry as numpy sees it. Times are host nanoseconds, 0 for what has not happened."""

Entries = npt.NDArray[Any]
"""A structured array of ``ENTRY_DTYPE``."""

_BODY: Final = struct.Struct("<IIIIBBHQQqqq")  # all but the number, which is written last
_NUMBER: Final = struct.Struct("<I")
_TIME: Final = struct.Struct("<q")
_HEADER: Final = struct.Struct("<8sIIIIQ")
_LAUNCHED_AT: Final = 48
_COMPLETED_AT: Final = 56
_FLAGS_AT: Final = 21
_MASK: Final = 2**64 - 1
_CHUNK_ENTRIES: Final = 4096
_GOLDEN: Final = 0x9E3779B97F4A7C15


def group_file(number: int, *, point_to_point: bool = False) -> str:
    """Name of the log of a rank's ``number``-th group, from 0 in the order of their first collectives."""
    return f"{'p2p' if point_to_point else 'group'}_{number}.log"


def mix(signature_hash: int, number: int, step: int) -> int:
    """What one entry adds to the running sum: splitmix64 of what it is, where it stands and which step it is of."""
    x = (signature_hash + _GOLDEN * number + 0xD6E8FEB86659FD93 * (step + 1)) & _MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)


def step_that_must_agree(signature: Signature, step: int, flags: int) -> int:
    """The step that goes into ``hash``: of a bucket its own, of all else none.

    A collective of the user's own, or of buffers, may be launched before or after what this process takes for the end
    of a step. Inside ``join()`` ranks may be at different steps.
    """
    return step if signature.bucket != NO_BUCKET and not flags & UNEVEN_INPUTS else -1


@dataclass(frozen=True, kw_only=True)
class GroupHeader:
    """Which group a log is of."""

    name: str
    """The same on all ranks of the group."""
    ranks: tuple[int, ...]
    """Its members, as ranks of the job."""
    rank: int
    """Whose log this is."""
    description: str = ""
    backend: str = ""
    point_to_point: bool = False
    capacity: int = 0
    """Entries before the ring closes."""
    closed: bool = False
    version: int = GROUP_VERSION

    def pack(self) -> bytes:
        """The header page."""
        text = json.dumps(
            {
                "name": self.name,
                "ranks": self.ranks if len(self.ranks) <= 512 else None,
                "world": len(self.ranks),
                "rank": self.rank,
                "description": self.description[:200],
                "backend": self.backend,
                "point_to_point": self.point_to_point,
                "entry": ENTRY_FIELDS,
            },
            separators=(",", ":"),
        ).encode()
        head = _HEADER.pack(
            GROUP_MAGIC, self.version, HEADER_BYTES, ENTRY_BYTES, int(self.closed), self.capacity
        ) + len(text).to_bytes(4, "little")
        page = head + text
        if len(page) > HEADER_BYTES:
            raise ValueError("the header of a group log no longer fits its page")
        return page.ljust(HEADER_BYTES, b"\0")

    @classmethod
    def unpack(cls, page: bytes, path: Path) -> GroupHeader:
        """Read a header page.

        Raises:
            OverlapScopeError: not a collective log, cut short, damaged, or of a version that this code can't read.
        """
        if page[: len(GROUP_MAGIC)] != GROUP_MAGIC:
            raise OverlapScopeError(f"{path}: not a collective log (offset 0: no {GROUP_MAGIC.decode()} mark)")
        if len(page) < HEADER_BYTES:
            raise OverlapScopeError(f"{path}: cut short at offset {len(page)}, inside the header; no entry is left")
        _, version, header_bytes, entry_bytes, closed, capacity = _HEADER.unpack_from(page)
        if version > GROUP_VERSION:
            raise OverlapScopeError(
                f"{path}: written in version {version}, this overlapscope reads up to {GROUP_VERSION}; "
                "upgrade overlapscope to read it"
            )
        if (header_bytes, entry_bytes) != (HEADER_BYTES, ENTRY_BYTES):
            raise OverlapScopeError(f"{path}: corrupt header (offset 12)")
        end = _HEADER.size + 4 + int.from_bytes(page[_HEADER.size : _HEADER.size + 4], "little")
        try:
            content = json.loads(page[_HEADER.size + 4 : end])
            world = int(content["world"])
            ranks = range(world) if content["ranks"] is None else map(int, content["ranks"])
            return cls(
                name=str(content["name"]),
                ranks=tuple(ranks),
                rank=int(content["rank"]),
                description=str(content["description"]),
                backend=str(content["backend"]),
                point_to_point=bool(content["point_to_point"]),
                capacity=capacity,
                closed=bool(closed),
                version=version,
            )
        except (ValueError, KeyError, TypeError):
            raise OverlapScopeError(f"{path}: corrupt header (offset {_HEADER.size})") from None


@dataclass
class GroupLog:
    """Writes the collective log of one group. Safe to use from several threads.

    Args:
        path: the file to make; it must not exist.
        header: which group it is.
        limit_bytes: the file never grows beyond this; the newest entries are kept.

    Raises:
        OverlapScopeError: the file exists, or can't be made or written.
    """

    path: Path
    header: GroupHeader
    limit_bytes: int = DEFAULT_LIMIT_BYTES
    newest: int = field(default=0, init=False)
    """Number of the newest entry; 0 before the first."""
    hash: int = field(default=0, init=False)
    names_hash: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self._capacity = max(16, (self.limit_bytes - HEADER_BYTES) // ENTRY_BYTES)
        self._lock = threading.Lock()
        self._allocated = 0
        try:
            self._fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o644)
        except FileExistsError:
            raise OverlapScopeError(f"{self.path}: already holds a recording; record elsewhere") from None
        except OSError as error:
            raise OverlapScopeError(f"{self.path}: can't be made ({error.strerror})") from None
        try:
            os.ftruncate(self._fd, HEADER_BYTES + self._capacity * ENTRY_BYTES)
            os.posix_fallocate(self._fd, 0, HEADER_BYTES)
            self._buffer = mmap.mmap(self._fd, 0)
        except (OSError, ValueError) as error:
            os.close(self._fd)
            self.path.unlink(missing_ok=True)
            raise OverlapScopeError(f"{self.path}: can't be written ({error})") from None
        self._allocate()
        if not self._allocated:
            self._buffer.close()
            os.close(self._fd)
            self.path.unlink(missing_ok=True)
            raise OverlapScopeError(f"{self.path}: no space left on the disk for a recording")
        self._write_header()

    def announce(
        self,
        number_of_signature: int,
        signature: Signature,
        *,
        now_ns: int,
        step: int,
        call_site: int = 0,
        batch: int = UNKNOWN,
        phase: int = UNKNOWN_PHASE,
        flags: int = 0,
    ) -> int:
        """Store an entry. It is on disk when this returns.

        Returns:
            Its number, from 1; 0 if the log is closed.
        """
        with self._lock:
            if self._buffer.closed:
                return 0
            number = self.newest + 1
            if number > self._allocated and self._allocated < self._capacity:
                self._allocate()
            agreed_step = step_that_must_agree(signature, step, flags)
            self.hash = (self.hash + mix(signature.hash, number, agreed_step)) & _MASK
            if signature.names_hash:
                self.names_hash = (self.names_hash + mix(signature.names_hash, number, -1)) & _MASK
            at = self._offset(number)
            _NUMBER.pack_into(self._buffer, at, 0)
            _BODY.pack_into(
                self._buffer,
                at + _NUMBER.size,
                number_of_signature,
                call_site,
                step,
                batch,
                phase,
                flags,
                0,
                self.hash,
                self.names_hash,
                now_ns,
                0,
                0,
            )
            _NUMBER.pack_into(self._buffer, at, number)
            self.newest = number
            return number

    def launched(self, number: int, now_ns: int) -> None:
        """The backend has taken a collective."""
        self._add_time(number, _LAUNCHED_AT, now_ns)

    def completed(self, number: int, now_ns: int, *, failed: bool = False) -> None:
        """A collective was seen to be over at ``now_ns``."""
        self._add_time(number, _COMPLETED_AT, now_ns, FAILED if failed else 0)

    def read(self, first: int, last: int) -> Entries:
        """The entries ``first`` to ``last``, as far as the ring still has them."""
        with self._lock:
            if self._buffer.closed:
                return np.empty(0, dtype=ENTRY_DTYPE)
            first = max(first, 1, self.newest - self._capacity + 1)
            parts = [
                self._buffer[self._offset(number) : self._offset(number) + ENTRY_BYTES]
                for number in range(first, min(last, self.newest) + 1)
            ]
        return np.frombuffer(b"".join(parts), dtype=ENTRY_DTYPE)

    def close(self) -> None:
        """Note in the header that the log is complete, and give unused disk space back. May be called twice."""
        with self._lock:
            if self._buffer.closed:
                return
            self._write_header(closed=True)
            self._buffer.close()
            used = min(self.newest, self._capacity)
            os.ftruncate(self._fd, HEADER_BYTES + used * ENTRY_BYTES)
            os.close(self._fd)

    def _add_time(self, number: int, place: int, now_ns: int, flags: int = 0) -> None:
        with self._lock:
            # The ring may have come round to another entry, or the log may be closed.
            if not 0 < number <= self.newest or number <= self.newest - self._capacity or self._buffer.closed:
                return
            at = self._offset(number)
            _TIME.pack_into(self._buffer, at + place, now_ns)
            if flags:
                self._buffer[at + _FLAGS_AT] |= flags

    def _offset(self, number: int) -> int:
        return HEADER_BYTES + (number - 1) % self._capacity * ENTRY_BYTES

    def _allocate(self) -> None:
        """Give the next chunk disk blocks, or settle for a ring within what there is."""
        wanted = min(self._allocated + _CHUNK_ENTRIES, self._capacity)
        begin = HEADER_BYTES + self._allocated * ENTRY_BYTES
        try:
            os.posix_fallocate(self._fd, begin, (wanted - self._allocated) * ENTRY_BYTES)
        except OSError:
            self._capacity = self._allocated
            if self._allocated:
                self._write_header()
        else:
            self._allocated = wanted

    def _write_header(self, *, closed: bool = False) -> None:
        self._buffer[:HEADER_BYTES] = replace(self.header, capacity=self._capacity, closed=closed).pack()
