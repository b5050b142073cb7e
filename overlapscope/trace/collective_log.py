"""Collective log of one process group on one rank: every collective, in launch order.

There is one file per group, memory-mapped like the event log, so that it survives SIGKILL and SIGABRT: an entry is on
disk *before* its collective is launched. Entry ``n`` (from 1) is in slot ``(n - 1) % capacity``; times are filled in
later, so the state of an entry follows from which of its times are set. Example: with 1000 slots, entries 1 and 1001
share slot 0, and the latest 1000 entries are available.

Each entry holds two running sums over all entries so far, ``hash`` and ``names_hash``. Ranks agree up to an entry if
and only if their sums there are equal, so the first difference is found by bisection, in a number of requests that is
logarithmic in the length of the log. They are sums, not chained hashes, so that what two ranks have done *between* two
entries can be compared as well.
"""

from __future__ import annotations

import json
import mmap
import struct
import threading
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property, lru_cache
from hashlib import blake2b
from pathlib import Path
from typing import Any, Final, Protocol
from zlib import adler32

import numpy as np
import numpy.typing as npt

from overlapscope.errors import OverlapScopeError
from overlapscope.trace.folders import ranks_in_world
from overlapscope.trace.json_files import dump_json_line, parse_json_text
from overlapscope.trace.ring_log import RingLog, SlotStore
from overlapscope.trace.schema import HEADER_BYTES, NO_BUCKET, add_page_checksum, is_page_intact

GROUP_VERSION: Final = 1
GROUP_MAGIC: Final = b"OVLGROUP"
ENTRY_BYTES: Final = 64

UNKNOWN: Final = 0xFFFFFFFF
"""``batch`` if it is unknown which batch of its data a rank is at."""
UNKNOWN_PHASE: Final = 0xFF

UNEVEN_INPUTS: Final = 1
"""Flag: launched inside ``join()``, or after one, where ranks may be at different steps."""
SHADOW: Final = 2
"""Flag: launched by a rank that has joined, to match another rank's collective."""
FAILED: Final = 4
"""Flag: completed with an error."""
AWAITED: Final = 8
"""Flag: launched by user code, on the host, and waited for at the line that launched it."""
AFTER_UPDATE: Final = 16
"""Flag: launched after the update of the previous step, while the user's loop was still in that iteration."""
REACHED: Final = 32
"""Flag: it took long to complete, and its device was seen to have reached it."""
UNREACHED: Final = 64
"""Flag: its device was seen to be still at earlier work; ``REACHED`` may be set later."""
OTHER_THREAD: Final = 128
"""Flag: launched by user code on another thread than the main one."""

GROUP_LIMIT_BYTES: Final = 8 * 1024**2

ENTRY_FIELDS: Final = (
    ("number", "<u4"),
    ("signature", "<u4"),
    ("call_site", "<u4"),
    ("step", "<u4"),
    ("batch", "<u4"),
    ("phase", "u1"),
    ("flags", "u1"),
    ("check", "<u2"),
    ("hash", "<u8"),
    ("names_hash", "<u8"),
    ("announced_ns", "<i8"),
    ("launched_ns", "<i8"),
    ("completed_ns", "<i8"),
)
ENTRY_DTYPE: Final = np.dtype([(name, kind) for name, kind in ENTRY_FIELDS])
"""Numpy type of an entry. Times are host nanoseconds, 0 for events that have not happened.

``check`` is the upper half of the Adler-32 of the entry with ``check`` = 0.
"""

Entries = npt.NDArray[Any]
"""A structured array of ``ENTRY_DTYPE``."""

_ENTRY: Final = struct.Struct("<IIIIIBBHQQqqq")
_NUMBER: Final = struct.Struct("<I")
_TIME: Final = struct.Struct("<q")
_HEADER: Final = struct.Struct("<8sIIIIQ")
_CHECK: Final = struct.Struct("<H")
_CHECK_AT: Final = 22
_TIME_AT: Final = {"launched": 48, "completed": 56}
_FLAGS_AT: Final = 21
_ADLER: Final = 65521
_MASK: Final = 2**64 - 1
_SMALLEST_CAPACITY: Final = 16
_GOLDEN: Final = 0x9E3779B97F4A7C15
_BLOCK_ENTRIES: Final = 64
_HISTORY_ENTRIES: Final = 1_024
"""Number of entries before one among which those that are like it are looked for."""
_MOST_EARLIER: Final = 8


