"""The attempts of a job that was started again: the first in the folder of the run, each later one in a folder inside.

A launcher such as ``torchrun --max-restarts`` starts all ranks anew when one has failed. Each attempt is a recording of
its own, that of ``traces/restart_1`` beside that of ``traces/rank_0``, ``traces/rank_1`` ...
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from overlapscope.trace.format import EVENTS_FILE, JOINING_FILE, SIGNATURES_FILE

_PREFIX: Final = "restart_"
_LOGS: Final = (EVENTS_FILE, SIGNATURES_FILE, JOINING_FILE)
"""One of them is in the folder of every rank that was recorded; without DDP there is no event log, and of a rank that
still waits for the others no more than the last."""


def restart_folder(first: Path, number: int) -> Path:
    """The folder of a later attempt.

    Args:
        first: that of the first one, which is the run's.
        number: of the attempt, from 1.
    """
    return first / f"{_PREFIX}{number}"


def number_of(path: Path) -> int:
    """Of an attempt, by the name of its folder; 0: the first one."""
    number = path.resolve().name.removeprefix(_PREFIX)
    return int(number) if number.isdecimal() and path.resolve().name.startswith(_PREFIX) else 0


def attempts_in(first: Path) -> list[Path]:
    """The attempts of a job that have left something, in order.

    Args:
        first: the folder of the run.
    """
    later = sorted((path for path in first.glob(f"{_PREFIX}*") if number_of(path)), key=number_of)
    return [path for path in (first, *later) if recorded_ranks(path)]


def attempts_beside(path: Path) -> list[Path]:
    """All attempts of the job that an attempt belongs to, itself included.

    Args:
        path: of any attempt.
    """
    if not number_of(path):
        return attempts_in(path)
    parent = path.parent if path.name.startswith(_PREFIX) else path.resolve().parent
    attempts = attempts_in(parent)
    return attempts if parent in attempts else [path]


def newest_attempt(first: Path) -> Path:
    """The newest attempt that has left something; the folder of the run if none has."""
    return [first, *attempts_in(first)][-1]


def recorded_ranks(folder: Path) -> list[Path]:
    """The folders of ranks that have begun to record into this very folder, in no order."""
    of_ranks = (path for path in folder.glob("rank_*") if path.name.removeprefix("rank_").isdecimal())
    return [path for path in of_ranks if any((path / log).exists() for log in _LOGS)]
