"""Removal of files that OverlapScope has written into a folder, without touching the user's files beside them."""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

from overlapscope.trace.format import TABLES_FOLDER

STAGING_PREFIX: Final = f".{TABLES_FOLDER}-"
"""Prefix of the names of staging directories."""

_TABLE_FILES: Final = ("*.parquet", "contents.json")
_PART_FILES: Final = ("[0-9][0-9][0-9][0-9].parquet",)


def remove_files(folder: Path, patterns: Sequence[str]) -> None:
    """Remove matching files from a folder, and the folder if nothing else is in it.

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


def remove_stale_staging_dirs(path: Path, *, except_name: str | None = None) -> None:
    """Remove abandoned staging directories of a recording, except the one with the given name."""
    for staging in path.glob(f"{STAGING_PREFIX}*"):
        if staging.name != except_name and (lock := try_lock(staging)) is not None:
            shutil.rmtree(staging, ignore_errors=True)
            os.close(lock)


def try_lock(folder: Path) -> int | None:
    """Lock a folder; return the lock's file descriptor, to be closed by the caller, or None if it is already locked.

    The lock is held until the descriptor is closed or the process ends.
    """
    descriptor = None
    with suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return descriptor
    if descriptor is not None:
        os.close(descriptor)
    return None


def remove_if_empty(folder: Path) -> None:
    """Remove a folder if it is empty."""
    with suppress(OSError):
        folder.rmdir()
