"""Folders of a recording: attempts, ranks, and removal without touching a user's files.

A launcher such as ``torchrun --max-restarts`` restarts all ranks when one has failed. Each attempt is a separate
recording: the first is in the folder of the run, and ``traces/restart_1`` is next to ``traces/rank_0``,
``traces/rank_1`` ...

On remote storage (``s3://bucket/run``, ``gs://...``, and other URLs that fsspec supports) only the tables are read,
which exist once a recording was opened where it is stored.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import stat
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeGuard, cast

from overlapscope.errors import OverlapScopeError
from overlapscope.trace.regular_file import match_names, parse_once
from overlapscope.trace.schema import (
    ENDED_FILE,
    EVENTS_FILE,
    GROUP_PATTERN,
    JOINING_FILE,
    MANIFEST_FILE,
    POINT_TO_POINT_PATTERN,
    SIGNATURES_FILE,
    TABLES_FOLDER,
    find_file_kind,
)

STAGING_PREFIX: Final = f".{TABLES_FOLDER}-"
"""Prefix of the names of staging directories."""

_TABLE_FILES: Final = ("*.parquet", "contents.json")
_SHARD_FILES: Final = ("[0-9][0-9][0-9][0-9].parquet",)


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
    for folder in list((path / TABLES_FOLDER).glob("*/")):
        remove_files(folder, _SHARD_FILES)
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


_PREFIX: Final = "restart_"
_LOGS: Final = (EVENTS_FILE, SIGNATURES_FILE, JOINING_FILE)
"""Files of which the folder of every recorded rank has at least one: without DDP there is no event log, and a rank that
is still waiting for the others has only the last."""


def restart_folder(first: Path, number: int) -> Path:
    """Return the folder of a later attempt.

    Args:
        first: folder of the first attempt, which is the run's folder.
        number: number of the attempt, from 1.
    """
    return first / f"{_PREFIX}{number}"


def attempt_number(path: Path) -> int:
    """Return the number of an attempt from the name of its folder; 0 is the first attempt."""
    name = path.resolve().name
    number = name.removeprefix(_PREFIX)
    return int(number) if name.startswith(_PREFIX) and number.isdecimal() else 0


def find_attempts(first: Path) -> list[Path]:
    """Return the attempts of a job that have left files, in order.

    Args:
        first: folder of the run.
    """
    later = sorted((path for path in first.glob(f"{_PREFIX}*") if attempt_number(path)), key=attempt_number)
    return [path for path in (first, *later) if find_recorded_ranks(path)]


def find_sibling_attempts(path: Path) -> list[Path]:
    """Return all attempts of the job to which an attempt belongs, including that attempt.

    Args:
        path: folder of any attempt.
    """
    if not attempt_number(path):
        return find_attempts(path)
    parent = path.parent if path.name.startswith(_PREFIX) else path.resolve().parent
    attempts = find_attempts(parent)
    return attempts if parent in attempts else [path]


def find_latest_attempt(first: Path) -> Path:
    """Return the last attempt that has left files; the folder of the run if none has."""
    return [first, *find_attempts(first)][-1]


def find_recorded_ranks(folder: Path) -> list[Path]:
    """Return the folders of ranks that have begun to record directly into this folder, in no particular order."""
    of_ranks = (path for path in folder.glob("rank_*") if is_rank_folder_name(path.name))
    return [path for path in of_ranks if any((path / log).exists() for log in _LOGS)]


def is_rank_folder_name(name: str) -> bool:
    """Return whether a folder of this name holds the files of a rank."""
    return name.startswith("rank_") and name.removeprefix("rank_").isdecimal()


_MOST_RANKS: Final = 1_000_000
"""Larger world sizes are treated as damage."""


def find_rank_folders(path: Path) -> dict[int, Path]:
    """Return the rank folders of a recording, by rank.

    Raises:
        OverlapScopeError: no such folder, or no recording in it.
    """
    try:
        return dict(parse_once("rank folders", path, partial(_rank_folders_in, path)))
    except OSError as error:
        raise OverlapScopeError(f"{path}: can't be read ({error.strerror})") from None


def _rank_folders_in(path: Path) -> dict[int, Path]:
    try:
        mode = path.stat().st_mode  # Path.exists() is silent about permissions from Python 3.14 on
    except (FileNotFoundError, NotADirectoryError):
        raise OverlapScopeError(
            f"{path}: no such folder; record one with 'overlapscope record -o {path} -- torchrun ...'"
        ) from None
    if not stat.S_ISDIR(mode):
        raise OverlapScopeError(f"{path}: this is a file; give the folder that 'overlapscope record -o' wrote")
    found = [folder for folder in path.glob("rank_*") if _is_rank_folder(folder)]
    if found:
        return dict(sorted((int(folder.name.removeprefix("rank_")), folder) for folder in found))
    runs = sorted({folder.parent.name for folder in path.glob("*/rank_*") if folder.is_dir()})
    if runs:
        raise OverlapScopeError(f"{path}: holds {len(runs)} recordings; give one of them: {', '.join(runs[:5])}")
    if (path / EVENTS_FILE).exists() or any(path.glob(GROUP_PATTERN)):
        raise OverlapScopeError(f"{path}: this is the folder of one rank; give its parent, {path.resolve().parent}")
    what = "not a recording (no rank_0, rank_1 ... in it)" if any(path.iterdir()) else "empty"
    raise OverlapScopeError(f"{path}: {what}; record a run with 'overlapscope record -o FOLDER -- torchrun ...'")


def _is_rank_folder(folder: Path) -> bool:
    """Return whether a folder has the name of a rank's, and anything of a rank in it, or may not be read."""
    try:
        is_one = is_rank_folder_name(folder.name) and folder.is_dir()
        return is_one and any(find_file_kind(name) is not None for name in os.listdir(folder))
    except PermissionError:
        return True


