"""Files that a running rank rewrites in place, memory-mapped or small, so that they are right whenever it dies.

``alive.bin`` tells when its watchdog last ran, ``gradients_M.bin`` which gradients of model M are ready and since
when, ``fingerprints_M.bin`` how the model's parameters changed.
"""

from __future__ import annotations

import mmap
import os
import struct
from array import array
from contextlib import suppress
from io import FileIO
from pathlib import Path
from typing import Any, Final
from zlib import crc32

import numpy as np
import numpy.typing as npt

from overlapscope.errors import OverlapScopeError, Problem
from overlapscope.trace.clocks import host_now_ns
from overlapscope.trace.regular_file import match_files, read_regular_file
from overlapscope.trace.schema import GRADIENT_READY_PATTERN, LIVENESS_FILE, gradient_ready_file

_ALIVE: Final = struct.Struct("<qqq")
_ALIVE_CHECKSUM: Final = struct.Struct("<q")


def pack_liveness(alive_ns: int, rss_bytes: int, limit_bytes: int) -> bytes:
    """Return the content of the file, with its checksum."""
    content = _ALIVE.pack(alive_ns, rss_bytes, limit_bytes)
    return content + _ALIVE_CHECKSUM.pack(crc32(content))


class LivenessFile:
    """Liveness file of a rank, rewritten each time the watchdog runs; missing if the disk is full.

    Args:
        folder: folder of the rank.
    """

    def __init__(self, folder: Path) -> None:
        self._file: FileIO | None = None
        with suppress(OSError):
            self._file = FileIO(folder / LIVENESS_FILE, "w")

    def write(self, rss_bytes: int, limit_bytes: int) -> None:
        """Record that the rank is alive now, with this memory use and limit."""
        if self._file is not None:
            with suppress(OSError):
                self._file.seek(0)
                self._file.write(pack_liveness(host_now_ns(), rss_bytes, limit_bytes))

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()


def read_alive_file(path: Path, problems: list[Problem]) -> tuple[int | None, int | None, int | None]:
    """Read host nanoseconds, resident bytes and the memory limit in bytes; None for each that is unknown.

    Args:
        problems: receives problems with the file.
    """
    try:
        data = read_regular_file(path)
    except OSError:
        return None, None, None
    content, checksum = data[: _ALIVE.size], data[_ALIVE.size :]
    if not data:  # the process has just created it
        return None, None, None
    if checksum != _ALIVE_CHECKSUM.pack(crc32(content)):
        problems.append(Problem("error", f"{path}: damaged; when the watchdog of this rank last ran is unknown"))
        return None, None, None
    alive_ns, rss_bytes, limit_bytes = _ALIVE.unpack(content)
    return alive_ns or None, rss_bytes or None, limit_bytes or None


PASS_FIELDS: Final = (
    ("crc32", "<u4"),
    ("period", "<u4"),
    ("first", "<i8"),
)
"""Name and numpy type of each field of a pass, packed. Two arrays follow: ``steps``, a u32 per tensor, and ``values``,
an i64 per tensor, 0 if it was not taken."""
FINAL_PASS: Final = 2**32 - 1
"""Value of ``period`` for the pass at the end of the recording."""
MAX_PASSES: Final = 512
_MOST_BYTES: Final = 4 * 1024**2
_MIN_PASSES: Final = 32
_PROTECTED_SHARE: Final = 1 / 4
"""Share of the slots that is reserved for the latest passes."""
_PASS: Final = struct.Struct("<Iq")
_FINGERPRINT_CHECKSUM: Final = struct.Struct("<I")

FingerprintPasses = npt.NDArray[Any]
"""A structured array of ``fingerprint_pass_dtype``, sorted by ``first``."""


def fingerprints_file(model: int) -> str:
    """Return the name of the file with the fingerprints of one model's parameters."""
    return f"fingerprints_{model}.bin"


def fingerprint_pass_dtype(tensors: int) -> np.dtype[Any]:
    """Return the numpy type of a fingerprint pass over this number of tensors."""
    return np.dtype([*PASS_FIELDS, ("steps", "<u4", (tensors,)), ("values", "<i8", (tensors,))])


