"""Conversion of snapshots and heartbeats to ``Evidence``, for the rules that also judge finished jobs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from instrumented_ddp.watchdog.messages import DivergenceLocation, Heartbeat
from instrumented_ddp.watchdog.process_state import GONE, STOPPED, ProcessState
from overlapscope.diagnosis.card import RankSnapshot
from overlapscope.diagnosis.evidence import Evidence, Liveness, RankEvidence, RankPosition
from overlapscope.diagnosis.exits import combine_liveness_and_status
from overlapscope.diagnosis.order import compare_orders, read_point_to_point_orders
from overlapscope.diagnosis.rank_replicas import compare_replicas
from overlapscope.diagnosis.told_order import LiveCollectiveOrder

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
