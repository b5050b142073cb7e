"""Ranks whose collective logs may have lost their ends: what these launched last is unknown.

A log is written before the launch, so a rank whose log ends early never launched what comes next. That holds only if
the log is there to its end.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

from overlapscope.diagnosis.evidence import GroupOrder
from overlapscope.errors import Problem
from overlapscope.trace.collective_log_reader import CollectiveLogFile, CollectiveLogs
from overlapscope.trace.folders import has_collective_logs
from overlapscope.trace.regular_file import match_names
from overlapscope.trace.schema import GROUP_PATTERN, POINT_TO_POINT_PATTERN, RANK_FILE, SIGNATURES_FILE

_PREFIXES: Final = (GROUP_PATTERN.partition("*")[0], POINT_TO_POINT_PATTERN.partition("*")[0])


def mark_lost_ends(
    orders: Sequence[GroupOrder],
    logs: CollectiveLogs,
    problems: Iterable[Problem],
    truncated: Mapping[str, Collection[int]],
) -> tuple[GroupOrder, ...]:
    """Add to each order the ranks that may have launched more than their logs show.

    Args:
        problems: problems with any of the files.
        truncated: ranks whose log ends before what others completed with them, by name of the group.
    """
    damaged = [problem.message for problem in problems if problem.severity == "error"]
    lacking = {rank for rank, folder in logs.folders.items() if _lacks_logs(folder, damaged)}
    files = {(group.name, group.ranks, group.is_point_to_point): found for group, found in logs.groups.items()}
    return tuple(
        replace(order, uncertain=_uncertain_in(order, files, lacking) | {*truncated.get(order.name, ())})
        for order in orders
    )


def _uncertain_in(
    order: GroupOrder,
    files: Mapping[tuple[str, tuple[int, ...], bool], Mapping[int, CollectiveLogFile]],
    lacking: Collection[int],
) -> frozenset[int]:
    own = files.get((order.name, order.ranks, False), {})
    without_log = {rank for rank in order.ranks if rank not in own} & {*lacking}
    return frozenset(without_log | {rank for rank, file in own.items() if file.is_end_lost})


def _lacks_logs(folder: Path, damaged: Iterable[str]) -> bool:
    """Return whether logs of a rank are lost: it can't be told of which groups."""
    if any(message.startswith(f"{folder}/{prefix}") for message in damaged for prefix in _PREFIXES):
        return True
    if not has_collective_logs(folder):
        path = folder / SIGNATURES_FILE
        return not (folder / RANK_FILE).exists() or (path.exists() and path.stat().st_size > 0)
    return any(_has_gap(folder, pattern) for pattern in (GROUP_PATTERN, POINT_TO_POINT_PATTERN))


def _has_gap(folder: Path, pattern: str) -> bool:
    """Return whether the numbers of the logs, which count from 0, show that one is missing."""
    numbers = {name.partition(".")[0].rpartition("_")[2] for name in match_names(folder, pattern)}
    return any(str(number) not in numbers for number in range(len(numbers)))
