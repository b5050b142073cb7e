"""Conversion of snapshots and heartbeats to ``Evidence``, for the rules that also judge finished jobs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from instrumented_ddp.watchdog.peer_channel import DivergenceLocation, Heartbeat
from instrumented_ddp.watchdog.process_state import GONE, STOPPED, ProcessState
from overlapscope.diagnosis.collective_order import (
    ProcessGroup,
    compare_orders,
    decode_entries,
    read_point_to_point_orders,
)
from overlapscope.diagnosis.evidence import Entry, Evidence, Liveness, RankEvidence, RankPosition
from overlapscope.diagnosis.process_state import combine_liveness_and_status
from overlapscope.diagnosis.rank_models import compare_replicas
from overlapscope.diagnosis.rank_snapshot import LogExcerpt, RankSnapshot
from overlapscope.trace.collective_log import ENTRY_DTYPE, Entries
from overlapscope.trace.schema import Signature

# Order of collectives reported by the ranks while the job runs: a few entries of each.


class LiveCollectiveOrder:
    """An ``OrderSource`` of rank snapshots.

    Args:
        cards: snapshot of each rank.
        newest: latest reported number of ranks, by rank and name of the group: their snapshots may be older.
    """

    def __init__(self, cards: Mapping[int, RankSnapshot], latest: Mapping[int, Mapping[str, int]]) -> None:
        self._cards = cards
        self._excerpts: dict[ProcessGroup, dict[int, LogExcerpt]] = {}
        for rank, card in sorted(cards.items()):
            for one in card.logs:
                group = ProcessGroup(
                    name=one.name,
                    ranks=one.ranks,
                    is_point_to_point=one.is_point_to_point,
                    backend=one.backend,
                    description=one.description,
                )
                self._excerpts.setdefault(group, {})[rank] = one
        self._newest = {
            group: self._newest_in(group, excerpts, latest)
            for group, excerpts in sorted(
                self._excerpts.items(), key=lambda item: (item[0].is_point_to_point, item[0].name, item[0].ranks)
            )
        }

    def groups(self) -> tuple[ProcessGroup, ...]:
        """Return all groups in which anything was launched: collectives first, each in the order of their names."""
        return tuple(self._newest)

    def recorded(self, group: ProcessGroup) -> tuple[int, ...]:
        """Return the members of a group that reported their progress, in order."""
        return tuple(self._newest[group])

    def oldest(self, group: ProcessGroup, rank: int) -> int:
        """Return the number of the oldest reported entry; one more than the latest if there is none."""
        excerpt = self._excerpts[group].get(rank)
        return excerpt.rows[0][0] if excerpt and excerpt.rows else self.latest(group, rank) + 1

    def latest(self, group: ProcessGroup, rank: int) -> int:
        """Return the number of the latest entry, reported or not; 0 if there is none."""
        return self._newest[group].get(rank, 0)

    def entries(self, group: ProcessGroup, rank: int, first: int, last: int) -> tuple[Entry, ...]:
        """Return the reported entries with the numbers ``first`` to ``last``, in order."""
        card = self._cards.get(rank)
        rows = self._rows(group, rank, first, last)
        return decode_entries(rows, card.signatures, card.call_sites) if card else ()

    def oldest_incomplete(self, group: ProcessGroup, rank: int) -> Entry | None:
        """Return the first entry of the trailing run of incomplete ones; None if there is none or it is unreported."""
        card, excerpt = self._cards.get(rank), self._excerpts[group].get(rank)
        if card is None or excerpt is None:
            return None
        return next(iter(decode_entries(excerpt.oldest_incomplete, card.signatures, card.call_sites)), None)

    def columns(self, group: ProcessGroup, rank: int, first: int, last: int) -> Entries:
        """Return the same entries as an array of ``ENTRY_DTYPE``."""
        return np.array(self._rows(group, rank, first, last), dtype=ENTRY_DTYPE)

    def signatures(self, rank: int) -> Mapping[int, Signature]:
        """Return a rank's signatures by number."""
        return self._cards[rank].signatures if rank in self._cards else {}

    def _rows(self, group: ProcessGroup, rank: int, first: int, last: int) -> list[tuple[int, ...]]:
        excerpt = self._excerpts[group].get(rank)
        return [row for row in excerpt.rows if first <= row[0] <= last] if excerpt else []

    @staticmethod
    def _newest_in(
        group: ProcessGroup, excerpts: Mapping[int, LogExcerpt], latest: Mapping[int, Mapping[str, int]]
    ) -> dict[int, int]:
        """Return the latest number by rank; for sends and receives from snapshots only."""
        found = {rank: excerpt.latest for rank, excerpt in excerpts.items()}
        for rank in () if group.is_point_to_point else latest:
            if rank in group.ranks and group.name in latest[rank]:
                found[rank] = max(found.get(rank, 0), latest[rank][group.name])
        return dict(sorted(found.items()))


