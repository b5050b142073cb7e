"""The folder of a recording: creation, removal, and a count of its content."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from overlapscope.errors import OverlapScopeError
from overlapscope.trace.folders import (
    find_attempts,
    find_recorded_ranks,
    remove_files,
    remove_if_empty,
    remove_stale_staging_dirs,
    remove_tables,
)
from overlapscope.trace.schema import (
    CONTROL_FILE,
    EVENTS_FILE,
    GROUP_PATTERN,
    JOB_FILE,
    POINT_TO_POINT_PATTERN,
    RANK_FILES,
    STAGED_PATTERN,
    WATCHDOG_FOLDER,
)


@dataclass(frozen=True, kw_only=True)
class RecordingSize:
    """Size of a recording."""

    ranks: int
    """Number of ranks that recorded anything."""
    steps: int
    """Number of steps from the first recorded one, whatever its number is, to the last one of any rank."""
    collectives: int
    """Number of collectives of the rank that launched the most."""
    disk_bytes: int
    """Disk space of the ranks' files."""


def create_empty_folder(folder: Path) -> None:
    """Create the folder of a recording.

    Raises:
        OverlapScopeError: it holds a recording already, or can't be created.
    """
    if has_recording(folder):
        raise OverlapScopeError(f"{folder}: already holds a recording; give another folder with -o")
    make_folder(folder)
    _remove_process_files(folder)  # of a job of which no rank had come to record


def make_folder(folder: Path) -> None:
    """Create a folder, unless it exists.

    Raises:
        OverlapScopeError: it can't be created.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except FileExistsError:
        raise OverlapScopeError(f"{folder}: this is a file; give a folder to record into") from None
    except OSError as error:
        raise OverlapScopeError(f"{folder}: can't be created ({error.strerror})") from None


def has_recording(folder: Path) -> bool:
    """Return whether a rank has recorded into this folder, in any attempt."""
    return bool(find_attempts(folder))


def clear(folder: Path) -> None:
    """Remove a recording with all its attempts, but no other files in its folder.

    Raises:
        OverlapScopeError: one of its files can't be removed.
    """
    try:
        _clear_attempt(folder)
        for attempt in find_attempts(folder):
            _clear_attempt(attempt)
            remove_if_empty(attempt)
    except OSError as error:
        raise OverlapScopeError(f"{folder}: its recording can't be removed ({error.strerror})") from None


def _clear_attempt(folder: Path) -> None:
    for rank_dir in find_recorded_ranks(folder):
        remove_files(rank_dir, (*(kind.name for kind in RANK_FILES), STAGED_PATTERN))
    remove_tables(folder)
    remove_stale_staging_dirs(folder)
    remove_files(folder / WATCHDOG_FOLDER, ("*",))
    _remove_process_files(folder)


def _remove_process_files(folder: Path) -> None:
    from overlapscope.trace.early_ends import EARLY_END_PATTERN
    from overlapscope.trace.process_files import EXITS_PATTERN

    patterns = (EXITS_PATTERN, EARLY_END_PATTERN, CONTROL_FILE, JOB_FILE)
    for file in [file for pattern in patterns for file in folder.glob(pattern)]:
        file.unlink()


def describe(folder: Path) -> RecordingSize | None:
    """Count what was recorded in the folder; None if nothing was."""
    from overlapscope.trace.event_log import read_log
    from overlapscope.trace.schema import Kind

    rank_dirs = find_recorded_ranks(folder)
    if not rank_dirs:
        return None
    collectives = 0
    bounds: list[int] = []
    for rank_dir in rank_dirs:
        if (rank_dir / EVENTS_FILE).exists():
            with suppress(OverlapScopeError):  # unreadable: commands that read the recording report it
                _, records, _ = read_log(rank_dir / EVENTS_FILE)
                of_steps = records["step"][records["kind"] == Kind.STEP]
                bounds += [int(of_steps.min()), int(of_steps.max())] if len(of_steps) else []
        logs = [*rank_dir.glob(GROUP_PATTERN), *rank_dir.glob(POINT_TO_POINT_PATTERN)]
        collectives = max(collectives, sum(map(_last_entry, logs)))
    files = [file for rank_dir in rank_dirs for file in rank_dir.iterdir()]
    return RecordingSize(
        ranks=len(rank_dirs),
        steps=max(bounds) - min(bounds) + 1 if bounds else 0,
        collectives=collectives,
        # st_blocks counts units of 512 bytes, whatever the block size of the file system.
        disk_bytes=sum(file.stat().st_blocks * 512 for file in files),
    )


def _last_entry(log: Path) -> int:
    from overlapscope.trace.collective_log_reader import CollectiveLogFile

    with suppress(OverlapScopeError):
        return CollectiveLogFile(log).latest
    return 0
