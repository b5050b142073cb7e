"""What a rank's watchdog saw when it last looked closely, while nothing went on: ``standstill.json``.

So who looks at a running job from outside, or at a job that was ended because it hung, knows what its watchdog knew.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path

from overlapscope.trace.folders import read_json
from overlapscope.trace.format import STANDSTILL_FILE, write_json
from overlapscope.trace.log import Problem


@dataclass(frozen=True, kw_only=True)
class Standstill:
    """One close look at a rank."""

    time_ns: int
    """Host nanoseconds of the look."""
    longest_pause_ns: int
    """The longest time in which nothing happened before, and after which it went on."""
    cpu_share: float | None
    """CPU use as a share of one core, in the last second or so; None if nobody had looked twice."""
    is_working: bool | None
    """Whether it moved through its Python code, or read and wrote."""
    has_begun_next: bool | None
    """Whether the user's loop was in its next iteration, if it was between two steps; None if that is not known."""
    stacks: str
    """Stacks of its Python threads, from faulthandler."""


def write_standstill(folder: Path, seen: Standstill) -> None:
    """Put it in place of what was seen before.

    Raises:
        OSError: it can't be written.
    """
    write_json(folder / STANDSTILL_FILE, asdict(seen))


def read_standstill(folder: Path, problems: list[Problem]) -> Standstill | None:
    """What was last seen; None if the rank never stood still, or if that is damaged.

    Args:
        problems: takes what is wrong with the file.
    """
    path = folder / STANDSTILL_FILE
    content = read_json(path, problems) if path.exists() else {}
    if not content:
        return None
    try:
        share, is_working, begun = content["cpu_share"], content["is_working"], content["has_begun_next"]
        return Standstill(
            time_ns=int(content["time_ns"]),
            longest_pause_ns=int(content["longest_pause_ns"]),
            cpu_share=None if share is None else float(share),
            is_working=None if is_working is None else bool(is_working),
            has_begun_next=None if begun is None else bool(begun),
            stacks=str(content["stacks"]),
        )
    except (KeyError, TypeError, ValueError):
        problems.append(Problem("error", f"{path}: damaged; what this rank did while it stood still is not known"))
        return None
