"""Evidence from a recording, whether its ranks ended, were killed, or still run."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

from overlapscope.diagnosis.collective_order import RecordedOrder, compare_orders, read_point_to_point_orders
from overlapscope.diagnosis.early_ends import find_early_ends
from overlapscope.diagnosis.evidence import (
    LIVE_STATES,
    Evidence,
    GroupOrder,
    Liveness,
    RankEvidence,
    RecordingGap,
    ReportedVerdict,
)
from overlapscope.diagnosis.lost_logs import mark_lost_ends
from overlapscope.diagnosis.one_job import Lifetime, find_misplaced, find_other_jobs
from overlapscope.diagnosis.rank_models import compare_replicas
from overlapscope.diagnosis.rank_state import RankState, read_process_state, read_rank
from overlapscope.diagnosis.replica_drift import ComparedReplicas
from overlapscope.diagnosis.text import group_text
from overlapscope.errors import Problem
from overlapscope.text import rank_list
from overlapscope.trace import clocks
from overlapscope.trace.collective_log_reader import CollectiveLogs, open_collective_logs
from overlapscope.trace.early_ends import has_early_ends
from overlapscope.trace.event_log import is_closed
from overlapscope.trace.folders import (
    find_rank_folders,
    find_recorded_ranks,
    parse_expected_ranks,
    ranks_in_world,
    read_import_source,
)
from overlapscope.trace.live_files import read_final_pass, read_fingerprint_passes
from overlapscope.trace.process_files import ProcessExit, read_exits
from overlapscope.trace.schema import EVENTS_FILE, MANIFEST_FILE, SIGNATURES_FILE

_ENTERED_BY_ALL: Final = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "barrier")
"""Operations that complete on no rank before all have entered; a broadcast may complete on its root alone."""
_TERMINAL_STATES: Final = ("ended", "failed", "gone")
"""States of a process whose log will not grow: what is missing there is not about to be written."""
_COPY: Final = "Copy the rank_* folders of all ranks into this folder, those of other hosts too, and diagnose again."
_COPY_AGAIN: Final = "Copy the recording again from where it was made; if it is damaged there as well, record again."
_LOOK_AGAIN: Final = "The job still runs: diagnose again in a moment, when what was being written is there."


def find_gaps(
    folders: Mapping[int, Path],
    files: Mapping[int, RankState],
    groups: Iterable[GroupOrder],
    problems: Iterable[Problem],
    *,
    never_joined: Collection[int] = (),
    is_live: bool = False,
) -> tuple[RecordingGap, ...]:
    """Find the missing or damaged parts of a recording.

    Args:
        folders: folder of each rank.
        files: contents of these folders.
        groups: the order of collectives in each group.
        problems: problems with any of the files.
        never_joined: ranks that rightly left no folder.
        is_live: True if the job runs.
    """
    gaps = []
    advice = _LOOK_AGAIN if is_live else _COPY_AGAIN
    if missing := sorted(_ranks_of_job(files.values()) - folders.keys() - set(never_joined)):
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


def make_no_collectives_gap(files: Iterable[RankState]) -> RecordingGap:
    """Return the gap that nothing was compared because there are no collective logs."""
    if source := next(filter(None, (read_import_source(one.run) for one in files)), None):
        what = f"it was imported from {source}, whose traces don't hold what each rank launched and how it ended"
        return RecordingGap(what, "Record a run: 'overlapscope record -o FOLDER -- torchrun ...' logs that.")
    what = "no rank left a log of its collectives, so there is nothing to compare"
    return RecordingGap(
        what, "Record again: 'overlapscope record -o FOLDER -- torchrun ...' logs every collective of each rank."
    )


def has_no_launches(folders: Mapping[int, Path], files: Mapping[int, RankState], gaps: Iterable[RecordingGap]) -> bool:
    """Return True if no logs mean that nothing was launched: nothing is missing, and no file indicates launches."""
    traces = [folder / SIGNATURES_FILE for folder in folders.values()]
    # The file list of a rank shows what is missing; without one, it may have trained and its logs be lost.
    traces += [folder / EVENTS_FILE for folder in folders.values() if not (folder / MANIFEST_FILE).exists()]
    if any(read_import_source(one.run) for one in files.values()):
        return False
    have_ended = all(one.evidence.liveness == "ended" for one in files.values())
    return have_ended and not any(gaps) and not any(path.exists() and path.stat().st_size for path in traces)


def _ranks_of_job(files: Iterable[RankState]) -> set[int]:
    """Return the ranks that must exist according to the world size or rank list of any rank."""
    worlds: set[object] = set()
    lists: set[tuple[int, ...]] = set()
    for one in files:
        if one.waited_for_all and one.evidence.world_size is not None and one.evidence.init_calls == 1:
            worlds.add(one.evidence.world_size)
        else:
            lists.add(parse_expected_ranks(one.run))
    return set().union(*map(ranks_in_world, worlds), *lists)


def _find_truncated_logs(group: GroupOrder, files: Mapping[int, RankState]) -> dict[int, str]:
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
        if one is None or one.evidence.unrecorded_because is not None:
            continue
        its_newest = group.latest.get(rank, 0)
        # A rank that may be running is read at another moment than the others; its whole log is not missing for that.
        if one.evidence.liveness not in _TERMINAL_STATES and (its_newest or one.evidence.liveness != "unknown"):
            continue
        if its_newest < latest:
            ends = f"ends with collective {its_newest}" if its_newest else "is missing"
            lost[rank] = f"the log of rank {rank} {ends}, and others completed collective {latest} with it"
    return lost


Progress = Callable[[int, int], None]
"""Called with (number of ranks read so far, number of ranks)."""

_MAX_SLEEP_NS: Final = 1_500_000_000
"""Maximum time between two signs of life of a watchdog, on a busy host."""
_POSITION_REPORTS: Final = ("slow", "stuck", "waits for data", "stopped", "holds the GIL", "killed")
"""Kinds of reports whose call sites say where a rank is."""


def read_evidence(path: Path, progress: Progress | None = None) -> tuple[Evidence, list[Problem]]:
    """Read the evidence that the ranks of a recording left.

    Raises:
        OverlapScopeError: there is no recording.
    """
    _, evidence, problems = read_order_and_evidence(path, progress)
    return evidence, problems


def read_order_and_evidence(
    path: Path, progress: Progress | None = None
) -> tuple[RecordedOrder, Evidence, list[Problem]]:
    """Read the evidence, and return with it the order of collectives that it was taken from.

    Raises:
        OverlapScopeError: there is no recording.
    """
    folders = _find_folders(path)
    left_out = find_misplaced(folders)
    source, evidence, problems, lifetimes = _read_folders(path, _without(folders, left_out), left_out, progress)
    if others := find_other_jobs(folders, lifetimes):
        left_out |= others
        source, evidence, problems, _ = _read_folders(path, _without(folders, left_out), left_out, progress)
    return source, evidence, problems


def _without(folders: Mapping[int, Path], left_out: Mapping[int, Problem]) -> dict[int, Path]:
    return {rank: folder for rank, folder in folders.items() if rank not in left_out}


def _read_folders(
    path: Path, folders: dict[int, Path], left_out: Mapping[int, Problem], progress: Progress | None
) -> tuple[RecordedOrder, Evidence, list[Problem], dict[int, Lifetime]]:
    """Read the evidence in some of the folders of ranks.

    Args:
        left_out: why others are not read.
    """
    states = {rank: read_process_state(folder) for rank, folder in folders.items()}
    logs = open_collective_logs(folders)
    source = RecordedOrder(logs)
    exits = read_exits(path, logs.problems)
    files = _read_ranks(folders, states, source, exits, progress or _ignore)
    reports = tuple(report for one in files.values() for report in one.reports)
    orders, point_to_point_orders = compare_orders(source), read_point_to_point_orders(source)
    command = _choose_command(exits)
    signaled_ns = _find_job_signal(command, files.values())
    ranks = _add_reported_call_sites(_add_silence(files), reports)
    ranks = _mark_signaled_ranks(ranks, files, command, signaled_ns)
    early = find_early_ends(path, ranks, _find_unused_ranks(files, orders, left_out), exits, logs.problems)
    problems = [*left_out.values(), *_collect_errors(logs.problems, files.values())]
    is_live = any(one.evidence.liveness in LIVE_STATES for one in files.values())
    truncated = {order.name: _find_truncated_logs(order, files) for order in orders}
    orders = mark_lost_ends(orders, logs, problems, truncated)
    gaps = find_gaps(folders, files, orders, problems, never_joined=early, is_live=is_live)
    if not orders and not point_to_point_orders:
        gaps += _explain_missing_orders(folders, files, gaps, is_live=is_live)
    evidence = Evidence(
        expected_ranks=_expected_ranks(files) or tuple(early),
        ranks=ranks | early,
        groups=orders,
        point_to_point_orders=point_to_point_orders,
        replicas=_compare_recorded_replicas(ranks, folders),
        is_live=is_live,
        reports=reports,
        gaps=gaps,
        job_signaled_ns=signaled_ns,
    )
    if command is not None:
        evidence = replace(evidence, job_status=command.status, job_signal=command.signal_received)
    lifetimes = {rank: one.lifetime for rank, one in files.items() if one.lifetime is not None}
    return source, evidence, problems, lifetimes


def _find_folders(path: Path) -> dict[int, Path]:
    """Return the folders of the ranks; none if nothing but the ends of ranks is known that had not joined."""
    return {} if not find_recorded_ranks(path) and has_early_ends(path) else find_rank_folders(path)


def _find_unused_ranks(
    files: Mapping[int, RankState], orders: Iterable[GroupOrder], left_out: Collection[int]
) -> set[int] | None:
    """Return the ranks that left no folder, and with which nobody has completed a collective; None without folders.

    Of ranks whose folder is left out it is not known.
    """
    completed = {
        rank
        for group in orders
        if any(entry.completed_ns is not None for window in group.windows.values() for entry in window)
        for rank in group.ranks
    }
    return _ranks_of_job(files.values()) - files.keys() - completed - set(left_out) if files or left_out else None


def _explain_missing_orders(
    folders: Mapping[int, Path], files: Mapping[int, RankState], gaps: Collection[RecordingGap], *, is_live: bool
) -> tuple[RecordingGap, ...]:
    if not folders or is_live or has_no_launches(folders, files, gaps):
        return ()
    return (make_no_collectives_gap(files.values()),)


def _ignore(*_: int) -> None:
    """Report no progress."""


def _read_ranks(
    folders: Mapping[int, Path],
    states: Mapping[int, Liveness | None],
    source: RecordedOrder,
    exits: Sequence[ProcessExit],
    progress: Progress,
) -> dict[int, RankState]:
    closed = _closed_logs(source.logs)
    files = {}
    for done, (rank, folder) in enumerate(folders.items()):
        progress(done, len(folders))
        latest = source.newest_of(rank)
        files[rank] = read_rank(rank, folder, latest, is_closed=closed[rank], state_before=states[rank], exits=exits)
    progress(len(folders), len(folders))
    return files


def _collect_errors(of_logs: Iterable[Problem], files: Collection[RankState]) -> list[Problem]:
    """Return the errors with any of the files, each once.

    Notes are left out: an open log, because its process was killed or still runs, is a matter for the verdict.
    """
    problems = [*of_logs, *(problem for one in files for problem in one.problems)]
    for one in files:  # last, because it does not report files for which another problem was reported
        one.manifest.report(problems)
    return list(dict.fromkeys(problem for problem in problems if problem.severity == "error"))


def _choose_command(exits: Iterable[ProcessExit]) -> ProcessExit | None:
    """Return the end of the recorded command; of several, with ``--join``, of one that was signaled or has failed."""
    commands = [each for each in exits if each.is_command]
    return min(commands, key=lambda each: (each.signal_received is None, each.status == 0), default=None)


def _find_job_signal(command: ProcessExit | None, files: Iterable[RankState]) -> int | None:
    """Return when the recorded command was signaled to end, if all ranks ran on its host."""
    is_local = command is not None and {command.boot_id} == {one.boot for one in files}
    return command.signaled_at_ns if command is not None and is_local else None


def _compare_recorded_replicas(
    ranks: Mapping[int, RankEvidence], folders: Mapping[int, Path]
) -> tuple[ComparedReplicas, ...]:
    return compare_replicas(
        ranks,
        lambda rank, replica: read_fingerprint_passes(folders[rank], replica.model, len(replica.tensors)),
        lambda rank, replica: read_final_pass(folders[rank], replica.model, len(replica.tensors)),
    )


def _mark_signaled_ranks(
    ranks: Mapping[int, RankEvidence],
    files: Mapping[int, RankState],
    command: ProcessExit | None,
    signaled_at_ns: int | None,
) -> dict[int, RankEvidence]:
    """Mark the ranks that a signal to the whole job has ended, unless the command ended well nevertheless."""
    if command is None or not command.status or signaled_at_ns is None:
        return dict(ranks)
    return {rank: _mark_signaled(one, files[rank].alive_ns, signaled_at_ns) for rank, one in ranks.items()}


def _mark_signaled(one: RankEvidence, alive_ns: int | None, signaled_at_ns: int) -> RankEvidence:
    """Mark a rank as signaled if it ended after the whole job was signaled, or was alive until then.

    Args:
        alive_ns: when its watchdog was last awake.
    """
    has_ended_since = one.liveness == "ended" and one.ended_ns is not None and one.ended_ns >= signaled_at_ns
    is_gone_since = (
        one.liveness == "gone"
        and one.exit_status is None
        and alive_ns is not None
        and alive_ns >= signaled_at_ns - _MAX_SLEEP_NS
    )
    failed_ns = one.failure.time_ns if one.failure is not None else one.ended_ns
    if (
        one.liveness == "failed"
        and one.signaled_at_ns is None
        and failed_ns is not None
        and failed_ns >= signaled_at_ns
    ):
        return replace(one, signaled_at_ns=signaled_at_ns)
    return replace(one, liveness="gone", signaled_at_ns=signaled_at_ns) if has_ended_since or is_gone_since else one


def _closed_logs(logs: CollectiveLogs) -> dict[int, bool]:
    """Return for each rank whether it has logs and all of them were closed, as at the end of a process."""
    states: dict[int, list[bool]] = {rank: [] for rank in logs.folders}
    for files in logs.groups.values():
        for rank, file in files.items():
            states[rank].append(file.header.closed)
    for rank, folder in logs.folders.items():
        if (folder / EVENTS_FILE).exists():
            states[rank].append(is_closed(folder / EVENTS_FILE))
    return {rank: bool(closed) and all(closed) for rank, closed in states.items()}


def _expected_ranks(files: dict[int, RankState]) -> tuple[int, ...]:
    """Return the ranks of the world size that was passed to most ranks."""
    world_sizes = Counter(ranks for one in files.values() if (ranks := parse_expected_ranks(one.run)))
    return world_sizes.most_common(1)[0][0] if world_sizes else tuple(files)


def _add_silence(files: dict[int, RankState]) -> dict[int, RankEvidence]:
    """Add how long each watchdog has been silent: until now, or until the last sign of life from its host."""
    here, now_ns = clocks.get_boot_id(), time.clock_gettime_ns(time.CLOCK_MONOTONIC)
    last_ns: dict[str | None, int] = {}
    for one in files.values():
        heard_ns = one.alive_ns or 0
        if one.boot is not None and one.boot == here and one.evidence.liveness in LIVE_STATES:
            heard_ns = now_ns
        last_ns[one.boot] = max(last_ns.get(one.boot, 0), heard_ns)
    return {
        rank: one.evidence
        if one.alive_ns is None or one.boot is None
        else replace(one.evidence, silent_for_ns=max(0, last_ns[one.boot] - one.alive_ns))
        for rank, one in files.items()
    }


def _add_reported_call_sites(
    ranks: dict[int, RankEvidence], reports: tuple[ReportedVerdict, ...]
) -> dict[int, RankEvidence]:
    """Add to the positions of ranks the lines that watchdogs observed there, which the files of a rank don't hold."""
    found = dict(ranks)
    for report in sorted(reports, key=lambda report: report.time_ns):
        for rank in (*report.blamed, *report.suspected):
            one, site = found.get(rank), report.call_sites.get(rank)
            if one is None or site is None or report.kind not in _POSITION_REPORTS or one.position is None:
                continue
            if one.position.call_site is None and one.position.since_ns <= report.time_ns:
                found[rank] = replace(one, position=replace(one.position, call_site=site))
    return found