POINT_TO_POINT: Final = ("send", "recv")
"""Operations of two ranks. They have their own log, because the other ranks of the group take no part in them."""

_SIZES_MAY_DIFFER: Final = ("all_to_all", "gather", "scatter", "barrier", "monitored_barrier")
"""Operations whose element count may differ between ranks."""


@dataclass(frozen=True, kw_only=True)
class Signature:
    """Properties of a collective that are the same each time its line runs. One line of ``signatures.jsonl``.

    Collectives are matched by their order alone. Two ranks whose n-th collectives have different ``hash``es reduce
    different tensors together, abort or hang. Names of tensors have a separate hash: ``if rank == 0: broadcast(a) else:
    broadcast(b)`` is correct, so different names alone are no error, while *swapped* names are.
    """

    op: str
    """Name in ``torch.distributed``: all_reduce, broadcast, all_gather, reduce_scatter, reduce, gather, scatter,
    all_to_all, barrier, monitored_barrier, send, recv."""
    reduce_op: str = ""
    """sum, avg, max ...; empty if nothing is reduced."""
    dtype: str = ""
    shapes: tuple[tuple[int, ...], ...] = ()
    """Shapes of the input tensors of this rank (for scatter and recv: of the output tensors)."""
    elements: int = 0
    """Number of elements of all tensors."""
    bytes: int = 0
    peer: int | None = None
    """Rank in the job: the root, or the other rank of a send or recv; None: any, or none."""
    tag: int = 0
    names: tuple[str, ...] = ()
    """Names of the tensors: parameters and buffers as in the module, others as the user's variables."""
    role: str = "user"
    """Purpose: bucket, buffers, bitmap (of used parameters), construction (what DDP compares and broadcasts when it is
    created), plan (rank 0's plan, at a rebuild), join, hook (launched by a communication hook), segment (part of a
    bucket's all-reduce, for strategies that split it), user."""
    model: int = 0
    """Number of the DDP instance in its process, if DDP launches it."""
    plan_epoch: int = 0
    plan_hash: str = ""
    """Hash of a bucket's plan: names, shapes, dtypes and order of all parameters, and their assignment to buckets."""
    bucket: int = NO_BUCKET
    strategy: str = ""
    """Strategy that splits a bucket's all-reduce into segments; empty if the backend performs it."""
    phase: str = ""
    """For a segment: phase of the all-reduce, as named by the strategy."""
    round: int = 0
    """For a segment: number of the round within the phase, from 1."""
    rounds: int = 0
    """Number of rounds of the phase, equal on all ranks; 0: unknown, and ``round`` is the rank's own count."""

    @cached_property
    def hash(self) -> int:
        """Return a 64-bit hash of what all ranks must have in common."""
        size = 0 if self.op in _SIZES_MAY_DIFFER else self.elements
        what = [self.op, self.reduce_op, self.dtype if size else "", size, self.peer]
        if self.bucket != NO_BUCKET:
            what += [self.model, self.plan_hash, self.bucket, *filter(None, [self.strategy])]
        return _hash64(what)

    @property
    def is_gradient_reduction(self) -> bool:
        """Return whether it reduces the gradients of a bucket, and doesn't gather its parameters."""
        return self.bucket != NO_BUCKET and self.op != "all_gather"

    @property
    def parameters(self) -> tuple[str, ...]:
        """Return the names of a bucket's parameters, reduced or gathered; empty for other collectives."""
        return self.names if self.bucket != NO_BUCKET else ()

    @cached_property
    def names_hash(self) -> int:
        """Return a 64-bit hash of the tensors' names; 0 if unknown."""
        return _hash64(self.names) if self.names else 0

    def to_json(self, number: int) -> str:
        """Serialize a line of ``signatures.jsonl``, with its line end."""
        return dump_json_line({"signature": number, **asdict(self)})


def _hash64(what: Any) -> int:
    return int.from_bytes(blake2b(json.dumps(what).encode(), digest_size=8).digest(), "little")


def group_file(number: int, *, point_to_point: bool = False) -> str:
    """Return the name of a rank's log file; numbers count from 0 in the order of the groups' first collectives."""
    return f"{'p2p' if point_to_point else 'group'}_{number}.log"


def entry_digest(signature_hash: int, number: int, step: int) -> int:
    """Return the summand of one entry in the running sum: splitmix64 of its content, number and step."""
    x = (signature_hash + _GOLDEN * number + 0xD6E8FEB86659FD93 * (step + 1)) & _MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)


