"""Reading of files of a recording that may be anything: opening a pipe waits for a writer, and a device never ends."""

from __future__ import annotations

import errno
import os
from io import BufferedReader
from pathlib import Path
from stat import S_ISREG
from typing import cast


def open_regular_file(path: Path) -> BufferedReader:
    """Open a file for reading, without waiting.

    Raises:
        OSError: it can't be opened, or it is a folder, a pipe, a device or a socket.
    """
    if not isinstance(path, Path):  # on remote storage
        return cast(BufferedReader, path.open("rb"))
    return os.fdopen(open_descriptor(path), "rb")


def open_descriptor(path: Path) -> int:
    """Open a file for reading like ``open_regular_file``, and return its descriptor, to be closed by the caller."""
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if S_ISREG(os.fstat(fd).st_mode):
        return fd
    os.close(fd)
    raise OSError(errno.EINVAL, "not a file", str(path))


def read_regular_file(path: Path) -> bytes:
    """Return the content of a file.

    Raises:
        OSError: as ``open_regular_file``.
    """
    with open_regular_file(path) as file:
        return file.read()
