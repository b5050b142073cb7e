"""Stall snapshot of a rank, ``standstill.json``: its state when the watchdog last examined it during a stall.

With it, a reader who examines a running job from outside, or a job that was aborted because it hung, knows what the
rank's watchdog knew.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path

from overlapscope.trace.folders import read_json
from overlapscope.trace.format import STALL_FILE, write_json
from overlapscope.trace.log import Problem


@dataclass(frozen=True, kw_only=True)
class StallSnapshot:
    """State of a rank during a stall."""

    time_ns: int
    """Time of the snapshot in host nanoseconds."""
    longest_recovered_stall_ns: int
    """Longest earlier time without progress that was followed by progress."""
    cpu_share: float | None
    """CPU use as a share of one core, over about the last second; None without two samples."""
    is_working: bool | None
    """True if the process moved through its Python code, or read or wrote; None if unknown."""
    has_begun_next_iteration: bool | None
    """True if the user's loop was in its next iteration, for a rank between two steps; None if unknown."""
    stacks: str
    """Stacks of its Python threads, from faulthandler."""


def write_stall_snapshot(folder: Path, seen: StallSnapshot) -> None:
    """Write a snapshot, replacing the previous one.

    Raises:
        OSError: it can't be written.
    """
    write_json(folder / STALL_FILE, asdict(seen))


def read_stall_snapshot(folder: Path, problems: list[Problem]) -> StallSnapshot | None:
    """Read the last snapshot; None if the rank never stalled, or if the file is damaged.

    Args:
        problems: receives problems with the file.
    """
    path = folder / STALL_FILE
    content = read_json(path, problems) if path.exists() else {}
    if not content:
        return None
    try:
        share, is_working, begun = content["cpu_share"], content["is_working"], content["has_begun_next_iteration"]
        return StallSnapshot(
            time_ns=int(content["time_ns"]),
            longest_recovered_stall_ns=int(content["longest_recovered_stall_ns"]),
            cpu_share=None if share is None else float(share),
            is_working=None if is_working is None else bool(is_working),
            has_begun_next_iteration=None if begun is None else bool(begun),
            stacks=str(content["stacks"]),
        )
    except (KeyError, TypeError, ValueError):
        problems.append(Problem("error", f"{path}: damaged; what this rank did while it stood still is not known"))
        return None
