"""Attempts of a restarted job: the first is in the folder of the run, each later one in a folder inside it.

A launcher such as ``torchrun --max-restarts`` restarts all ranks when one has failed. Each attempt is a separate
recording: ``traces/restart_1`` is next to ``traces/rank_0``, ``traces/rank_1`` ...
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from overlapscope.trace.format import EVENTS_FILE, JOINING_FILE, SIGNATURES_FILE

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
    number = path.resolve().name.removeprefix(_PREFIX)
    return int(number) if number.isdecimal() and path.resolve().name.startswith(_PREFIX) else 0


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
    of_ranks = (path for path in folder.glob("rank_*") if path.name.removeprefix("rank_").isdecimal())
    return [path for path in of_ranks if any((path / log).exists() for log in _LOGS)]
