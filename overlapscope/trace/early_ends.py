"""What ended processes before they had joined a process group: ``early_end_*.json`` beside the folders of ranks."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from overlapscope.errors import Problem
from overlapscope.trace.folders import attempt_number, find_sibling_attempts
from overlapscope.trace.json_files import read_dataclass, read_json
from overlapscope.trace.process_files import read_exits
from overlapscope.trace.regular_file import match_files, parse_once
from overlapscope.trace.schema import JOINING_FILE

EARLY_END_PATTERN: Final = "early_end_*.json"


@dataclass(frozen=True, kw_only=True)
class EarlyEnd:
    """How a process ended that had not joined a process group; written by ``instrumented_ddp.startup.early_end``."""

    pid: int
    host: str
    boot_id: str | None
    time_ns: int
    rank: int | None
    """Rank according to its environment; None if that said nothing."""
    world_size: int | None
    exit_status: int | None
    """Status passed to ``sys.exit``; None if an exception ended it."""
    exit_text: str
    """Message passed to ``sys.exit`` instead of a status."""
    type: str
    """Type of the exception that ended it, or that was being handled when it exited; empty if there was none."""
    message: str
    traceback: str
    frames: tuple[dict[str, Any], ...]
    """Frames that the exception has passed through, innermost first: file, line, function."""
    exit_frames: tuple[dict[str, Any], ...]
    """Frames of the call of ``sys.exit``, innermost first."""


def find_run_folder(attempt: Path) -> Path:
    """Return the folder of the run to which an attempt belongs: early ends of all attempts are there."""
    return parse_once(
        "folder of the run", attempt, lambda: attempt.resolve().parent if attempt_number(attempt) else attempt
    )


def has_early_ends(attempt: Path) -> bool:
    """Return whether anything is known of ranks that ended before they had joined a process group."""
    if match_files(find_run_folder(attempt), EARLY_END_PATTERN):
        return True
    return any(each.rank is not None and each.status for each in read_exits(attempt, []))


def read_early_ends(attempt: Path, problems: list[Problem]) -> list[EarlyEnd]:
    """Read the early ends of an attempt, in the order of time: those since the attempt before began, till the next did.

    Args:
        attempt: folder of the attempt.
        problems: receives problems with the files.
    """
    paths = sorted(match_files(find_run_folder(attempt), EARLY_END_PATTERN))
    if not paths:
        return []
    after_ns, until_ns = _bounds_ns(attempt)
    found = [one for path in paths if (one := read_dataclass(EarlyEnd, path, problems)) is not None]
    return sorted((one for one in found if after_ns < one.time_ns < until_ns), key=lambda one: one.time_ns)


def _bounds_ns(attempt: Path) -> tuple[float, float]:
    own = attempt_number(attempt)
    before = [each for each in find_sibling_attempts(attempt) if attempt_number(each) < own]
    later = [each for each in find_sibling_attempts(attempt) if attempt_number(each) > own]
    return (
        max(_joining_times(before[-1]), default=float("-inf")) if before else float("-inf"),
        min(_joining_times(later[0]), default=float("inf")) if later else float("inf"),
    )


def _joining_times(attempt: Path) -> list[int]:
    times = (read_json(path, []).get("time_ns") for path in attempt.glob(f"rank_*/{JOINING_FILE}"))
    return [time_ns for time_ns in times if isinstance(time_ns, int)]
