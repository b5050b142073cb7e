"""Exceptions that did not end a rank: those that it has written down, and those that have ended its child processes."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from overlapscope.diagnosis.early_ends import parse_early_failure
from overlapscope.diagnosis.evidence import CaughtError
from overlapscope.errors import Problem
from overlapscope.trace.early_ends import read_early_ends
from overlapscope.trace.json_files import read_dataclasses
from overlapscope.trace.regular_file import match_files
from overlapscope.trace.schema import CAUGHT_ERRORS_PATTERN

_MAX_FILES: Final = 64


def read_caught_errors(
    folder: Path, problems: list[Problem], *, rank: int | None = None, pid: int | None = None
) -> tuple[CaughtError, ...]:
    """Read the exceptions that did not end a rank, in the order in which they were raised last.

    Args:
        folder: folder of the rank, to which processes that it has forked write as well.
        problems: receives problems with the files.
        rank: number of the rank, by which processes are known that it has started anew; None to leave these out.
        pid: process id of the rank.
    """
    paths = sorted(match_files(folder, CAUGHT_ERRORS_PATTERN))[:_MAX_FILES]
    found = [one for path in paths for one in read_dataclasses(CaughtError, path, problems)]
    for end in read_early_ends(folder.parent, problems) if rank is not None and pid is not None else ():
        if (end.rank, end.exit_status) == (rank, None) and end.pid != pid and end.type:
            failure = parse_early_failure(end)
            found.append(CaughtError(how="process", failure=failure, process=str(end.pid), last_ns=end.time_ns))
    return tuple(sorted(found, key=lambda one: one.last_ns))
