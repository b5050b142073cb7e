"""Header of a ring log file, read consistently with the file's size while a process may be closing it."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Protocol, TypeVar

from overlapscope.errors import OverlapScopeError
from overlapscope.trace.format import HEADER_BYTES


class RingHeader(Protocol):
    """Common interface of the headers of event logs and collective logs."""

    @property
    def closed(self) -> bool:
        """Return whether the log is complete and truncated to its content."""

    @property
    def full_bytes(self) -> int:
        """Return the size of the file until it is closed."""


Header = TypeVar("Header", bound=RingHeader)


def read_header_and_size(fd: int, path: Path, unpack: Callable[[bytes, Path], Header]) -> tuple[Header, int]:
    """Read the header and the file's size, consistently.

    Both are read again if they don't match: the log may just have been closed, which changes one after the other.

    Args:
        fd: descriptor of the open file.
        unpack: parses a header from the first page.

    Raises:
        OverlapScopeError: the page is not a valid header.
    """
    with suppress(OverlapScopeError):
        header, size = unpack(os.pread(fd, HEADER_BYTES, 0), path), os.fstat(fd).st_size
        if header.closed or size >= header.full_bytes:
            return header, size
    return unpack(os.pread(fd, HEADER_BYTES, 0), path), os.fstat(fd).st_size
