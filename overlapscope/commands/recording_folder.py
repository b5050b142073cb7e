"""The folder that a recording is made in: ready before, described after."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from overlapscope.errors import OverlapScopeError
from overlapscope.trace.format import (
    BOARD_PATTERN,
    CALL_SITES_FILE,
    EVENTS_FILE,
    INCIDENT_PATTERN,
    PLANS_FILE,
    RANK_FILE,
    RUN_FILE,
    TABLES_FOLDER,
)

_RANK_FILES: Final = (
    *(EVENTS_FILE, RUN_FILE, RANK_FILE, PLANS_FILE, CALL_SITES_FILE),
    *(BOARD_PATTERN, INCIDENT_PATTERN, "*.json.part"),
)
_TABLE_FILES: Final = ("*.parquet", "contents.json")


@dataclass(frozen=True, kw_only=True)
class Recorded:
    """What a run has left behind."""

    ranks: int
    steps: int
    """Of the rank that got furthest."""
    disk_bytes: int


def make_ready(folder: Path) -> None:
    """Make the folder.

    Raises:
        OverlapScopeError: it holds a recording, or can't be made.
    """
    if holds_recording(folder):
        raise OverlapScopeError(f"{folder}: already holds a recording; give another folder with -o")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except FileExistsError:
        raise OverlapScopeError(f"{folder}: is a file; give a folder to record into") from None
    except OSError as error:
        raise OverlapScopeError(f"{folder}: can't be made ({error.strerror})") from None


def holds_recording(folder: Path) -> bool:
    """A rank has recorded into this folder."""
    return next(_rank_folders(folder), None) is not None


def clear(folder: Path) -> None:
    """Remove a recording, and nothing else that may be in its folder.

    Raises:
        OverlapScopeError: a file of it can't be removed.
    """
    try:
        for rank_dir in list(_rank_folders(folder)):
            _remove(rank_dir, _RANK_FILES)
        _remove(folder / TABLES_FOLDER, _TABLE_FILES)
    except OSError as error:
        raise OverlapScopeError(f"{folder}: its recording can't be removed ({error.strerror})") from None


def describe(folder: Path) -> Recorded | None:
    """What was recorded in the folder, or None if nothing was."""
    from overlapscope.trace.format import Kind
    from overlapscope.trace.log import read_log

    rank_dirs = list(_rank_folders(folder))
    if not rank_dirs:
        return None
    steps = 0
    for rank_dir in rank_dirs:
        with suppress(OverlapScopeError):  # unreadable: whoever looks at the recording is told
            _, records, _ = read_log(rank_dir / EVENTS_FILE)
            steps = max(steps, int(records["step"][records["kind"] == Kind.STEP].astype("int64").max(initial=-1)) + 1)
    files = [file for rank_dir in rank_dirs for file in rank_dir.iterdir()]
    return Recorded(
        ranks=len(rank_dirs),
        steps=steps,
        # st_blocks counts 512 bytes each, whatever the file system's block is.
        disk_bytes=sum(file.stat().st_blocks * 512 for file in files),
    )


def remove_if_empty(folder: Path) -> None:
    """Leave no empty folder behind."""
    with suppress(OSError):
        folder.rmdir()


def _rank_folders(folder: Path) -> Iterator[Path]:
    return (log.parent for log in folder.glob(f"rank_*/{EVENTS_FILE}") if log.parent.name[5:].isdecimal())


def _remove(folder: Path, patterns: tuple[str, ...]) -> None:
    """Remove our files from a folder, and the folder if nobody else has put a file there."""
    for pattern in patterns:
        for file in list(folder.glob(pattern)):
            file.unlink()
    remove_if_empty(folder)
