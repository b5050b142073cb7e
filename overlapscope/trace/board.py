"""Which gradients of a model have come in the newest backward, and when: eight bytes a parameter, memory-mapped.

A gradient hook runs once per parameter and step, in between kernels that have just emptied the processor's caches.
Packing a record there costs several microseconds, storing one number a fraction of that. So hooks store the time here,
and the records are written together when the bucket is ready. If the process dies or hangs in between, the board tells
which gradients were ready and which were not.

Some recordings have two files instead: ``ready_*.board`` says which have come, a byte a parameter, and this one, which
is never cleared then, when they last came, if that was recorded.
"""

from __future__ import annotations

import mmap
import os
from array import array
from pathlib import Path
from typing import Final

from overlapscope.errors import OverlapScopeError
from overlapscope.trace.format import BOARD_PATTERN, READY_PATTERN, board_file, ready_file

HAS_COME: Final = 1
"""On the board of a gradient whose time is not recorded."""


class ReadinessBoard:
    """The newest readiness of every gradient of one model.

    Args:
        folder: of the rank.
        model: number of the DDP instance in its process.
        parameters: how many there are.

    Raises:
        OverlapScopeError: the file can't be made.
    """

    def __init__(self, folder: Path, model: int, parameters: int) -> None:
        path = folder / board_file(model)
        try:
            with path.open("x+b") as file:
                os.posix_fallocate(file.fileno(), 0, 8 * parameters)
                self._buffer = mmap.mmap(file.fileno(), 8 * parameters)
        except OSError as error:
            raise OverlapScopeError(f"{path}: can't be created ({error.strerror})") from None
        self.ready_ns = memoryview(self._buffer).cast("q")
        """Host nanoseconds by parameter number; ``HAS_COME`` without a time; 0 for a gradient that has not come."""


def read_times_ns(folder: Path, model: int) -> array[int]:
    """When gradients came, by parameter, 0 where that is not known; empty if there is no board."""
    board = _read_board(folder, model)
    return array("q", (0 if ready_ns == HAS_COME else ready_ns for ready_ns in board))


def read_has_come(folder: Path, model: int) -> tuple[bool, ...]:
    """Which gradients have come in the newest backward, by parameter; empty if there is no board."""
    try:
        board: bytes | array[int] = (folder / ready_file(model)).read_bytes()
    except OSError:
        board = _read_board(folder, model)
    return tuple(map(bool, board))


def models_with_board(folder: Path) -> list[int]:
    """The numbers of a rank's models that have one, of either form."""
    files = [*folder.glob(READY_PATTERN), *folder.glob(BOARD_PATTERN)]
    numbers = {file.stem.rpartition("_")[2] for file in files}
    return sorted(int(number) for number in numbers if number.isdecimal())


def _read_board(folder: Path, model: int) -> array[int]:
    times_ns: array[int] = array("q")
    try:
        data = (folder / board_file(model)).read_bytes()
    except OSError:
        return times_ns
    times_ns.frombytes(data[: len(data) // 8 * 8])
    return times_ns
