"""Removes what OverlapScope has written into a folder, and nothing of the user's that is beside it."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

from overlapscope.trace.format import TABLES_FOLDER

_TABLE_FILES: Final = ("*.parquet", "contents.json")
_PART_FILES: Final = ("[0-9][0-9][0-9][0-9].parquet",)


def remove_files(folder: Path, patterns: Sequence[str]) -> None:
    """Remove files from a folder, and the folder if nothing else is in it.

    Raises:
        OSError: one can't be removed.
    """
    for pattern in patterns:
        for file in list(folder.glob(pattern)):
            file.unlink()
    remove_if_empty(folder)


def remove_tables(path: Path) -> None:
    """Remove the tables of a recording.

    Raises:
        OSError: one can't be removed.
    """
    for part in list((path / TABLES_FOLDER).glob("*/")):
        remove_files(part, _PART_FILES)
    remove_files(path / TABLES_FOLDER, _TABLE_FILES)


def remove_if_empty(folder: Path) -> None:
    """Remove a folder if it is empty."""
    with suppress(OSError):
        folder.rmdir()
