"""Judging of an investigation: what is known about every rank, as ``Evidence`` for the rules of ``overlapscope``.

A rank that answers publishes a snapshot. The judge inspects the process and the files of one that does not: it is dead,
stopped, or holds the GIL.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import numpy as np

from instrumented_ddp.watchdog.process_state import (
    GONE,
    STACKS_SIGNAL,
    STOPPED,
    ProcessState,
    can_be_signaled,
    read_process_state,
)
from instrumented_ddp.watchdog.protocol import DivergenceLocation, Heartbeat, Investigation, Outcome
from overlapscope.diagnosis.collective_order import (
    RecordedOrder,
    compare_order,
    compare_orders,
    decode_entries,
    read_point_to_point_orders,
)
from overlapscope.diagnosis.evidence import Entry, Evidence, GroupOrder, Liveness, RankEvidence
from overlapscope.diagnosis.judge import judge
from overlapscope.diagnosis.process_state import combine_liveness_and_status, find_user_line
from overlapscope.diagnosis.rank_models import compare_replicas, read_replicas_for_snapshot
from overlapscope.diagnosis.rank_snapshot import LogExcerpt, RankSnapshot, make_snapshot
from overlapscope.diagnosis.rank_state import read_rank
from overlapscope.diagnosis.report_text import format_report
from overlapscope.diagnosis.verdict import Verdict
from overlapscope.diagnosis.wait_graph import Facts
from overlapscope.trace.clocks import get_boot_id, host_now_ns
from overlapscope.trace.collective_log import ENTRY_DTYPE, Entries, ProcessGroup, Signature
from overlapscope.trace.collective_log_reader import open_collective_logs
from overlapscope.trace.live_files import read_alive_file
from overlapscope.trace.process_files import read_exits
from overlapscope.trace.schema import LIVENESS_FILE, rank_folder

SILENT_AFTER_NS: Final = 2_500_000_000
"""Time in ns without a sign of life after which a watchdog counts as not waking up."""

_MIN_OBSERVATION_NS: Final = 400_000_000
"""Minimum time in ns to observe the process of a rank that does not answer, or to wait for its exit status."""
_FROM_HEARTBEAT: Final = ("failure", "exit_call", "step_time_ns", "rss_bytes", "memory_limit_bytes")
"""Fields of ``RankEvidence`` in which a heartbeat is more recent than the files of its rank."""


@dataclass(frozen=True, kw_only=True)
class RankKnowledge:
    """Everything known about one rank."""

    snapshot: RankSnapshot | None = None
    """Latest snapshot of the rank, published by itself or read from its files."""
    has_answered: bool = True
    """True if the rank has published its snapshot in this investigation."""
    heartbeat: Heartbeat | None = None
    """Latest heartbeat of the rank."""
    silent_ns: int | None = None
    """Age of the latest sign of life in ns."""
    process: ProcessState | None = None
    """Process state according to the kernel, if the rank is on this host."""
    cpu_share: float | None = None


class Inspector:
    """Inspector of the ranks that do not answer one investigation.

    Args:
        run_folder: folder in which ranks may have left files.
        host_id: identity of this host, which tells whose processes can be inspected.
    """

    def __init__(self, run_folder: Path, host_id: str) -> None:
        self._run_folder = run_folder
        self._host_id = host_id
        self._began_ns = host_now_ns()
        self._first_observations: dict[int, tuple[int, ProcessState]] = {}
        """Time and process state at the first look at each rank."""

    def unresponsive_ranks(self, heartbeats: Mapping[int, Heartbeat]) -> set[int]:
        """Return the ranks on this host that will not answer, after a long enough look at their processes."""
        return {rank for rank, heartbeat in heartbeats.items() if self._is_unresponsive(rank, heartbeat)}

    def judge(self, case: Investigation, divergences: Sequence[DivergenceLocation], rank: int, size: int) -> Outcome:
        """Judge what is wrong from everything known so far.

        Args:
            divergences: known divergences, at most one per group.
            rank: rank of this process, the judge.
            size: number of ranks of the job.
        """
        undecided_time_ns = None
        differences = {divergence.group: divergence.difference.number for divergence in divergences}
        try:
            known = {each: self._known(case, each, differences) for each in range(size)}
            evidence = make_evidence(size, known, divergences)
            evidence = replace(evidence, groups=add_older_entries(self._run_folder, evidence))
            verdict = judge(evidence)
            if not verdict.is_fault:
                undecided_time_ns = Facts(evidence).undecided_time_ns
            message = format_report(verdict, evidence)
        except Exception as error:  # a gap in the rules is no reason to be silent
            sentence = f"Rank {case.alarm.by} raised an alarm ({case.alarm.why}) that can't be judged: {error!r}."
            verdict, message = Verdict(kind="cannot tell", sentence=sentence), sentence
        return Outcome(
            judge=rank,
            verdict=verdict,
            message=message,
            listening=tuple(endpoint for snapshot in case.snapshots.values() for endpoint in snapshot.listening),
            undecided_time_ns=undecided_time_ns,
        )

    def _known(self, case: Investigation, rank: int, differences: Mapping[str, int]) -> RankKnowledge:
        snapshot, heartbeat = case.snapshots.get(rank), case.heartbeats.get(rank)
        if snapshot is not None:
            return RankKnowledge(snapshot=snapshot, heartbeat=heartbeat)
        is_about_replicas = case.alarm.why == "replicas differ"
        snapshot = read_snapshot(self._run_folder, rank, differences, with_fingerprints=is_about_replicas)
        snapshot = snapshot or case.previous_snapshots.get(rank)
        if heartbeat is None:
            return RankKnowledge(snapshot=snapshot)
        now_ns = host_now_ns()
        unanswered = RankKnowledge(snapshot=snapshot, has_answered=False, heartbeat=heartbeat)
        if heartbeat.host_id != self._host_id:
            return replace(unanswered, silent_ns=now_ns - self._began_ns + SILENT_AFTER_NS)
        process = process_of(heartbeat)
        before = self._first_observations.get(rank)
        share = None
        if before is not None and now_ns - before[0] > SILENT_AFTER_NS // 10:
            share = (process.cpu_ns - before[1].cpu_ns) / (now_ns - before[0])
        return replace(unanswered, silent_ns=self._silent_ns(heartbeat), process=process, cpu_share=share)

    def _is_unresponsive(self, rank: int, heartbeat: Heartbeat) -> bool:
        if heartbeat.host_id != self._host_id:
            return False
        process, now_ns = process_of(heartbeat), host_now_ns()
        if rank not in self._first_observations:
            self._first_observations[rank] = now_ns, process
            self._request_stacks(heartbeat, process)
        if process.state in STOPPED or heartbeat.evidence.liveness == "ended":
            return True
        has_looked = now_ns - self._first_observations[rank][0] >= _MIN_OBSERVATION_NS
        if process.state == GONE:  # its launcher, which knows the exit status, may be about to notice
            return has_looked or heartbeat.is_final or is_exit_recorded(self._run_folder, heartbeat.evidence.pid)
        return has_looked and self._silent_ns(heartbeat) >= SILENT_AFTER_NS

    def _request_stacks(self, heartbeat: Heartbeat, process: ProcessState) -> None:
        """Make a process that is there and silent dump its stacks into its folder."""
        is_there = liveness_of(heartbeat, process, None) in ("running", "sleeping")
        if is_there and self._silent_ns(heartbeat) >= SILENT_AFTER_NS and heartbeat.dumps_stacks:
            with suppress(OSError):
                if can_be_signaled(heartbeat.evidence.pid, process):
                    os.kill(heartbeat.evidence.pid, STACKS_SIGNAL)

    def _silent_ns(self, heartbeat: Heartbeat) -> int:
        """Return how long a rank on this host has given no sign of life, neither in the store nor in its folder."""
        return host_now_ns() - max(heartbeat.time_ns, last_awake_ns(self._run_folder, heartbeat.evidence.rank))


# -- ranks that do not answer: their processes and files -------------------------------------------------------------


def process_of(heartbeat: Heartbeat) -> ProcessState:
    """Return the state of the process on this host that has published a heartbeat."""
    return read_process_state(heartbeat.evidence.pid, heartbeat.start_ticks)


def liveness_of(heartbeat: Heartbeat, process: ProcessState | None, silent_ns: int | None) -> Liveness:
    """Return the liveness of a rank that has not published a snapshot.

    Args:
        process: process state according to the kernel; None if the rank is on another host.
    """
    if heartbeat.is_final:
        return heartbeat.evidence.liveness
    if process is None:
        return "silent" if (silent_ns or 0) >= SILENT_AFTER_NS else "unknown"
    if process.state == GONE:
        return "gone"
    if process.state in STOPPED:
        return "stopped"
    return "running" if process.state == "R" else "sleeping"


def read_snapshot(
    run_folder: Path, rank: int, differences: Mapping[str, int], *, with_fingerprints: bool
) -> RankSnapshot | None:
    """Return the snapshot of a rank that can't publish one, or has not so far, from its files.

    Args:
        differences: by group, the entry number around which entries are wanted.
        with_fingerprints: whether to include the fingerprints of its replicas, which are long.

    Returns:
        None if the rank has left no files here.
    """
    folder = rank_folder(run_folder, rank)
    if not folder.exists():
        return None
    logs = open_collective_logs({rank: folder})
    source = RecordedOrder(logs)
    exits = read_exits(run_folder, [])  # the launcher may have seen its exit by now
    evidence = read_rank(rank, folder, source.newest_of(rank), is_closed=False, exits=exits).evidence
    if with_fingerprints:
        evidence = replace(evidence, replicas=read_replicas_for_snapshot(folder))
    site = find_user_line(evidence.stacks)  # the stacks were requested just now, if possible
    if evidence.position is not None and site is not None:
        evidence = replace(evidence, position=replace(evidence.position, call_site=site))
    return make_snapshot(
        evidence,
        [files[rank] for files in logs.groups.values()],
        signature_of=logs.signatures(rank).get,
        call_site_of=source.call_sites(rank).get,
        differences=differences,
    )


def add_older_entries(run_folder: Path, evidence: Evidence) -> tuple[GroupOrder, ...]:
    """Return the groups with the first difference from the files, if it may be older than the entries in snapshots.

    A job of short steps is far ahead by the time at which it is judged, and a rank that has ended may have done so
    because of a difference that nobody had time to find. Files of ranks on other hosts may not be here.
    """
    has_ended = any(one.liveness in ("failed", "gone") for one in evidence.ranks.values())
    ranks = {rank for group in evidence.groups if group.predates_log or has_ended for rank in group.windows}
    folders = {rank: folder for rank in sorted(ranks) if (folder := rank_folder(run_folder, rank)).exists()}
    if not folders:
        return evidence.groups
    source = RecordedOrder(open_collective_logs(folders))
    known = {
        (group.name, group.ranks): compare_order(source, group)
        for group in source.groups()
        if not group.is_point_to_point
    }
    return tuple(
        _with_first_difference(group, known.get((group.name, group.ranks)))
        if group.predates_log or has_ended
        else group
        for group in evidence.groups
    )


def _with_first_difference(group: GroupOrder, read: GroupOrder | None) -> GroupOrder:
    if read is None or read.first_divergence is None or read.predates_log:
        return group
    is_older = group.first_divergence is None or read.first_divergence < group.first_divergence
    if not (is_older or group.predates_log) or not read.windows.keys() >= group.windows.keys():
        return group
    return replace(
        group,
        first_divergence=read.first_divergence,
        divergence=read.divergence,
        predates_log=False,
        windows=read.windows,
        steps_before=read.steps_before,
        oldest_incomplete=read.oldest_incomplete,
    )


def is_exit_recorded(run_folder: Path, pid: int) -> bool:
    """Return whether the launcher of a process on this host has recorded how it ended."""
    here = get_boot_id()
    return any(each.pid == pid and each.boot_id == here and not each.is_command for each in read_exits(run_folder, []))


def last_awake_ns(run_folder: Path, rank: int) -> int:
    """Return when the watchdog of a rank on this host was last awake, even if it could not publish it; 0 if unknown."""
    alive_ns, _, _ = read_alive_file(rank_folder(run_folder, rank) / LIVENESS_FILE, [])
    return alive_ns or 0


# -- evidence of all ranks ------------------------------------------------------------------------------------------


def make_evidence(
    world_size: int, known: Mapping[int, RankKnowledge], divergences: Sequence[DivergenceLocation]
) -> Evidence:
    """Combine what is known of all ranks.

    Args:
        known: what is known of each rank, by rank.
        divergences: known divergences, at most one per group.
    """
    source = LiveCollectiveOrder(
        {rank: one.snapshot for rank, one in known.items() if one.snapshot is not None},
        {
            rank: {group: head.latest for group, head in one.heartbeat.heads.items()}
            for rank, one in known.items()
            if one.heartbeat is not None and not one.has_answered
        },
    )
    ranks = {rank: evidence for rank, one in sorted(known.items()) if (evidence := _rank_evidence(one)) is not None}
    return Evidence(
        expected_ranks=tuple(range(world_size)),
        ranks=ranks,
        groups=compare_orders(source, {divergence.group: divergence.difference for divergence in divergences}),
        point_to_point_orders=read_point_to_point_orders(source),
        replicas=compare_replicas(ranks, lambda _, replica: replica.table()),
        is_live=True,
    )


def _rank_evidence(one: RankKnowledge) -> RankEvidence | None:
    """Return the evidence of a snapshot; if the rank has not answered, with what its heartbeat and /proc add to it."""
    reported, heartbeat = None if one.snapshot is None else one.snapshot.evidence, one.heartbeat
    if one.has_answered or heartbeat is None:
        return reported
    recent = heartbeat.evidence
    reported = reported or recent
    latest = {name: value for name in _FROM_HEARTBEAT if (value := getattr(recent, name)) is not None}
    exit_status = reported.exit_status if recent.exit_call is None else recent.exit_call.status
    liveness = combine_liveness_and_status(liveness_of(heartbeat, one.process, one.silent_ns), exit_status)
    is_there = liveness in ("running", "sleeping")
    return replace(
        reported,
        **latest,
        liveness=liveness,
        exit_status=exit_status,
        idle_ns=reported.idle_ns if liveness == "gone" else one.silent_ns,  # not the time since it is gone
        silent_for_ns=one.silent_ns,
        cpu_share=one.cpu_share,
        is_working=None,
        holds_gil=is_there and (one.silent_ns or 0) >= SILENT_AFTER_NS,
    )


class LiveCollectiveOrder:
    """An ``OrderSource`` of rank snapshots.

    Args:
        snapshots: snapshot of each rank.
        latest: latest entry number in a heartbeat, by rank and name of the group: the snapshots may be older.
    """

    def __init__(self, snapshots: Mapping[int, RankSnapshot], latest: Mapping[int, Mapping[str, int]]) -> None:
        self._snapshots = snapshots
        self._excerpts: dict[ProcessGroup, dict[int, LogExcerpt]] = {}
        for rank, snapshot in sorted(snapshots.items()):
            for excerpt in snapshot.logs:
                self._excerpts.setdefault(excerpt.group, {})[rank] = excerpt
        self._latest = {
            group: self._latest_in(group, excerpts, latest)
            for group, excerpts in sorted(self._excerpts.items(), key=lambda item: item[0].order)
        }

    def groups(self) -> tuple[ProcessGroup, ...]:
        """Return all groups in which anything was launched: collectives first, each in the order of their names."""
        return tuple(self._latest)

    def recorded(self, group: ProcessGroup) -> tuple[int, ...]:
        """Return the members of a group that reported their progress, in order."""
        return tuple(self._latest[group])

    def oldest(self, group: ProcessGroup, rank: int) -> int:
        """Return the number of the oldest reported entry; one more than the latest if there is none."""
        excerpt = self._excerpts[group].get(rank)
        return excerpt.rows[0][0] if excerpt and excerpt.rows else self.latest(group, rank) + 1

    def latest(self, group: ProcessGroup, rank: int) -> int:
        """Return the number of the latest entry, reported or not; 0 if there is none."""
        return self._latest[group].get(rank, 0)

    def entries(self, group: ProcessGroup, rank: int, first: int, last: int) -> tuple[Entry, ...]:
        """Return the reported entries with the numbers ``first`` to ``last``, in order."""
        snapshot = self._snapshots.get(rank)
        rows = self._rows(group, rank, first, last)
        return decode_entries(rows, snapshot.signatures, snapshot.call_sites) if snapshot else ()

    def oldest_incomplete(self, group: ProcessGroup, rank: int) -> Entry | None:
        """Return the first entry of the trailing run of incomplete ones; None if there is none or it is unreported."""
        snapshot, excerpt = self._snapshots.get(rank), self._excerpts[group].get(rank)
        if snapshot is None or excerpt is None:
            return None
        return next(iter(decode_entries(excerpt.oldest_incomplete, snapshot.signatures, snapshot.call_sites)), None)

    def columns(self, group: ProcessGroup, rank: int, first: int, last: int) -> Entries:
        """Return the same entries as an array of ``ENTRY_DTYPE``."""
        return np.array(self._rows(group, rank, first, last), dtype=ENTRY_DTYPE)

    def signatures(self, rank: int) -> Mapping[int, Signature]:
        """Return a rank's signatures by number."""
        return self._snapshots[rank].signatures if rank in self._snapshots else {}

    def steps_before(self, group: ProcessGroup, rank: int, number: int) -> tuple[int, ...]:
        """Return the steps of the last entries before this one that are like it, in order; nothing if unreported."""
        excerpt = self._excerpts[group].get(rank)
        return excerpt.steps_before.get(number, ()) if excerpt else ()

    def _rows(self, group: ProcessGroup, rank: int, first: int, last: int) -> list[tuple[int, ...]]:
        excerpt = self._excerpts[group].get(rank)
        return [row for row in excerpt.rows if first <= row[0] <= last] if excerpt else []

    @staticmethod
    def _latest_in(
        group: ProcessGroup, excerpts: Mapping[int, LogExcerpt], latest: Mapping[int, Mapping[str, int]]
    ) -> dict[int, int]:
        """Return the latest number by rank; for sends and receives from snapshots only."""
        found = {rank: excerpt.latest for rank, excerpt in excerpts.items()}
        for rank in () if group.is_point_to_point else latest:
            if rank in group.ranks and group.name in latest[rank]:
                found[rank] = max(found.get(rank, 0), latest[rank][group.name])
        return dict(sorted(found.items()))