def hashed_step(signature: Signature, step: int, flags: int) -> int:
    """Return the step that goes into ``hash``: a bucket's step, and -1 for all other collectives.

    User collectives and collectives of buffers may be launched before or after what this process considers the end of a
    step. Inside ``join()`` ranks may be at different steps.
    """
    return step if signature.bucket != NO_BUCKET and not flags & UNEVEN_INPUTS else -1


@dataclass(frozen=True, kw_only=True)
class ProcessGroup:
    """A process group of the job, identified by its name and members."""

    name: str
    """Name of the group, the same on all of its ranks."""
    ranks: tuple[int, ...]
    """Members of the group, whether or not they left anything."""
    is_point_to_point: bool = False
    """True for the group's sends and receives, which each rank numbers separately."""
    backend: str = field(default="", compare=False)
    description: str = field(default="", compare=False)

    @property
    def title(self) -> str:
        """Return the name of the group for a sentence."""
        name = self.name if self.description in ("", "undefined") else self.description.removesuffix("_pg")
        return f"{name}, sends and receives" if self.is_point_to_point else name

    @property
    def order(self) -> tuple[bool, str, tuple[int, ...]]:
        """Return the sort key of groups: collectives first, each by name."""
        return self.is_point_to_point, self.name, self.ranks


@dataclass(frozen=True, kw_only=True)
class CollectiveLogHeader:
    """Header of a log: the group that it belongs to."""

    name: str
    """Name of the group, the same on all of its ranks."""
    ranks: tuple[int, ...]
    """Members of the group, as ranks of the job."""
    rank: int
    """Rank that writes this log."""
    description: str = ""
    backend: str = ""
    point_to_point: bool = False
    capacity: int = 0
    """Number of slots of the ring."""
    closed: bool = False
    written: int | None = None
    """Number of entries ever announced, if the log is closed; None before."""
    version: int = GROUP_VERSION

    @property
    def group(self) -> ProcessGroup:
        """Return the group that the log belongs to."""
        return ProcessGroup(
            name=self.name,
            ranks=self.ranks,
            is_point_to_point=self.point_to_point,
            backend=self.backend,
            description=self.description,
        )

    @property
    def full_bytes(self) -> int:
        """Return the size of the file until it is closed."""
        return HEADER_BYTES + self.capacity * ENTRY_BYTES

    def pack(self) -> bytes:
        """Serialize the header page."""
        text = json.dumps(
            {
                "name": self.name,
                "ranks": self.ranks if len(self.ranks) <= 512 else None,
                "world": len(self.ranks),
                "rank": self.rank,
                "description": self.description[:200],
                "backend": self.backend,
                "point_to_point": self.point_to_point,
                "written": self.written,
                "entry": ENTRY_FIELDS,
            },
            separators=(",", ":"),
        ).encode()
        head = _HEADER.pack(
            GROUP_MAGIC, self.version, HEADER_BYTES, ENTRY_BYTES, int(self.closed), self.capacity
        ) + len(text).to_bytes(4, "little")
        page = head + text
        if len(page) > HEADER_BYTES - 4:
            raise ValueError("the header of a group log no longer fits its page")
        return add_page_checksum(page.ljust(HEADER_BYTES, b"\0"))

    @classmethod
    @lru_cache(maxsize=256)
    def unpack(cls, page: bytes, path: Path) -> CollectiveLogHeader:
        """Parse a header page; those of a recording's logs are asked for several times.

        Raises:
            OverlapScopeError: not a collective log, truncated, damaged, or of a version that this code can't read.
        """
        if page[: len(GROUP_MAGIC)] != GROUP_MAGIC:
            raise OverlapScopeError(f"{path}: not a collective log (offset 0: no {GROUP_MAGIC.decode()} mark)")
        if len(page) < HEADER_BYTES:
            raise OverlapScopeError(f"{path}: cut short at offset {len(page)}, inside the header; no entry is left")
        _, version, header_bytes, entry_bytes, closed, capacity = _HEADER.unpack_from(page)
        if version > GROUP_VERSION:
            raise OverlapScopeError(
                f"{path}: written in version {version}; this overlapscope reads up to {GROUP_VERSION}; "
                "upgrade overlapscope to read it"
            )
        if (header_bytes, entry_bytes) != (HEADER_BYTES, ENTRY_BYTES):
            raise OverlapScopeError(f"{path}: corrupt header (offset 12)")
        if not is_page_intact(page):
            raise OverlapScopeError(f"{path}: damaged header (its checksum is wrong); nothing of the file is used")
        end = _HEADER.size + 4 + int.from_bytes(page[_HEADER.size : _HEADER.size + 4], "little")
        try:
            content = parse_json_text(page[_HEADER.size + 4 : end])
            ranks = content["ranks"]
            return cls(
                name=str(content["name"]),
                ranks=ranks_in_world(content["world"]) if ranks is None else tuple(map(int, ranks)),
                rank=int(content["rank"]),
                description=str(content["description"]),
                backend=str(content["backend"]),
                point_to_point=bool(content["point_to_point"]),
                capacity=capacity,
                closed=bool(closed),
                written=content["written"],
                version=version,
            )
        except (ValueError, KeyError, TypeError, OverflowError):
            raise OverlapScopeError(f"{path}: corrupt header (offset {_HEADER.size})") from None


