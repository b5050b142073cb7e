"""Fingerprints of a model's parameters as a rank has taken them: ``fingerprints_M.board``, and ``replicas.jsonl``.

A fingerprint is taken at the beginning of a forward that is to be reduced, where parameters are at rest, and belongs to
the number of reductions so far. Not all parameters have theirs taken every time: in a *sweep* of ``period`` reductions,
a power of two, each is taken once, at the reduction whose number is congruent to the CRC-32 of its name. So ranks
with different periods have all those of the longer one in common.

What parameters are when the recording ends is a sweep of its own, with ``AT_END`` in place of a period: much may have
happened to them since the last forward.

The file has a fixed number of slots, a sweep each. When they are full, old ones make room: what is left of a
long job is dense at its end, and thinner and thinner towards its beginning.
"""

from __future__ import annotations

import mmap
import os
import struct
from pathlib import Path
from typing import Any, Final
from zlib import crc32

import numpy as np
import numpy.typing as npt

from overlapscope.errors import OverlapScopeError

SWEEP_FIELDS: Final = (
    ("crc32", "<u4"),
    ("period", "<u4"),
    ("first", "<i8"),
)
"""Name and numpy type of each field of a sweep, packed. Two arrays follow: ``steps``, a u32 per tensor, and ``values``,
an i64 per tensor, 0 if it was not taken."""
AT_END: Final = 2**32 - 1
"""In place of the period of what was taken when the recording ended."""
MOST_SWEEPS: Final = 512
_MOST_BYTES: Final = 4 * 1024**2
_FEWEST_SWEEPS: Final = 32
_KEPT_NEWEST: Final = 1 / 4
"""This share of the slots holds the newest sweeps."""
_SWEEP: Final = struct.Struct("<Iq")
_CHECKSUM: Final = struct.Struct("<I")

Sweeps = npt.NDArray[Any]
"""A structured array of ``sweep_dtype``, by ``first``."""


def fingerprints_file(model: int) -> str:
    """Name of the file with the fingerprints of one model's parameters."""
    return f"fingerprints_{model}.board"


def sweep_dtype(tensors: int) -> np.dtype[Any]:
    """Of the sweeps of a model with so many tensors."""
    return np.dtype([*SWEEP_FIELDS, ("steps", "<u4", (tensors,)), ("values", "<i8", (tensors,))])


def taken_at(name: str) -> int:
    """The number to which the number of reductions is congruent when a tensor is taken, modulo any period."""
    return crc32(name.encode())


class SweepFile:
    """Writes the sweeps of one model, and has those that are kept at hand.

    Args:
        folder: of the rank.
        model: number of the DDP instance in its process.
        tensors: how many fingerprints there are in a sweep.

    Raises:
        OverlapScopeError: the file can't be made.
    """

    def __init__(self, folder: Path, model: int, tensors: int) -> None:
        dtype = sweep_dtype(tensors)
        slots = max(_FEWEST_SWEEPS, min(MOST_SWEEPS, _MOST_BYTES // dtype.itemsize))
        path = folder / fingerprints_file(model)
        try:
            with path.open("x+b") as file:
                os.posix_fallocate(file.fileno(), 0, slots * dtype.itemsize)
                self._buffer = mmap.mmap(file.fileno(), slots * dtype.itemsize)
        except OSError as error:
            raise OverlapScopeError(f"{path}: can't be created ({error.strerror})") from None
        self._slots: Sweeps = np.frombuffer(self._buffer, dtype)
        self._order: list[int] = []
        """Slots in use, by ``first``."""
        self._is_pinned: set[int] = set()

    def add(self, period: int, first: int, steps: bytes, values: bytes) -> None:
        """Write a sweep, in place of an old one if there is no slot left.

        Args:
            period: of the sweep; ``AT_END`` if it is the last, which does not count as one of ``sweeps``.
            first: number of reductions at its beginning.
            steps: in which each tensor was taken.
            values: of the tensors.
        """
        slot = len(self._order)
        if slot == len(self._slots):
            slot = self._order.pop(self._least_missed())
        content = _SWEEP.pack(period, first) + steps + values
        offset = slot * self._slots.dtype.itemsize
        self._buffer[offset : offset + _CHECKSUM.size] = bytes(_CHECKSUM.size)
        self._buffer[offset + _CHECKSUM.size : offset + self._slots.dtype.itemsize] = content
        self._buffer[offset : offset + _CHECKSUM.size] = _CHECKSUM.pack(crc32(content))
        if period != AT_END:
            self._order.append(slot)

    @property
    def sweeps(self) -> Sweeps:
        """Those that are kept."""
        return self._slots[self._order]

    def newest(self) -> Sweeps:
        """The last sweep; empty if there is none."""
        return self._slots[self._order[-1:]]

    def pin(self) -> None:
        """Keep what there is now of the newest sweeps: something was found in them. Done once."""
        if not self._is_pinned:
            self._is_pinned.update(self._order[-int(len(self._slots) * _KEPT_NEWEST) :])

    def _least_missed(self) -> int:
        """Which of the old ones, counted by age, leaves the smallest gap in relation to how long ago that was."""
        first = self._slots["first"][self._order].astype(np.float64)
        gaps = (first[2:] - first[:-2]) / (first[-1] - first[1:-1] + 1)
        is_pinned = [slot in self._is_pinned for slot in self._order[1:-1]]
        gaps[np.array(is_pinned, dtype=bool)] = np.inf
        gaps[-int(len(self._slots) * _KEPT_NEWEST) :] = np.inf
        return int(np.argmin(gaps)) + 1


def read_sweeps(folder: Path, model: int, tensors: int) -> Sweeps:
    """The sweeps that a rank has left of a model, those that are whole, by ``first``; not that of its end.

    A sweep that is being written, or was when the process was killed, is left out like one that is damaged.
    """
    found = _whole_slots(folder, model, tensors)
    found = found[found["period"] != AT_END]
    return found[np.argsort(found["first"], kind="stable")]


def read_last(folder: Path, model: int, tensors: int) -> Sweeps:
    """What a rank's parameters were when its recording ended; empty if that is not known."""
    found = _whole_slots(folder, model, tensors)
    return found[found["period"] == AT_END][-1:]


def _whole_slots(folder: Path, model: int, tensors: int) -> Sweeps:
    dtype = sweep_dtype(tensors)
    try:
        data = (folder / fingerprints_file(model)).read_bytes()
    except OSError:
        return np.empty(0, dtype)
    size = dtype.itemsize
    slots = np.frombuffer(data[: len(data) // size * size], dtype)
    is_whole = [
        slot["period"] > 0 and int(slot["crc32"]) == crc32(data[number * size + _CHECKSUM.size : (number + 1) * size])
        for number, slot in enumerate(slots)
    ]
    return slots[np.array(is_whole, dtype=bool)]
