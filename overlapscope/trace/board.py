"""When each gradient was last ready: eight bytes a parameter, in a memory-mapped file.

A gradient hook runs once per parameter and step, in between kernels that have just emptied the processor's caches.
Packing a record there costs several microseconds, storing one number a fraction of that. So hooks store the time
here, and the records are written together when the bucket is ready. If the process dies in between, the board tells
which gradients were ready and which were not, just as records would.
"""

from __future__ import annotations

import mmap
import os
from array import array
from pathlib import Path

from overlapscope.errors import OverlapScopeError
from overlapscope.trace.format import board_file


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
            raise OverlapScopeError(f"{path}: can't be made ({error.strerror})") from None
        self.ready_ns = memoryview(self._buffer).cast("q")
        """Host nanoseconds by parameter number; 0 for a gradient that was never ready."""


def read_board(folder: Path, model: int) -> array[int]:
    """What a board says; empty if there is none."""
    times_ns: array[int] = array("q")
    try:
        data = (folder / board_file(model)).read_bytes()
    except OSError:
        return times_ns
    times_ns.frombytes(data[: len(data) // 8 * 8])
    return times_ns
