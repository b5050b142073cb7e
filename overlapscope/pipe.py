"""Broken pipes: output whose reader may exit early, as in ``overlapscope summary traces/ | head``."""

from __future__ import annotations

import io
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer


def ignore_broken_pipe() -> None:
    """Replace ``sys.stdout`` by one that drops output instead of raising BrokenPipeError once its reader has exited.

    The command continues: its exit code, its stderr and the files it writes don't depend on the reader.
    """
    before = sys.stdout
    if not isinstance(before, io.TextIOWrapper):  # the parent process closed stdout
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
