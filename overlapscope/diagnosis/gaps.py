"""Missing or damaged parts of a recording: with any of them, a job can't be called healthy."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final

from overlapscope.diagnosis.evidence import GroupOrder, RecordingGap
from overlapscope.diagnosis.rank_files import RankFiles
from overlapscope.diagnosis.wording import group_text, rank_list
from overlapscope.trace.folders import parse_expected_ranks, ranks_in_world, read_import_source
from overlapscope.trace.format import EVENTS_FILE, MANIFEST_FILE, SIGNATURES_FILE
from overlapscope.trace.log import Problem

_ENTERED_BY_ALL: Final = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "barrier")
"""Operations that complete on no rank before all have entered; a broadcast may complete on its root alone."""
_TERMINAL_STATES: Final = ("ended", "failed", "gone")
"""States of a process whose log will not grow: what is missing there is not about to be written."""
_COPY: Final = "Copy the rank_* folders of all ranks into this folder, those of other hosts too, and diagnose again."
_COPY_AGAIN: Final = "Copy the recording again from where it was made; if it is damaged there as well, record again."
_LOOK_AGAIN: Final = "The job still runs: diagnose again in a moment, when what was being written is there."


def find_gaps(
    folders: Mapping[int, Path],
    files: Mapping[int, RankFiles],
    groups: Iterable[GroupOrder],
    problems: Iterable[Problem],
    *,
    is_live: bool = False,
) -> tuple[RecordingGap, ...]:
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
    if missing := sorted(_ranks_of_job(files.values()) - folders.keys()):
        gaps.append(RecordingGap(f"{rank_list(missing)} left no folder here", _COPY))
    damage = [str(problem) for problem in problems if problem.severity == "error"]
    gaps += [RecordingGap(text, advice) for text in damage]
    for group in groups:
        gaps += [
            RecordingGap(f"{lost} in {group_text(group)}", advice)
            for rank, lost in _find_truncated_logs(group, files).items()
            if not any(text.startswith(f"{folders[rank]}/") for text in damage)  # a damaged file that explains the loss
        ]
    return tuple(gaps)


def make_no_collectives_gap(files: Iterable[RankFiles]) -> RecordingGap:
    """Return the gap that nothing was compared because there are no collective logs."""
    if source := next(filter(None, (read_import_source(one.run) for one in files)), None):
        what = f"it was imported from {source}, whose traces don't hold what each rank launched and how it ended"
        return RecordingGap(what, "Record a run: 'overlapscope record -o FOLDER -- torchrun ...' logs that.")
    what = "no rank left a log of its collectives, so there is nothing to compare"
    return RecordingGap(
        what, "Record again: 'overlapscope record -o FOLDER -- torchrun ...' logs every collective of each rank."
    )


def has_no_launches(folders: Mapping[int, Path], files: Mapping[int, RankFiles], gaps: Iterable[RecordingGap]) -> bool:
    """Return True if no logs mean that nothing was launched: nothing is missing, and no file indicates launches."""
    traces = [folder / SIGNATURES_FILE for folder in folders.values()]
    # The file list of a rank shows what is missing; without one, it may have trained and its logs be lost.
    traces += [folder / EVENTS_FILE for folder in folders.values() if not (folder / MANIFEST_FILE).exists()]
    if any(read_import_source(one.run) for one in files.values()):
        return False
    have_ended = all(one.evidence.liveness == "ended" for one in files.values())
    return have_ended and not any(gaps) and not any(path.exists() and path.stat().st_size for path in traces)


def _ranks_of_job(files: Iterable[RankFiles]) -> set[int]:
    """Return the ranks that must exist according to the world size or rank list of any rank."""
    worlds: set[object] = set()
    lists: set[tuple[int, ...]] = set()
    for one in files:
        if one.waited_for_all and one.evidence.world_size is not None:
            worlds.add(one.evidence.world_size)
        else:
            lists.add(parse_expected_ranks(one.run))
    return set().union(*map(ranks_in_world, worlds), *lists)


def _find_truncated_logs(group: GroupOrder, files: Mapping[int, RankFiles]) -> dict[int, str]:
    """Find ranks whose log ends before collectives that others completed with them."""
    done = [
        entry.number
        for window in group.windows.values()
        for entry in window
        if entry.state == "completed" and entry.signature.op in _ENTERED_BY_ALL
    ]
    latest = max(done, default=0)
    lost = {}
    for rank in group.ranks:
        one = files.get(rank)
        if one is None or one.evidence.liveness not in _TERMINAL_STATES or one.evidence.unrecorded_because is not None:
            continue
        its_newest = group.latest.get(rank, 0)
        if its_newest < latest:
            ends = f"ends with collective {its_newest}" if its_newest else "is missing"
            lost[rank] = f"the log of rank {rank} {ends}, and others completed collective {latest} with it"
    return lost