class ReadableLog(Protocol):
    """Collective log that can be read: one that is being written, or a file."""

    @property
    def header(self) -> CollectiveLogHeader:
        """Return the header, which says which group the log belongs to."""

    @property
    def latest(self) -> int:
        """Return the number of the latest entry; 0 if there is none."""

    def read(self, first: int, last: int) -> Entries:
        """Return the entries ``first`` to ``last`` that the log still has."""


def oldest_incomplete(log: ReadableLog) -> Entries:
    """Return the first entry of the incomplete ones at the end of the log; none if the latest entry is complete.

    The log is read backwards in blocks of ``_BLOCK_ENTRIES`` entries up to a block without incomplete ones, because
    hosts run ahead of their devices, by a thousand collectives and more. Where a whole block is complete, so is
    everything before it, or nothing waits for it.

    Example: of 300 entries, 200 to 300 are incomplete. Blocks 237 to 300 and 173 to 236 have incomplete entries, block
    109 to 172 has none, so the result is entry 200.
    """
    found = np.empty(0, dtype=ENTRY_DTYPE)
    last = log.latest
    while last > 0:
        entries = log.read(max(1, last - _BLOCK_ENTRIES + 1), last)
        is_open = (entries["completed_ns"] == 0) | ((entries["flags"] & FAILED) != 0)
        if not is_open.any() or (not len(found) and not is_open[-1]):
            break
        found, last = entries[is_open][:1], last - _BLOCK_ENTRIES
    return found


def find_earlier_steps(log: ReadableLog, number: int) -> tuple[int, ...]:
    """Return the steps of the last entries before this one that have its signature and line, in order."""
    rows = log.read(max(1, number - _HISTORY_ENTRIES), number)
    if not len(rows) or rows["number"][-1] != number:
        return ()
    is_same = (rows["signature"] == rows["signature"][-1]) & (rows["call_site"] == rows["call_site"][-1])
    return tuple(rows["step"][is_same][:-1][-_MOST_EARLIER:].tolist())