def has_collective_logs(folder: Path) -> bool:
    """Return whether a rank left a collective log, if only of sends and receives, as a parameter server does."""
    return bool(match_names(folder, GROUP_PATTERN, POINT_TO_POINT_PATTERN))


def has_finished_recording(folder: Path) -> bool:
    """Return whether a rank has finished recording, so that nothing more will be written."""
    return (folder / ENDED_FILE).exists() or (folder / MANIFEST_FILE).exists()


def parse_expected_ranks(run: dict[str, Any]) -> tuple[int, ...]:
    """Return the ranks that train together, according to one rank's ``run.json``."""
    ranks = run.get("ranks")
    if isinstance(ranks, list) and {*map(type, ranks)} <= {int}:  # of a thousand ranks on each of a thousand
        return tuple(ranks)
    return ranks_in_world(run.get("world_size", 0))


def parse_unix_offset_ns(rank_info: dict[str, Any]) -> int | None:
    """Return the wall clock minus the host clock, according to ``rank.json``; None if unknown."""
    try:
        sample = rank_info["clock_samples"][0]
        return int(sample["unix_ns"]) - int(sample["monotonic_ns"])
    except (ValueError, KeyError, IndexError, TypeError):
        return None


def read_import_source(run: dict[str, Any]) -> str | None:
    """Return the tool whose traces were converted to this recording; None if it was recorded."""
    imported = run.get("imported")
    return str(imported.get("from", "another tool")) if isinstance(imported, dict) else None


def ranks_in_world(size: object) -> tuple[int, ...]:
    """Return all ranks of a job of this size; none if the size is not plausible."""
    return tuple(range(size)) if isinstance(size, int) and size <= _MOST_RANKS else ()


def is_url(location: str) -> bool:
    """Return whether a user's argument is a URL."""
    return "://" in location


def resolve_recording_path(location: str) -> Path:
    """Return the folder for a path or URL that a user gave.

    Returns:
        For a URL, an object with the methods of a path that readers of tables use.

    Raises:
        OverlapScopeError: this kind of URL is not supported.
    """
    if not is_url(location):
        return Path(location)
    try:
        from upath import UPath
    except ImportError:
        raise OverlapScopeError(f"{location}: reading URLs needs 'pip install overlapscope[remote]'") from None
    try:
        return cast(Path, UPath(location))
    except (ValueError, ImportError) as error:
        raise OverlapScopeError(f"{location}: {' '.join(str(error).split())}") from None


def is_remote(path: Path | str) -> TypeGuard[Path]:
    """Return whether a folder is on remote storage."""
    return not isinstance(path, (Path, str))
