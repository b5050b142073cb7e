"""Liveness file ``alive.board``: when a rank's watchdog last ran, and the memory use at that time."""

from __future__ import annotations

import struct
from contextlib import suppress
from io import FileIO
from pathlib import Path
from typing import Final
from zlib import crc32

from overlapscope.trace.format import LIVENESS_FILE
from overlapscope.trace.host import host_now_ns
from overlapscope.trace.log import Problem

_ALIVE: Final = struct.Struct("<qqq")
_CHECKSUM: Final = struct.Struct("<q")


def pack_liveness(alive_ns: int, rss_bytes: int, limit_bytes: int) -> bytes:
    """Return the content of the file, with its checksum."""
    content = _ALIVE.pack(alive_ns, rss_bytes, limit_bytes)
    return content + _CHECKSUM.pack(crc32(content))


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
        data = path.read_bytes()
    except OSError:
        return None, None, None
    content, checksum = data[: _ALIVE.size], data[_ALIVE.size :]
    if len(content) < _ALIVE.size:  # the process has just created it
        return None, None, None
    if len(checksum) == _CHECKSUM.size and checksum != _CHECKSUM.pack(crc32(content)):
        problems.append(Problem("error", f"{path}: damaged; when this rank was last heard of is not known"))
        return None, None, None
    alive_ns, rss_bytes, limit_bytes = _ALIVE.unpack(content)
    return alive_ns or None, rss_bytes or None, limit_bytes or None
