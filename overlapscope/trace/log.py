"""Event logs, read back: whole records only, in the order they were written."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np
import numpy.typing as npt

from overlapscope.errors import OverlapScopeError
from overlapscope.trace.format import (
    DTYPES,
    HEADER_BYTES,
    OPS,
    RECORD_BYTES,
    RECORD_FIELDS,
    Kind,
    LogHeader,
    Phase,
)

RECORD_DTYPE: Final = np.dtype([(name, kind) for name, kind in RECORD_FIELDS])
"""A record as numpy sees it."""

Records = npt.NDArray[Any]
"""A structured array of ``RECORD_DTYPE``."""


@dataclass(frozen=True)
class Problem:
    """Something about the files that the reader of the numbers must know: one line, naming file and place.

    A ``note`` is worth knowing (a log that was never closed); an ``error`` means that data is missing or unreadable.
    """

    severity: Literal["note", "error"]
    message: str

    def __str__(self) -> str:
        return self.message


def read_log(path: Path) -> tuple[LogHeader, Records, list[Problem]]:
    """Read one event log.

    Returns:
        The header, the whole records sorted by sequence number, and what was wrong with the file.

    Raises:
        OverlapScopeError: nothing of the file can be read (missing, not a log, a newer format, no header).
    """
    try:
        with path.open("rb") as file:
            header = LogHeader.unpack(file.read(HEADER_BYTES), path)
            size = os.fstat(file.fileno()).st_size
            used = (size - HEADER_BYTES) // RECORD_BYTES if header.closed else _used_slots(file.fileno(), size)
            slots = _read_slots(file.fileno(), 0, max(0, used))
    except OSError as error:
        raise OverlapScopeError(f"{path}: can't be read ({error.strerror})") from None

    problems: list[Problem] = []
    written = slots["sequence"] != 0
    whole = written & (slots["sequence_low"] == (slots["sequence"] & np.uint64(0xFFFFFFFF)).astype(np.uint32))
    known = whole & _is_known(slots)
    started = written | (slots["sequence_low"] != 0)
    records = slots[known]
    records = records[np.argsort(records["sequence"], kind="stable")]

    # One record may be half written at the moment of death. More than one, or one of an unknown kind, is damage.
    damaged = np.flatnonzero(started & ~known)
    torn_at_death = len(damaged) == 1 and not header.closed and not whole[damaged[0]]
    if len(damaged) and not torn_at_death:
        offset = HEADER_BYTES + int(damaged[0]) * RECORD_BYTES
        problems.append(
            Problem("error", f"{path}: {len(damaged)} damaged records, the first at offset {offset}; they are left out")
        )
    problems += _missing_records(path, header, size, records)
    return header, records, problems


def newest_step(path: Path) -> int | None:
    """The step that a recording has reached, cheap enough to poll while it runs; None before its first record."""
    try:
        with path.open("rb") as file:
            used = _used_slots(file.fileno(), os.fstat(file.fileno()).st_size)
            slots = _read_slots(file.fileno(), max(0, used - 2), used)
    except OSError:
        return None
    return int(slots["step"].max()) if len(slots) else None


def log_position(path: Path) -> tuple[int, int]:
    """Size in bytes and newest sequence number of a log: changes whenever a record is added. (0, 0) if unreadable."""
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            slots = _read_slots(file.fileno(), 0, _used_slots(file.fileno(), size))
    except OSError:
        return 0, 0
    return size, int(slots["sequence"].max()) if len(slots) else 0


def _read_slots(fd: int, first: int, end: int) -> Records:
    data = os.pread(fd, (end - first) * RECORD_BYTES, HEADER_BYTES + first * RECORD_BYTES)
    return np.frombuffer(data[: len(data) // RECORD_BYTES * RECORD_BYTES], dtype=RECORD_DTYPE)


def _used_slots(fd: int, size: int) -> int:
    """Slots before the first one that was never begun, by bisection: a live log is mostly a hole of zeros."""
    used, end = 0, max(0, size - HEADER_BYTES) // RECORD_BYTES
    while used < end:
        middle = (used + end) // 2
        if any(os.pread(fd, RECORD_BYTES, HEADER_BYTES + middle * RECORD_BYTES)):
            used = middle + 1
        else:
            end = middle
    return used


def _is_known(slots: Records) -> npt.NDArray[np.bool_]:
    """Every number in these records has a meaning."""
    kind, phase_kinds = slots["kind"], (Kind.ENTER, Kind.PHASE)
    known_phase = ~np.isin(kind, phase_kinds) | (slots["index"] <= max(Phase))
    in_range = (kind >= min(Kind)) & (kind <= max(Kind)) & (slots["op"] < len(OPS)) & (slots["dtype"] < len(DTYPES))
    return in_range & known_phase


def _missing_records(path: Path, header: LogHeader, size: int, records: Records) -> list[Problem]:
    """What the header promises and the file does not hold."""
    kept = len(records)
    promised = min(header.written_records, header.capacity_records) if header.closed else header.capacity_records
    if size < HEADER_BYTES + promised * RECORD_BYTES:
        return [Problem("error", f"{path}: cut short at offset {size}; the {kept} whole records before it are shown")]
    notes = []
    if not header.closed:
        notes.append(Problem("note", f"{path}: not closed, so its process was killed or still runs"))
    lost = int(records["sequence"][-1]) - kept if kept else 0
    if lost > 1 or (lost and header.closed):
        message = f"{path}: at its size limit; {lost} records between the first and the newest steps are gone"
        notes.append(Problem("note", message))
    return notes
