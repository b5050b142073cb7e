"""Reading of files of a recording that may be anything: opening a pipe waits for a writer, and a device never ends."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from fnmatch import filter as filter_names
from io import BufferedReader
from itertools import chain
from pathlib import Path
from stat import S_ISREG
from typing import Any, Final, TypeVar, cast

T = TypeVar("T")

_MOST_REMEMBERED_BYTES: Final = 65_536


@dataclass(frozen=True)
class _Memory:
    """What one reader has read of small files and folders, by path."""

    contents: dict[str, bytes | None] = field(default_factory=dict)
    """Content of each file; None if there is no such file."""
    names: dict[str, tuple[str, ...]] = field(default_factory=dict)
    parsed: dict[tuple[str, str], Any] = field(default_factory=dict)
    """What files hold, by the name of the parser and path."""


_memory: ContextVar[_Memory | None] = ContextVar("memory", default=None)  # each thread has its own


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
    memory = _memory.get()
    if memory is None:
        return _read(path)
    key = str(path)
    if key not in memory.contents:
        try:
            content = _read(path)
        except FileNotFoundError:
            memory.contents[key] = None
            raise
        if len(content) > _MOST_REMEMBERED_BYTES:
            return content
        memory.contents[key] = content
    known = memory.contents[key]
    if known is None:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), key)
    return known


@contextmanager
def remember_small_files() -> Iterator[None]:
    """Read and parse each small file and list each folder once, for as long as this lasts, in this thread.

    For a reader of one recording, while nobody writes it: traces and diagnoses read the same small files of each rank,
    several times.
    """
    before = _memory.set(_Memory())
    try:
        yield
    finally:
        _memory.reset(before)


def parse_once(what: str, path: Path | str, parse: Callable[[], T]) -> T:
    """Return what a parser makes of a file; from before, where ``remember_small_files`` holds. Nobody may change it.

    Args:
        what: name of the parser.
    """
    memory, key = _memory.get(), (what, str(path))
    if memory is None:
        return parse()
    if key not in memory.parsed:
        memory.parsed[key] = parse()
    return cast(T, memory.parsed[key])


def remember(what: str, path: Path | str, value: object) -> None:
    """Keep what has been made of a file, for ``parse_once``, where ``remember_small_files`` holds."""
    if (memory := _memory.get()) is not None:
        memory.parsed[what, str(path)] = value


def has_file(folder: Path, name: str) -> bool:
    """Return whether there is a file of this name; False if the folder may not be read."""
    if _memory.get() is None:
        return os.path.exists(f"{folder}/{name}")  # Path.exists raises an error then
    return name in _list_names(folder)


def match_files(folder: Path, *patterns: str) -> list[Path]:
    """Return what is in a folder under names that match a pattern, in no particular order; nothing without a folder."""
    return [folder / name for name in match_names(folder, *patterns)]


def match_names(folder: Path, *patterns: str) -> list[str]:
    """Return the names in a folder that match a pattern.

    ``Path.glob`` takes several times as long, and is asked of each rank's folder again and again.
    """
    names = _list_names(folder)
    return list(dict.fromkeys(chain.from_iterable(filter_names(names, pattern) for pattern in patterns)))


def _list_names(folder: Path) -> tuple[str, ...]:
    memory, key = _memory.get(), str(folder)
    if memory is not None and key in memory.names:
        return memory.names[key]
    try:
        names = tuple(os.listdir(folder))
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return ()
    if memory is not None:
        memory.names[key] = names
    return names


def _read(path: Path) -> bytes:
    with open_regular_file(path) as file:
        return file.read()
