"""Attempt number of a restarted job, which decides the folder that this process records into.

Launchers restart all ranks when one has failed, and set no variable that identifies the attempt on every host. But the
processes of one attempt exist at the same time: a process whose rank was already taken by another process, or that
began after some rank had ended, belongs to a new attempt.
"""

from __future__ import annotations

import os
from functools import lru_cache
from pathlib import Path
from typing import Any

from overlapscope.diagnosis.process import is_on_this_host, parse_written_ns, read_liveness, read_process_start_ns
from overlapscope.trace.attempts import attempt_number, find_latest_attempt, restart_folder
from overlapscope.trace.environment import read_recording_options
from overlapscope.trace.folders import read_json
from overlapscope.trace.format import (
    ENDED_FILE,
    EVENTS_FILE,
    JOINING_FILE,
    RANK_FILE,
    SIGNATURES_FILE,
    rank_folder,
)


def find_attempt_folder(first: Path, rank: int) -> Path:
    """Return the folder of the attempt that this process belongs to: the given one, or one inside it.

    Args:
        first: folder of the run. If the script itself named it, it holds restarts of torchrun and nothing else: running
            such a script a second time is an error because the folder is in use.
        rank: rank of this process.

    Raises:
        OverlapScopeError: a variable has an invalid value.
    """
    recorded = read_recording_options(None)
    if _restarts() == 0 and (recorded is None or recorded.folder != first.absolute()):
        return first
    return _choose_attempt_folder(first.absolute(), rank, os.getpid())


@lru_cache(maxsize=8)
def _choose_attempt_folder(first: Path, rank: int, _pid: int) -> Path:
    """Choose the folder once per process, as the process would find its own files the next time."""
    latest = find_latest_attempt(first)
    if not has_attempt_ended(latest, rank, read_process_start_ns()):
        return latest
    # Use torchrun's count if it is higher: attempts that ended before any rank started have left no files.
    return restart_folder(first, max(attempt_number(latest) + 1, _restarts()))


def _restarts() -> int:
    """Return how often torchrun has restarted the ranks of this host."""
    count = os.environ.get("TORCHELASTIC_RESTART_COUNT", "")
    return int(count) if count.isdecimal() else 0


def has_attempt_ended(attempt: Path, rank: int, since_ns: int | None) -> bool:
    """Return whether an attempt ended before a process of a rank began; False while any of its processes is alive.

    Args:
        attempt: folder of the attempt.
        rank: rank of the process.
        since_ns: time at which the process began; None if not known.
    """
    found = {folder.name: _read_process(folder) for folder in attempt.glob("rank_*")}
    before = {name: where for name, where in found.items() if where is not None}
    if any(is_on_this_host(where) and read_liveness(where) != "gone" for where in before.values()):
        return False
    if rank_folder(attempt, rank).name in before:
        return True
    ends_ns = [_last_alive_ns(attempt / name, where) for name, where in before.items() if is_on_this_host(where)]
    return since_ns is not None and any(end_ns is not None and end_ns < since_ns for end_ns in ends_ns)


def _read_process(folder: Path) -> dict[str, Any] | None:
    """Return what a rank recorded about its process, empty if unreadable; None if no process has been this rank."""
    for name in (RANK_FILE, JOINING_FILE):
        if (folder / name).exists():
            return read_json(folder / name, [])
    return {} if (folder / EVENTS_FILE).exists() or (folder / SIGNATURES_FILE).exists() else None


def _last_alive_ns(folder: Path, where: dict[str, Any]) -> int | None:
    """Return the last time at which a process that is gone was known to be alive."""
    ended = read_json(folder / ENDED_FILE, []) if (folder / ENDED_FILE).exists() else {}
    return max((ns for ns in (parse_written_ns(where), parse_written_ns(ended)) if ns is not None), default=None)