SILENT_AFTER_NS: Final = 2_500_000_000
"""Time in ns without a sign of life after which a watchdog counts as not waking up."""


@dataclass(frozen=True, kw_only=True)
class RankKnowledge:
    """Everything known about one rank."""

    card: RankSnapshot | None = None
    """Latest snapshot of the rank, published by itself or read from its files."""
    has_answered: bool = True
    """True if ``card`` was published by the rank in this investigation."""
    heartbeat: Heartbeat | None = None
    """Latest heartbeat of the rank."""
    silent_ns: int | None = None
    """Age of the latest sign of life in ns."""
    process: ProcessState | None = None
    """Process state according to the kernel, if the rank is on this host."""
    cpu_share: float | None = None


def make_evidence(
    world_size: int, known: Mapping[int, RankKnowledge], divergences: Sequence[DivergenceLocation]
) -> Evidence:
    """Combine what is known of all ranks.

    Args:
        known: what is known of each rank, by rank.
        pointers: known divergences, at most one per group.
    """
    source = LiveCollectiveOrder(
        {rank: one.card for rank, one in known.items() if one.card is not None},
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
    reported, heartbeat = None if one.card is None else one.card.evidence, one.heartbeat
    if one.has_answered or heartbeat is None:
        return reported
    exit_status = (
        heartbeat.exit_call.status
        if heartbeat.exit_call is not None
        else reported.exit_status
        if reported is not None
        else None
    )
    liveness = combine_liveness_and_status(liveness_of(heartbeat, one.process, one.silent_ns), exit_status)
    is_there = liveness in ("running", "sleeping")
    if reported is None:
        reported = RankEvidence(
            rank=heartbeat.rank,
            host=heartbeat.host,
            pid=heartbeat.pid,
            position=RankPosition(
                step=heartbeat.step,
                phase=heartbeat.phase,
                since_ns=heartbeat.since_ns,
                is_after_update=heartbeat.phase in ("loop", "evaluation"),
            ),
            steps_done=heartbeat.step,
            unrecorded_because=heartbeat.unrecorded_because,
        )
    return replace(
        reported,
        liveness=liveness,
        failure=heartbeat.failure or reported.failure,
        exit_status=exit_status,
        exit_call=heartbeat.exit_call,
        step_time_ns=heartbeat.step_time_ns,
        idle_ns=reported.idle_ns if liveness == "gone" else one.silent_ns,  # not the time since it is gone
        silent_for_ns=one.silent_ns,
        cpu_share=one.cpu_share,
        is_working=None,
        holds_gil=is_there and (one.silent_ns or 0) >= SILENT_AFTER_NS,
        rss_bytes=heartbeat.rss_bytes,
        memory_limit_bytes=heartbeat.memory_limit_bytes,
    )


def liveness_of(heartbeat: Heartbeat, process: ProcessState | None, silent_ns: int | None) -> Liveness:
    """Return the liveness of a rank that has not published a snapshot.

    Args:
        process: process state according to the kernel; None if the rank is on another host.
    """
    if heartbeat.how != "runs":
        return heartbeat.how
    if process is None:
        return "silent" if (silent_ns or 0) >= SILENT_AFTER_NS else "unknown"
    if process.state == GONE:
        return "gone"
    if process.state in STOPPED:
        return "stopped"
    return "running" if process.state == "R" else "sleeping"
