"""Conversion of snapshots and heartbeats to ``Evidence``, for the rules that also judge finished jobs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from instrumented_ddp.watchdog.messages import Beat, Pointer
from instrumented_ddp.watchdog.process_state import GONE, STOPPED, ProcessState
from overlapscope.diagnosis.card import Card
from overlapscope.diagnosis.evidence import Evidence, Liveness, RankEvidence, Standing
from overlapscope.diagnosis.exits import ended_with
from overlapscope.diagnosis.order import conversations_of, orders_of
from overlapscope.diagnosis.rank_replicas import compare_replicas
from overlapscope.diagnosis.told_order import ToldOrder

SILENT_AFTER_NS: Final = 2_500_000_000
"""Time in ns without a sign of life after which a watchdog counts as not waking up."""


@dataclass(frozen=True, kw_only=True)
class Known:
    """Everything known about one rank."""

    card: Card | None = None
    """Latest snapshot of the rank, published by itself or read from its files."""
    has_answered: bool = True
    """True if ``card`` was published by the rank in this investigation."""
    beat: Beat | None = None
    """Latest heartbeat of the rank."""
    silent_ns: int | None = None
    """Age of the latest sign of life in ns."""
    process: ProcessState | None = None
    """Process state according to the kernel, if the rank is on this host."""
    cpu_share: float | None = None


def make_evidence(world_size: int, known: Mapping[int, Known], pointers: Sequence[Pointer]) -> Evidence:
    """Combine what is known of all ranks.

    Args:
        known: what is known of each rank, by rank.
        pointers: known divergences, at most one per group.
    """
    source = ToldOrder(
        {rank: one.card for rank, one in known.items() if one.card is not None},
        {
            rank: {group: head.newest for group, head in one.beat.heads.items()}
            for rank, one in known.items()
            if one.beat is not None and not one.has_answered
        },
    )
    ranks = {rank: evidence for rank, one in sorted(known.items()) if (evidence := _rank(one)) is not None}
    return Evidence(
        expected_ranks=tuple(range(world_size)),
        ranks=ranks,
        groups=orders_of(source, {pointer.group: pointer.difference for pointer in pointers}),
        conversations=conversations_of(source),
        replicas=compare_replicas(ranks, lambda _, replica: replica.table()),
        is_live=True,
    )


def _rank(one: Known) -> RankEvidence | None:
    told, beat = None if one.card is None else one.card.evidence, one.beat
    if one.has_answered or beat is None:
        return told
    exit_status = (
        beat.exit_call.status if beat.exit_call is not None else told.exit_status if told is not None else None
    )
    liveness = ended_with(liveness_of(beat, one.process, one.silent_ns), exit_status)
    is_there = liveness in ("running", "sleeping")
    if told is None:
        told = RankEvidence(
            rank=beat.rank,
            host=beat.host,
            pid=beat.pid,
            standing=Standing(
                step=beat.step,
                phase=beat.phase,
                since_ns=beat.since_ns,
                is_after_update=beat.phase in ("loop", "evaluation"),
            ),
            steps_done=beat.step,
            unrecorded_because=beat.unrecorded_because,
        )
    return replace(
        told,
        liveness=liveness,
        failure=beat.failure or told.failure,
        exit_status=exit_status,
        exit_call=beat.exit_call,
        step_time_ns=beat.step_time_ns,
        idle_ns=told.idle_ns if liveness == "gone" else one.silent_ns,  # not the time since it is gone
        heard_ns_ago=one.silent_ns,
        cpu_share=one.cpu_share,
        is_working=None,
        holds_gil=is_there and (one.silent_ns or 0) >= SILENT_AFTER_NS,
        rss_bytes=beat.rss_bytes,
        memory_limit_bytes=beat.memory_limit_bytes,
    )


def liveness_of(beat: Beat, process: ProcessState | None, silent_ns: int | None) -> Liveness:
    """Return the liveness of a rank that has not published a snapshot.

    Args:
        process: process state according to the kernel; None if the rank is on another host.
    """
    if beat.how != "runs":
        return beat.how
    if process is None:
        return "silent" if (silent_ns or 0) >= SILENT_AFTER_NS else "unknown"
    if process.state == GONE:
        return "gone"
    if process.state in STOPPED:
        return "stopped"
    return "running" if process.state == "R" else "sleeping"
