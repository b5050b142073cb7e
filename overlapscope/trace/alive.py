"""When a rank's watchdog was last awake, and the memory then: ``alive.board``."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Final
from zlib import crc32

from overlapscope.trace.log import Problem

_ALIVE: Final = struct.Struct("<qqq")
_CHECKSUM: Final = struct.Struct("<q")


def alive_board(alive_ns: int, rss_bytes: int, limit_bytes: int) -> bytes:
    """The content of the file, with its checksum."""
    content = _ALIVE.pack(alive_ns, rss_bytes, limit_bytes)
    return content + _CHECKSUM.pack(crc32(content))


def read_alive_board(path: Path, problems: list[Problem]) -> tuple[int | None, int | None, int | None]:
    """Host nanoseconds, resident bytes and the limit of memory; None where that is not known.

    Args:
        problems: takes what is wrong with the file.
    """
    try:
        data = path.read_bytes()
    except OSError:
        return None, None, None
    content, checksum = data[: _ALIVE.size], data[_ALIVE.size :]
    if len(content) < _ALIVE.size:  # the process has just made it
        return None, None, None
    if len(checksum) == _CHECKSUM.size and checksum != _CHECKSUM.pack(crc32(content)):
        problems.append(Problem("error", f"{path}: damaged; when this rank was last heard of is not known"))
        return None, None, None
    alive_ns, rss_bytes, limit_bytes = _ALIVE.unpack(content)
    return alive_ns or None, rss_bytes or None, limit_bytes or None
