"""The header of a log of slots, read with the file's size, while a process may be closing it."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Protocol, TypeVar

from overlapscope.errors import OverlapScopeError
from overlapscope.trace.format import HEADER_BYTES


class RingHeader(Protocol):
    """What the headers of event logs and collective logs have in common."""

    @property
    def closed(self) -> bool:
        """Whether the log is complete, and as long as what is in it."""

    @property
    def full_bytes(self) -> int:
        """How long the file is until then."""


Header = TypeVar("Header", bound=RingHeader)


def header_and_size(fd: int, path: Path, unpack: Callable[[bytes, Path], Header]) -> tuple[Header, int]:
    """Both are read again if they don't fit: the log may just have been closed, which changes one after the other.

    Args:
        fd: of the file, open.
        unpack: makes a header of the first page.

    Raises:
        OverlapScopeError: the page is no header.
    """
    with suppress(OverlapScopeError):
        header, size = unpack(os.pread(fd, HEADER_BYTES, 0), path), os.fstat(fd).st_size
        if header.closed or size >= header.full_bytes:
            return header, size
    return unpack(os.pread(fd, HEADER_BYTES, 0), path), os.fstat(fd).st_size
