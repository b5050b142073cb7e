"""A source of facts about the machine, and files of the kernel that are read again and again."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

_MOST_BYTES: Final = 16 * 1024


class SourceLostError(Exception):
    """A source can't be read any more: it is gone, or broken."""


class Source(Protocol):
    """Something that has facts, as ``overlapscope.trace.machine_facts`` lists them."""

    name: str
    """Kind and identity: ranks that use the same one name it alike."""
    label: str
    """Name for people."""

    def read(self) -> Mapping[str, float]:
        """Return the facts that can be read now.

        Raises:
            SourceLostError: there is nothing left to read.
        """

    def take_events(self) -> Sequence[tuple[str, float]]:
        """Return what has happened since the last call: the name and value of each event."""

    def missing(self) -> Mapping[str, str]:
        """Return why facts can't be read, by their names."""

    def close(self) -> None:
        """Give back what was opened."""


@dataclass(frozen=True, kw_only=True)
class Roots:
    """Where the kernel's files are; tests have trees of their own."""

    proc: Path = Path("/proc")
    sys: Path = Path("/sys")


class KernelFile:
    """A small file of the kernel. It stays open, because opening it costs more than reading it.

    Raises:
        OSError: it can't be opened, or has nothing to read.
    """

    def __init__(self, path: Path) -> None:
        self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            self.read()
        except OSError:
            self.close()
            raise

    def read(self) -> str:
        """Return its current content.

        Raises:
            OSError: it is gone, as the interface is that it describes.
        """
        return os.pread(self._descriptor, _MOST_BYTES, 0).decode(errors="replace")

    def close(self) -> None:
        """Close it."""
        os.close(self._descriptor)


class KernelFiles:
    """The files of one source by a name; those that don't exist are left out."""

    def __init__(self, paths: Mapping[str, Path]) -> None:
        self._files: dict[str, KernelFile] = {}
        for name, path in paths.items():
            with suppress(OSError):
                self._files[name] = KernelFile(path)

    @property
    def names(self) -> set[str]:
        """Return the names of the files that exist."""
        return {*self._files}

    def read(self, name: str) -> str:
        """Return the content of a file; empty if it is missing."""
        with suppress(OSError, KeyError):
            return self._files[name].read()
        return ""

    def read_number(self, name: str) -> float | None:
        """Return the number in a file; None if there is none."""
        with suppress(ValueError):
            return float(self.read(name))
        return None

    def read_table(self, name: str) -> dict[str, float]:
        """Return the numbers of a file of lines like ``nr_throttled 12`` or ``VmSwap:  12 kB``, by their names."""
        found = {}
        for line in self.read(name).splitlines():
            with suppress(ValueError, IndexError):
                key, value = line.split()[:2]
                found[key.rstrip(":")] = float(value)
        return found

    def close(self) -> None:
        """Close all of them."""
        for file in self._files.values():
            file.close()
        self._files.clear()


def read_pressure_us(content: str) -> float | None:
    """Return the time of ``some avg10=... total=12345`` in a file of PSI; None if there is none."""
    for line in content.splitlines():
        if line.startswith("some "):
            with suppress(ValueError):
                return float(line.rpartition("total=")[2])
    return None