class EntryStore(SlotStore):
    """Writer of entries, and of their running sums. Thread-safe."""

    def __init__(self, buffer: mmap.mmap, make_room: Callable[[int], int]) -> None:
        super().__init__(buffer, make_room)
        self._lock = threading.RLock()
        self.hash = 0
        self.names_hash = 0

    def announce(
        self,
        signature: int,
        signature_hash: int,
        names_hash: int,
        hashed_step: int,
        now_ns: int,
        step: int,
        call_site: int,
        batch: int,
        phase: int,
        flags: int,
    ) -> int:
        """Store an entry, and return its number; 0 if the log is closed. See ``CollectiveLogWriter.announce``."""
        with self._lock:
            buffer = self._buffer
            if buffer is None:
                return 0
            number = self.latest + 1
            at = HEADER_BYTES + (number - 1) * ENTRY_BYTES if number <= self.allocated else self._make_room(number)
            self.hash = (self.hash + entry_digest(signature_hash, number, hashed_step)) & _MASK
            if names_hash:
                self.names_hash = (self.names_hash + entry_digest(names_hash, number, -1)) & _MASK
            sums = self.hash, self.names_hash
            entry = _ENTRY.pack(number, signature, call_site, step, batch, phase, flags, 0, *sums, now_ns, 0, 0)
            # The number is written last: until then no reader takes this for an entry.
            _NUMBER.pack_into(buffer, at, 0)
            buffer[at + _NUMBER.size : at + ENTRY_BYTES] = entry[_NUMBER.size :]
            _CHECK.pack_into(buffer, at + _CHECK_AT, adler32(entry) >> 16)
            _NUMBER.pack_into(buffer, at, number)
            self.latest = number
            return number

    def update(self, number: int, event: str | None, now_ns: int, flags: int) -> None:
        """Add the time of an event, ``launched`` or ``completed``, and flags to an entry that the ring still has."""
        with self._lock:
            buffer = self._buffer
            # The slot may hold a later entry by now, or the log may be closed.
            if not max(0, self.latest - self.capacity) < number <= self.latest or buffer is None:
                return
            at = HEADER_BYTES + (number - 1) % self.capacity * ENTRY_BYTES
            if event is not None:
                _TIME.pack_into(buffer, at + _TIME_AT[event], now_ns)
            buffer[at + _FLAGS_AT] |= flags
            entry = buffer[at : at + ENTRY_BYTES]
            # The weight of a byte is its distance from the end: 42 and 41 for the old check, which must not count.
            check = ((adler32(entry) >> 16) - 42 * entry[_CHECK_AT] - 41 * entry[_CHECK_AT + 1]) % _ADLER
            _CHECK.pack_into(buffer, at + _CHECK_AT, check)

    def replace_buffer(self, buffer: mmap.mmap) -> None:
        """Store in another buffer from now on, in a forked process: a thread of its parent may hold the lock."""
        self._lock = threading.RLock()
        super().replace_buffer(buffer)

    def close(self) -> None:
        """Release the buffer. What is stored from now on is discarded."""
        with self._lock:
            super().close()


class CollectiveLogWriter(RingLog[EntryStore]):
    """Writer of the collective log of one group. Thread-safe.

    Args:
        path: the file to create; it must not exist.
        header: header with the group's name and members.
        limit_bytes: maximum size of the file; the latest entries are kept.
        make_store: ``EntryStore``, or its twin in C.

    Raises:
        OverlapScopeError: the file exists, or can't be created or written.
    """

    slot_bytes = ENTRY_BYTES
    chunk_slots = 4096

    def __init__(
        self,
        path: Path,
        header: CollectiveLogHeader,
        limit_bytes: int = GROUP_LIMIT_BYTES,
        make_store: type[EntryStore] = EntryStore,
    ) -> None:
        self.header = header
        super().__init__(path, max(_SMALLEST_CAPACITY, (limit_bytes - HEADER_BYTES) // ENTRY_BYTES), make_store)

    @property
    def hash(self) -> int:
        """Return the running sum over all entries."""
        return self.store.hash

    @property
    def names_hash(self) -> int:
        """Return the running sum over the names of all entries."""
        return self.store.names_hash

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
        agreed_step = hashed_step(signature, step, flags)
        hashes = signature.hash, signature.names_hash
        return self.store.announce(
            number_of_signature, *hashes, agreed_step, now_ns, step, call_site, batch, phase, flags
        )

    def launched(self, number: int, now_ns: int) -> None:
        """Record that the backend has accepted a collective."""
        self.store.update(number, "launched", now_ns, 0)

    def completed(self, number: int, now_ns: int, *, failed: bool = False) -> None:
        """Record that a collective was seen to be complete at ``now_ns``."""
        self.store.update(number, "completed", now_ns, FAILED if failed else 0)

    def seen(self, number: int, flags: int) -> None:
        """Add ``REACHED`` or ``UNREACHED`` to an entry."""
        self.store.update(number, None, 0, flags)

    def read(self, first: int, last: int) -> Entries:
        """Return the entries ``first`` to ``last`` that the ring still has."""
        with self._lock:
            if self._buffer.closed:
                return np.empty(0, dtype=ENTRY_DTYPE)
            first, last = max(first, 1, self.latest - self.capacity + 1), min(last, self.latest)
            parts = []
            while first <= last:  # once, or twice where the ring begins again
                offset = self._offset(first)
                until_wrap = (HEADER_BYTES + self.capacity * ENTRY_BYTES - offset) // ENTRY_BYTES
                count = min(last - first + 1, until_wrap)
                parts.append(self._buffer[offset : offset + count * ENTRY_BYTES])
                first += count
        return np.frombuffer(b"".join(parts), dtype=ENTRY_DTYPE)

    def _header(self, *, closed: bool) -> bytes:
        written = self.latest if closed else None
        return replace(self.header, capacity=self.capacity, closed=closed, written=written).pack()