class FingerprintFile:
    """Writer of the fingerprint passes of one model, which also gives access to those still in the file.

    A fingerprint is taken at the beginning of a forward with a reduction, when parameters don't change, and is
    identified by the number of reductions so far. Not all parameters are fingerprinted every time: in a pass of
    ``period`` reductions, a power of two, each is fingerprinted once, at the reduction whose number is congruent to
    its own. So ranks with different periods have all those of the longer one in common. Example: a parameter with the
    number 13 is fingerprinted at reductions 1, 5, 9, 13 ... with period 4, and at 5, 13 ... with
    period 8.

    The parameters at the end of the recording are a separate pass, with ``FINAL_PASS`` as its period, because they may
    have changed a lot since the last forward.

    The file has a fixed number of slots, one per pass. When they are full, old passes are overwritten such that the
    passes of a long job are dense at its end, and increasingly sparse towards its beginning.

    Args:
        folder: folder of the rank.
        model: number of the DDP instance in its process.
        tensors: number of fingerprints in a pass.

    Raises:
        OverlapScopeError: the file can't be created.
    """

    def __init__(self, folder: Path, model: int, tensors: int) -> None:
        dtype = fingerprint_pass_dtype(tensors)
        slots = max(_MIN_PASSES, min(MAX_PASSES, _MOST_BYTES // dtype.itemsize))
        path = folder / fingerprints_file(model)
        try:
            with path.open("x+b") as file:
                os.posix_fallocate(file.fileno(), 0, slots * dtype.itemsize)
                self._buffer = mmap.mmap(file.fileno(), slots * dtype.itemsize)
        except OSError as error:
            raise OverlapScopeError(f"{path}: can't be created ({error.strerror})") from None
        self._slots: FingerprintPasses = np.frombuffer(self._buffer, dtype)
        self._order: list[int] = []
        """Slots in use, sorted by ``first``."""
        self._is_pinned: set[int] = set()

    def add(self, period: int, first: int, steps: bytes, values: bytes) -> None:
        """Write a pass, overwriting an old one if no slot is free.

        Args:
            period: period of the pass; ``FINAL_PASS`` if it is the last, which is not included in ``passes``.
            first: number of reductions at its beginning.
            steps: step in which each tensor was taken.
            values: fingerprints of the tensors.
        """
        slot = len(self._order)
        if slot == len(self._slots):
            slot = self._order.pop(self._find_most_dispensable())
        content = _PASS.pack(period, first) + steps + values
        offset = slot * self._slots.dtype.itemsize
        self._buffer[offset : offset + _FINGERPRINT_CHECKSUM.size] = bytes(_FINGERPRINT_CHECKSUM.size)
        self._buffer[offset + _FINGERPRINT_CHECKSUM.size : offset + self._slots.dtype.itemsize] = content
        self._buffer[offset : offset + _FINGERPRINT_CHECKSUM.size] = _FINGERPRINT_CHECKSUM.pack(crc32(content))
        if period != FINAL_PASS:
            self._order.append(slot)

    @property
    def passes(self) -> FingerprintPasses:
        """Return the passes that are still in the file."""
        return self._slots[self._order]

    def latest(self) -> FingerprintPasses:
        """Return the latest pass; empty if there is none."""
        return self._slots[self._order[-1:]]

    def pin(self) -> None:
        """Protect the latest passes from being overwritten: a difference was found in them. Has an effect only once."""
        if not self._is_pinned:
            self._is_pinned.update(self._order[-int(len(self._slots) * _PROTECTED_SHARE) :])

    def _find_most_dispensable(self) -> int:
        """Return the index, by age, of the old pass whose removal leaves the smallest gap relative to its age.

        Example: passes begin at reductions 0, 8, 16, 24. Without 8 the gap is 16 - 0 at age 24 - 8, without 16 it is 24
        - 8 at age 24 - 16. With the age increased by 1, that is 16/17 and 16/9: the pass at 8, with index 1, is
        removed.
        """
        first = self._slots["first"][self._order].astype(np.float64)
        gaps = (first[2:] - first[:-2]) / (first[-1] - first[1:-1] + 1)
        is_pinned = [slot in self._is_pinned for slot in self._order[1:-1]]
        gaps[np.array(is_pinned, dtype=bool)] = np.inf
        gaps[-int(len(self._slots) * _PROTECTED_SHARE) :] = np.inf
        return int(np.argmin(gaps)) + 1


def read_fingerprint_passes(folder: Path, model: int, tensors: int) -> FingerprintPasses:
    """Read the complete passes of a model, sorted by ``first``, without the one at the end of the recording.

    A pass that is being written, or was when the process was killed, is skipped like a damaged one.
    """
    found = _whole_slots(folder, model, tensors)
    found = found[found["period"] != FINAL_PASS]
    return found[np.argsort(found["first"], kind="stable")]


def read_final_pass(folder: Path, model: int, tensors: int) -> FingerprintPasses:
    """Read the pass at the end of a rank's recording; empty if there is none."""
    found = _whole_slots(folder, model, tensors)
    return found[found["period"] == FINAL_PASS][-1:]


def _whole_slots(folder: Path, model: int, tensors: int) -> FingerprintPasses:
    dtype = fingerprint_pass_dtype(tensors)
    try:
        data = read_regular_file(folder / fingerprints_file(model))
    except OSError:
        return np.empty(0, dtype)
    slots = np.frombuffer(data[: len(data) // dtype.itemsize * dtype.itemsize], dtype)
    return slots[find_complete_passes(slots)]


def find_complete_passes(slots: FingerprintPasses) -> npt.NDArray[np.bool_]:
    """Return which slots hold a pass that was written to its end, and not changed since."""
    is_complete: npt.NDArray[np.bool_] = (slots["period"] > 0) & (slots["crc32"] == compute_pass_checksums(slots))
    return is_complete


def compute_pass_checksums(slots: FingerprintPasses) -> npt.NDArray[np.uint32]:
    """Compute the CRC-32 of each pass without its leading checksum, shape (N,)."""
    data, size = slots.tobytes(), slots.dtype.itemsize
    begins = range(0, len(data), size)
    checksums = (crc32(data[begin + _FINGERPRINT_CHECKSUM.size : begin + size]) for begin in begins)
    return np.fromiter(checksums, np.uint32, len(slots))


READY: Final = 0x0101010101010101
"""Value for a ready gradient whose time is not recorded: changing one byte can't turn it into 0, or 0 into it."""

_MIN_UPTIME_NS: Final = 1_000_000
"""Lower limit of a plausible time: no training runs within a millisecond after its machine was started."""


class GradientReadyFile:
    """Gradient-ready times of all parameters of one model, in its latest backward.

    It has eight bytes per parameter. A gradient hook runs once per parameter and step, between kernels that have just
    emptied the processor's caches. Packing a record there costs several microseconds, storing one number a fraction of
    that. So hooks store the time here, and the records are written together when the bucket is ready. If the process
    dies or hangs in between, this file tells which gradients were ready and which were not.

    Args:
        folder: folder of the rank.
        model: number of the DDP instance in its process.
        parameters: number of parameters.

    Raises:
        OverlapScopeError: the file can't be created.
    """

    def __init__(self, folder: Path, model: int, parameters: int) -> None:
        path = folder / gradient_ready_file(model)
        try:
            with path.open("x+b") as file:
                os.posix_fallocate(file.fileno(), 0, 8 * parameters)
                self._buffer = mmap.mmap(file.fileno(), 8 * parameters)
        except OSError as error:
            raise OverlapScopeError(f"{path}: can't be created ({error.strerror})") from None
        self.ready_ns = memoryview(self._buffer).cast("q")
        """Host nanoseconds by parameter number; ``READY`` if the time is not recorded; 0 if the gradient is not
        ready."""


def read_ready_times_ns(folder: Path, model: int, problems: list[Problem]) -> array[int]:
    """Read when gradients became ready, by parameter; 0 if unknown, empty if the file is missing or damaged.

    Args:
        problems: receives problems with the file.
    """
    times_ns = _read_ready_file(folder, model, problems)
    return array("q", (0 if ready_ns == READY else ready_ns for ready_ns in times_ns))


def read_is_ready(folder: Path, model: int, problems: list[Problem]) -> tuple[bool, ...]:
    """Read which gradients are ready in the latest backward, by parameter; empty if the file is missing or damaged.

    Args:
        problems: receives problems with the file.
    """
    return tuple(map(bool, _read_ready_file(folder, model, problems)))


def find_models_with_ready_file(folder: Path) -> list[int]:
    """Return the numbers of a rank's models that have such a file."""
    numbers = [file.stem.rpartition("_")[2] for file in match_files(folder, GRADIENT_READY_PATTERN)]
    return sorted(int(number) for number in numbers if number.isdecimal())


def _read_ready_file(folder: Path, model: int, problems: list[Problem]) -> array[int]:
    times_ns: array[int] = array("q")
    path = folder / gradient_ready_file(model)
    try:
        data = read_regular_file(path)
    except OSError:
        return times_ns
    times_ns.frombytes(data[: len(data) // 8 * 8])
    if any(map(_is_invalid_time, times_ns)):
        problems.append(Problem("error", f"{path}: damaged; which gradients were ready is unknown"))
        return array("q")
    return times_ns


def _is_invalid_time(ready_ns: int) -> bool:
    """Return whether no gradient hook stores this value: a changed 0 or ``READY``, or an implausible time."""
    if ready_ns in (0, READY):
        return False
    if ready_ns < _MIN_UPTIME_NS:
        return True
    return any(n.to_bytes(8, "little").count(0) == 7 for n in (ready_ns, ready_ns ^ READY))
