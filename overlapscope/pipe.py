"""Output for a reader who may leave before its end, as in ``overlapscope summary traces/ | head``."""

from __future__ import annotations

import io
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer


def outlive_the_reader() -> None:
    """From now on, what is printed when nobody reads it any more is dropped, and no error.

    The command goes on: its exit code, its stderr and the files it writes are the same whoever reads.
    """
    before = sys.stdout
    if not isinstance(before, io.TextIOWrapper):  # closed by whoever started this process
        return
    sys.stdout = io.TextIOWrapper(
        io.BufferedWriter(_LenientFile(before.fileno(), "w", closefd=False)),
        encoding=before.encoding,
        errors=before.errors,
        line_buffering=before.line_buffering,
        write_through=before.write_through,
    )


class _LenientFile(io.FileIO):
    def write(self, data: ReadableBuffer) -> int:
        try:
            return super().write(data)
        except BrokenPipeError:
            return memoryview(data).nbytes
