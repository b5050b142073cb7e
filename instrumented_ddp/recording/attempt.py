"""Which attempt of its job this process belongs to, and so into which folder it records.

Launchers start all ranks anew when one has failed, and say nothing of it that holds on every host. What tells attempts
apart is that the processes of one were there at the same time: a process of a rank that another process has been
before, or one that began when a rank had already come to an end, is of a new attempt.
"""

from __future__ import annotations

import os
from functools import lru_cache
from pathlib import Path
from typing import Any

from overlapscope.diagnosis.process import began_ns, is_here, liveness_of, written_ns
from overlapscope.trace.attempts import newest_attempt, number_of, restart_folder
from overlapscope.trace.environment import recording_from_environment
from overlapscope.trace.folders import read_json
from overlapscope.trace.format import (
    ENDED_FILE,
    EVENTS_FILE,
    JOINING_FILE,
    RANK_FILE,
    SIGNATURES_FILE,
    rank_folder,
)


def attempt_folder(first: Path, rank: int) -> Path:
    """The folder of the attempt that this process belongs to: the one given, or one inside it.

    Args:
        first: of the run. One that the script itself has named holds restarts of torchrun and nothing else: a script
            that is run a second time is told that its folder is in use.
        rank: of this process.

    Raises:
        OverlapScopeError: a variable has an invalid value.
    """
    recorded = recording_from_environment(None)
    if _restarts() == 0 and (recorded is None or recorded.folder != first.absolute()):
        return first
    return _chosen(first.absolute(), rank, os.getpid())


@lru_cache(maxsize=8)
def _chosen(first: Path, rank: int, _pid: int) -> Path:
    """Once for each process, as it would find itself the next time."""
    newest = newest_attempt(first)
    if not is_over(newest, rank, began_ns()):
        return newest
    # By torchrun's count where that is higher, as attempts that ended before any rank was there have left nothing.
    return restart_folder(first, max(number_of(newest) + 1, _restarts()))


def _restarts() -> int:
    """How often torchrun has restarted the ranks of this host."""
    count = os.environ.get("TORCHELASTIC_RESTART_COUNT", "")
    return int(count) if count.isdecimal() else 0


def is_over(attempt: Path, rank: int, since_ns: int | None) -> bool:
    """Whether an attempt came to an end before a process began that is to be a rank; not as long as one is there.

    Args:
        attempt: its folder.
        rank: of the process.
        since_ns: when it began; None if not known.
    """
    found = {folder.name: _process_of(folder) for folder in attempt.glob("rank_*")}
    before = {name: where for name, where in found.items() if where is not None}
    if any(is_here(where) and liveness_of(where) != "gone" for where in before.values()):
        return False
    if rank_folder(attempt, rank).name in before:
        return True
    ends_ns = [_last_heard_ns(attempt / name, where) for name, where in before.items() if is_here(where)]
    return since_ns is not None and any(end_ns is not None and end_ns < since_ns for end_ns in ends_ns)


def _process_of(folder: Path) -> dict[str, Any] | None:
    """What a rank has said of its process, empty if that can't be read; None if no process has been this rank."""
    for name in (RANK_FILE, JOINING_FILE):
        if (folder / name).exists():
            return read_json(folder / name, [])
    return {} if (folder / EVENTS_FILE).exists() or (folder / SIGNATURES_FILE).exists() else None


def _last_heard_ns(folder: Path, where: dict[str, Any]) -> int | None:
    """When a process that is gone was still there."""
    ended = read_json(folder / ENDED_FILE, []) if (folder / ENDED_FILE).exists() else {}
    return max((ns for ns in (written_ns(where), written_ns(ended)) if ns is not None), default=None)
