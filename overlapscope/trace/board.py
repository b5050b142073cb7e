"""Gradient-ready file: which gradients of a model are ready in the current backward, and since when.

It is memory-mapped and has eight bytes per parameter. A gradient hook runs once per parameter and step, between kernels
that have just emptied the processor's caches. Packing a record there costs several microseconds, storing one number a
fraction of that. So hooks store the time here, and the records are written together when the bucket is ready. If the
process dies or hangs in between, this file tells which gradients were ready and which were not.

Some recordings have two files instead: ``ready_*.board`` tells which gradients are ready, one byte per parameter, and
this one, which is never cleared in that case, when they last became ready, if times were recorded.
"""

from __future__ import annotations

import mmap
import os
from array import array
from pathlib import Path
from typing import Final

from overlapscope.errors import OverlapScopeError
from overlapscope.trace.format import (
    GRADIENT_READY_PATTERN,
    LEGACY_READY_PATTERN,
    gradient_ready_file,
    legacy_ready_file,
)
from overlapscope.trace.log import Problem

READY: Final = 0x0101010101010101
"""Value for a ready gradient whose time is not recorded: changing one byte can't turn it into 0, or 0 into it."""

_LEGACY_READY: Final = 1
"""Value with the same meaning in older recordings."""

_MIN_UPTIME_NS: Final = 1_000_000
"""Lower limit of a plausible time: no training runs within a millisecond after its machine was started."""


class GradientReadyFile:
    """Gradient-ready times of all parameters of one model, in its latest backward.

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
    board = _read_ready_file(folder, model, problems)
    return array("q", (0 if ready_ns in (READY, _LEGACY_READY) else ready_ns for ready_ns in board))


def read_is_ready(folder: Path, model: int, problems: list[Problem]) -> tuple[bool, ...]:
    """Read which gradients are ready in the latest backward, by parameter; empty if the file is missing or damaged.

    Args:
        problems: receives problems with the file.
    """
    path = folder / legacy_ready_file(model)
    try:
        board: bytes | array[int] = path.read_bytes()
    except OSError:
        board = _read_ready_file(folder, model, problems)
    else:
        if set(board) - {0, 1}:
            problems.append(_damaged(path))
            return ()
    return tuple(map(bool, board))


def find_models_with_ready_file(folder: Path) -> list[int]:
    """Return the numbers of a rank's models that have such a file, in either form."""
    files = [*folder.glob(LEGACY_READY_PATTERN), *folder.glob(GRADIENT_READY_PATTERN)]
    numbers = {file.stem.rpartition("_")[2] for file in files}
    return sorted(int(number) for number in numbers if number.isdecimal())


def _read_ready_file(folder: Path, model: int, problems: list[Problem]) -> array[int]:
    times_ns: array[int] = array("q")
    path = folder / gradient_ready_file(model)
    try:
        data = path.read_bytes()
    except OSError:
        return times_ns
    times_ns.frombytes(data[: len(data) // 8 * 8])
    if any(map(_is_invalid_time, times_ns)):
        problems.append(_damaged(path))
        return array("q")
    return times_ns


def _is_invalid_time(ready_ns: int) -> bool:
    """Return whether no gradient hook stores this value: a changed 0 or ``READY``, or an implausible time."""
    if ready_ns in (0, READY, _LEGACY_READY):
        return False
    if ready_ns < _MIN_UPTIME_NS:
        return True
    return any(n.to_bytes(8, "little").count(0) == 7 for n in (ready_ns, ready_ns ^ READY))


def _damaged(path: Path) -> Problem:
    return Problem("error", f"{path}: damaged; which gradients had come is not known")
