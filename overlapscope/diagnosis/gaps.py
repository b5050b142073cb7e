"""Missing or damaged parts of a recording: with any of them, a job can't be called healthy."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final

from overlapscope.diagnosis.evidence import Gap, GroupOrder
from overlapscope.diagnosis.rank_files import RankFiles
from overlapscope.diagnosis.wording import group_text, ranks_text
from overlapscope.trace.folders import expected_ranks_of, imported_from, ranks_of_world
from overlapscope.trace.format import EVENTS_FILE, SEAL_FILE, SIGNATURES_FILE
from overlapscope.trace.log import Problem

_ENTERED_BY_ALL: Final = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "barrier")
"""Operations that complete on no rank before all have entered; a broadcast may complete on its root alone."""
_OVER: Final = ("ended", "failed", "gone")
"""States of a process whose log will not grow: what is missing there is not about to be written."""
_COPY: Final = "Copy the rank_* folders of all ranks into this folder, those of other hosts too, and diagnose again."
_COPY_AGAIN: Final = "Copy the recording again from where it was made; if it is damaged there as well, record again."
_LOOK_AGAIN: Final = "The job still runs: diagnose again in a moment, when what was being written is there."


def gaps_in(
    folders: Mapping[int, Path],
    files: Mapping[int, RankFiles],
    groups: Iterable[GroupOrder],
    problems: Iterable[Problem],
    *,
    is_live: bool = False,
) -> tuple[Gap, ...]:
    """Find the missing or damaged parts of a recording.

    Args:
        folders: folder of each rank.
        files: contents of these folders.
        groups: the order of collectives in each group.
        problems: problems with any of the files.
        is_live: True if the job runs.
    """
    gaps = []
    advice = _LOOK_AGAIN if is_live else _COPY_AGAIN
    if missing := sorted(_told_of(files.values()) - folders.keys()):
        gaps.append(Gap(f"{ranks_text(missing)} left no folder here", _COPY))
    damage = [str(problem) for problem in problems if problem.severity == "error"]
    gaps += [Gap(text, advice) for text in damage]
    for group in groups:
        gaps += [
            Gap(f"{lost} in {group_text(group)}", advice)
            for rank, lost in _lost_entries(group, files).items()
            if not any(text.startswith(f"{folders[rank]}/") for text in damage)  # a damaged file that explains the loss
        ]
    return tuple(gaps)


def no_collectives(files: Iterable[RankFiles]) -> Gap:
    """Return the gap that nothing was compared because there are no collective logs."""
    if source := next(filter(None, (imported_from(one.run) for one in files)), None):
        what = f"it was imported from {source}, whose traces don't hold what each rank launched and how it ended"
        return Gap(what, "Record a run: 'overlapscope record -o FOLDER -- torchrun ...' logs that.")
    what = "no rank left a log of its collectives, so there is nothing to compare"
    return Gap(
        what, "Record again: 'overlapscope record -o FOLDER -- torchrun ...' logs every collective of each rank."
    )


def launched_nothing(folders: Mapping[int, Path], files: Mapping[int, RankFiles], gaps: Iterable[Gap]) -> bool:
    """Return True if no logs mean that nothing was launched: nothing is missing, and no file indicates launches."""
    traces = [folder / SIGNATURES_FILE for folder in folders.values()]
    # The file list of a rank shows what is missing; without one, it may have trained and its logs be lost.
    traces += [folder / EVENTS_FILE for folder in folders.values() if not (folder / SEAL_FILE).exists()]
    if any(imported_from(one.run) for one in files.values()):
        return False
    have_ended = all(one.evidence.liveness == "ended" for one in files.values())
    return have_ended and not any(gaps) and not any(path.exists() and path.stat().st_size for path in traces)


def _told_of(files: Iterable[RankFiles]) -> set[int]:
    """Return the ranks that must exist according to the world size or rank list of any rank."""
    worlds: set[object] = set()
    lists: set[tuple[int, ...]] = set()
    for one in files:
        if one.waited_for_all and one.evidence.world_size is not None:
            worlds.add(one.evidence.world_size)
        else:
            lists.add(expected_ranks_of(one.run))
    return set().union(*map(ranks_of_world, worlds), *lists)


def _lost_entries(group: GroupOrder, files: Mapping[int, RankFiles]) -> dict[int, str]:
    """Find ranks whose log ends before collectives that others completed with them."""
    done = [
        entry.number
        for window in group.windows.values()
        for entry in window
        if entry.state == "completed" and entry.signature.op in _ENTERED_BY_ALL
    ]
    newest = max(done, default=0)
    lost = {}
    for rank in group.ranks:
        one = files.get(rank)
        if one is None or one.evidence.liveness not in _OVER or one.evidence.unrecorded_because is not None:
            continue
        its_newest = group.newest.get(rank, 0)
        if its_newest < newest:
            ends = f"ends with collective {its_newest}" if its_newest else "is missing"
            lost[rank] = f"the log of rank {rank} {ends}, and others completed collective {newest} with it"
    return lost
