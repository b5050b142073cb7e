"""Whether the folders of a recording are of the ranks that their names say, and of one job.

Folders are copied together by hand. What the ranks of two jobs have launched must not be compared: every difference
would be a fault.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from overlapscope.errors import OverlapScopeError, Problem
from overlapscope.text import rank_list
from overlapscope.trace.collective_log import CollectiveLogHeader
from overlapscope.trace.json_files import read_json
from overlapscope.trace.regular_file import match_files, open_regular_file
from overlapscope.trace.schema import GROUP_PATTERN, HEADER_BYTES, JOINING_FILE, POINT_TO_POINT_PATTERN, RANK_FILE

_SLACK_NS: Final = 5_000_000_000
"""Time by which a process may outlive the last that is known of it."""


@dataclass(frozen=True, kw_only=True)
class Lifetime:
    """When a rank is known to have existed, on the clock of its host."""

    boot: str | None
    """Boot ID of the host; None if the files that name the process are lost."""
    begun_ns: int
    last_ns: int


def find_misplaced(folders: Mapping[int, Path]) -> dict[int, Problem]:
    """Find folders that hold the files of another rank than their names say."""
    found = {}
    for rank, folder in folders.items():
        claims = Counter(_claimed_ranks(folder))
        if claims and claims[rank] < max(claims.values()):
            text = f"{folder}: holds the files of rank {claims.most_common(1)[0][0]}; it is left out"
            found[rank] = Problem("error", text)
    return found


def _claimed_ranks(folder: Path) -> Iterator[int]:
    """Yield the rank that each file that names one belongs to."""
    for name in (RANK_FILE, JOINING_FILE):
        if (folder / name).exists() and isinstance(rank := read_json(folder / name, []).get("rank"), int):
            yield rank
    for path in match_files(folder, GROUP_PATTERN, POINT_TO_POINT_PATTERN):
        try:
            with open_regular_file(path) as file:
                yield CollectiveLogHeader.unpack(file.read(HEADER_BYTES), path).rank
        except (OSError, OverlapScopeError):
            continue


def find_other_jobs(folders: Mapping[int, Path], lifetimes: Mapping[int, Lifetime]) -> dict[int, Problem]:
    """Find folders of processes that never existed together with those of most ranks; of all, if there is no most.

    Only ranks on one host are compared, because only they have a common clock. A rank whose host is not known is taken
    to have been on that of the others, if they were on one.
    """
    found: dict[int, Problem] = {}
    boots = {life.boot for life in lifetimes.values()} - {None}
    for boot in boots:
        alive = {rank: life for rank, life in sorted(lifetimes.items()) if life.boot == boot}
        at_once = _most_at_once(alive)
        others = alive.keys() - at_once
        if not others:
            continue
        if 2 * len(at_once) <= len(alive):  # who is right can't be told
            at_once, others = set(), set(alive)
        rest = rank_list(sorted(at_once or alive))
        text = f"recorded by another run than that of {rest}: they never ran at the same time"
        if not at_once:
            text = f"{rest} never all ran at the same time: their folders are of several runs"
        found |= {rank: Problem("error", f"{folders[rank]}: {text}; it is left out") for rank in sorted(others)}
    if len(boots) == 1:
        known = [life for rank, life in lifetimes.items() if life.boot is not None and rank not in found]
        found |= _find_unnamed_strangers(folders, lifetimes, known)
    return found


def _find_unnamed_strangers(
    folders: Mapping[int, Path], lifetimes: Mapping[int, Lifetime], known: Collection[Lifetime]
) -> dict[int, Problem]:
    """Find folders of which nothing says which process left it, and that were written when no known rank existed."""
    text = "nothing says which process left it, and what it launched was not while others ran; it is left out"
    return {
        rank: Problem("error", f"{folders[rank]}: {text}")
        for rank, life in lifetimes.items()
        if life.boot is None and known
        if not any(one.begun_ns <= life.begun_ns <= one.last_ns + _SLACK_NS for one in known)
    }


def _most_at_once(alive: Mapping[int, Lifetime]) -> set[int]:
    """Return the most ranks that existed at the same time."""
    return max(
        (
            {rank for rank, life in alive.items() if life.begun_ns <= at_ns <= life.last_ns + _SLACK_NS}
            for at_ns in (life.begun_ns for life in alive.values())
        ),
        key=len,
        default=set(),
    )
