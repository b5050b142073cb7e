"""Ranks that ended before they had joined a process group: from what ended them, and from what their launcher saw."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from overlapscope.diagnosis.evidence import JOINING, STARTING, CallSite, ExitCall, Failure, RankEvidence, RankPosition
from overlapscope.diagnosis.process_state import parse_call_site
from overlapscope.errors import Problem
from overlapscope.trace.early_ends import EarlyEnd, read_early_ends
from overlapscope.trace.process_files import ProcessExit
from overlapscope.trace.user_code import find_user_file

_SPAWN: Final = "/torch/multiprocessing/spawn.py"
_MAX_DELAY_NS: Final = 30_000_000_000
"""Maximum time from what ended a process to when its parent has seen that."""


def find_early_ends(
    attempt: Path,
    recorded: Mapping[int, RankEvidence],
    missing: Collection[int | None] | None,
    exits: Sequence[ProcessExit],
    problems: list[Problem],
) -> dict[int, RankEvidence]:
    """Return the evidence about ranks that ended before they had joined.

    Args:
        attempt: folder of the recording.
        recorded: ranks that left a folder. Some of them may have failed while they joined.
        missing: ranks of the job that left none; None if no rank left any, so that the job is only known from this.
        exits: how processes ended, as their parents saw it.
        problems: receives problems with the files.
    """
    ends = read_early_ends(attempt, problems)
    pids = {one.pid for one in recorded.values()}
    if not all(map(_is_joining, recorded.values())):
        exits = ()  # others have joined, so a rank without a folder may have: a status does not say when it ended
    others = [end for end in ends if end.pid not in pids]
    found = _find_failed_joins(recorded, ends)
    if missing is None:
        missing = {*(end.rank for end in ends), *(each.rank for each in exits)}
    absent = {
        rank: _find_end_of(rank, others, exits, pids) for rank in sorted(rank for rank in missing if rank is not None)
    }
    found |= {rank: one for rank, one in absent.items() if one is not None}
    unknown = [rank for rank, one in absent.items() if one is None]
    return found | dict(_match_by_elimination(unknown, others, exits, pids))


def _is_joining(one: RankEvidence) -> bool:
    return one.position is not None and one.position.phase == JOINING


def _find_end_of(
    rank: int, ends: Sequence[EarlyEnd], exits: Iterable[ProcessExit], pids: Collection[int]
) -> RankEvidence | None:
    """Return how a rank ended, of which the processes knew that they were it; None if none did."""
    its_exit = next((each for each in exits if each.rank == rank and each.pid not in pids), None)
    its_end = next((end for end in reversed(ends) if end.rank == rank and _may_be_its(end, its_exit)), None)
    return None if its_exit is None and its_end is None else _describe(rank, its_end, its_exit)


def _find_failed_joins(recorded: Mapping[int, RankEvidence], ends: Sequence[EarlyEnd]) -> dict[int, RankEvidence]:
    """Return the evidence about ranks whose call of ``init_process_group`` has failed."""
    found = {}
    for rank, one in recorded.items():
        if not _is_joining(one) or one.ended_ns is not None:
            continue
        failures = [_failure_of(end) for end in ends if (end.pid, end.host) == (one.pid, one.host)]
        if failures and failures[-1] is not None:
            found[rank] = replace(one, failure=failures[-1], liveness="failed")
    return found


def _may_be_its(end: EarlyEnd, its_exit: ProcessExit | None) -> bool:
    """Return True unless the process of the rank went on after this one, perhaps a helper, had ended."""
    if its_exit is None or its_exit.pid == end.pid:
        return True
    return its_exit.status > 0 and its_exit.signaled_at_ns is None and its_exit.time_ns - end.time_ns < _MAX_DELAY_NS


def _match_by_elimination(
    ranks: Sequence[int], ends: Iterable[EarlyEnd], exits: Iterable[ProcessExit], pids: Collection[int]
) -> Iterable[tuple[int, RankEvidence]]:
    """Match ranks that nothing is known of with children of ``multiprocessing`` that ended badly, if equally many."""
    unnamed = {end.pid: end for end in ends if end.rank is None}
    bad = {
        each.pid: each
        for each in exits
        if each.is_of_multiprocessing and each.status and each.signaled_at_ns is None and each.pid not in pids
    }
    children = sorted({*unnamed, *bad})
    if len(children) == len(ranks):
        for rank, pid in zip(ranks, children, strict=True):
            yield rank, _describe(rank, unnamed.get(pid), bad.get(pid))


def _describe(rank: int, end: EarlyEnd | None, its_exit: ProcessExit | None) -> RankEvidence:
    """Describe a rank by what ended it, by what its launcher saw, or by both."""
    starting = RankPosition(step=0, phase=STARTING)
    one = RankEvidence(rank=rank, liveness="failed", exit_status=1, position=starting)
    if end is not None:
        call = _exit_call_of(end)
        one = replace(
            one,
            host=end.host,
            pid=end.pid,
            failure=_failure_of(end),
            exit_call=call,
            exit_status=call.status if call is not None else 1,
            ended_ns=end.time_ns,
            position=replace(starting, call_site=None if call is None else call.call_site),
        )
    if its_exit is not None:
        one = replace(one, pid=its_exit.pid, exit_status=its_exit.status, ended_ns=one.ended_ns or its_exit.time_ns)
        if end is None:
            one = replace(one, signaled_at_ns=its_exit.signaled_at_ns, signal_received=its_exit.signal_received)
    if one.was_signaled or (one.exit_status or 0) < 0:
        return replace(one, liveness="gone")
    return one if one.failure or one.exit_status else replace(one, liveness="ended")


def _failure_of(end: EarlyEnd) -> Failure | None:
    """Return the exception that ended the process, also if ``torch.multiprocessing.spawn`` then exits with a status."""
    is_reported = bool(end.exit_frames) and str(end.exit_frames[0].get("file", "")).endswith(_SPAWN)
    return parse_early_failure(end) if end.type and (end.exit_status is None or is_reported) else None


def parse_early_failure(end: EarlyEnd) -> Failure:
    """Return the exception that ended a process, or that was being handled when it exited."""
    return Failure(
        type=end.type,
        message=end.message,
        call_site=_find_site(end.frames),
        traceback=end.traceback,
        time_ns=end.time_ns,
    )


def _exit_call_of(end: EarlyEnd) -> ExitCall | None:
    if end.exit_status is None:
        return None
    return ExitCall(
        status=end.exit_status,
        call_site=_find_site(end.exit_frames),
        caught=parse_early_failure(end) if end.type else None,
        text=end.exit_text,
    )


def _find_site(frames: Sequence[Mapping[str, Any]]) -> CallSite | None:
    found = find_user_file([str(frame.get("file", "")) for frame in frames])
    return None if found is None else parse_call_site(dict(frames[found]))
