"""Rules for faults before the first step: missing ranks, or different world sizes."""

from __future__ import annotations

from typing import Final

from overlapscope.diagnosis.evidence import CallSite, RankEvidence
from overlapscope.diagnosis.text import (
    at_line,
    capitalize,
    collective_text,
    format_position,
    format_seconds,
    join_and,
    plural,
    rank_list,
)
from overlapscope.diagnosis.verdict import Verdict
from overlapscope.diagnosis.wait_graph import Facts, find_minority

_MIN_REPORTED_NS: Final = 3_000_000_000


def find_wrong_world_size(facts: Facts) -> Verdict | None:
    """Find ranks with different world sizes, or a rank beyond the world size."""
    world_sizes: dict[int, list[int]] = {}
    for rank, one in sorted(facts.ranks.items()):
        if one.world_size is not None:
            world_sizes.setdefault(one.world_size, []).append(rank)
    beyond = [rank for size, ranks in world_sizes.items() for rank in ranks if rank >= size]
    if len(world_sizes) < 2 and not beyond:
        return None
    sentences = [
        f"{rank_list(ranks)} {plural(ranks, 'was', 'were')} told {size}" for size, ranks in world_sizes.items()
    ]
    sentence = f"The ranks disagree on the world size: {join_and(sentences)}."
    if len(world_sizes) == 1:
        sentence = f"{capitalize(rank_list(beyond))} can't be in a world of {next(iter(world_sizes))} ranks."
    return Verdict(
        kind="wrong world size",
        sentence=sentence,
        blamed=tuple(beyond) or find_minority(world_sizes.values(), len(facts.ranks)),
        concerned=tuple(sorted(facts.ranks)),
        call_sites={rank: site for rank, one in facts.ranks.items() if (site := _line(one)) is not None} or None,
        evidence=("World sizes passed to init_process_group on each rank (run.json, joining.json).",),
        advice=("Start all ranks with the same WORLD_SIZE (--nnodes and --nproc-per-node of torchrun).",),
    )


def find_never_started(facts: Facts) -> Verdict | None:
    """Find an expected rank that left nothing, and with which no collective ever completed."""
    gone = tuple(rank for rank in facts.missing if not _was_there(facts, rank))
    gone += facts.ranks_with_liveness("never started")
    if not gone or not facts.ranks or facts.is_from_dumps:
        return None
    others = tuple(rank for rank in facts.world if rank not in gone)
    is_before = all(facts.latest(group, rank) is None for group in facts.evidence.groups for rank in others)
    what = "never started"
    if facts.evidence.is_live:
        waited_ns = max((facts.ranks[rank].idle_ns or 0 for rank in others if rank in facts.ranks), default=0)
        after = f" after {format_seconds(waited_ns)}" if waited_ns else " yet"
        what = f"{plural(gone, 'has', 'have')} not joined{after}"
    return Verdict(
        kind="never started",
        sentence=f"{capitalize(rank_list(gone))} of {len(facts.world)} {what}: the others wait for "
        f"{plural(gone, 'it', 'them')} in {'init_process_group' if is_before else 'their first collective'}.",
        blamed=gone,
        concerned=(*gone, *others),
        alternative=f"{plural(gone, 'it', 'they')} may still be on {plural(gone, 'its', 'their')} way"
        if facts.evidence.is_live
        else "",
        call_sites={rank: site for rank in others[:1] if (site := _line(facts.ranks.get(rank))) is not None} or None,
        evidence=(
            f"No folder in the recording for {rank_list(gone)}.",
            f"No collective with {rank_list(gone)} has completed on any other rank.",
        ),
        advice=("Look at the launcher's output on that host: was the process started, and did it fail on import?",),
    )


def find_slow_start(facts: Facts) -> Verdict | None:
    """Find a rank without a completed step that the others wait for: that may take minutes, or be where it hangs."""
    for rank in facts.awaited:
        one, wait = facts.ranks.get(rank), facts.wait_for((rank,))
        if one is None or wait is None or not one.is_starting or one.position is None or not one.idle_ns:
            continue
        if one.idle_ns < _MIN_REPORTED_NS:
            continue
        position = one.position
        where = at_line(position.call_site) or " in its script"
        if position.phase is not None:
            where = f" {format_position(position)}"
        waiting = facts.waiting
        missed = wait.first_missed_by((rank,))
        return Verdict(
            kind="slow",
            sentence=f"Rank {rank} has been{where} for {format_seconds(one.idle_ns)}, and {rank_list(waiting)} "
            f"{plural(waiting, 'waits', 'wait')} for it in {collective_text(missed, with_names=False)}"
            f"{at_line(missed.call_site)}. First steps may take long.",
            concerned=(rank, *waiting),
            step=position.step,
            call_sites={rank: position.call_site} if position.call_site else None,
        )
    return None


def _line(one: RankEvidence | None) -> CallSite | None:
    return one.position.call_site if one is not None and one.position is not None else None


def _was_there(facts: Facts, rank: int) -> bool:
    """Return True if only a rank's folder may be lost: others completed collectives with it, or all ended well."""
    groups = [group for group in facts.evidence.groups if rank in group.ranks]
    is_done = any(e.completed_ns is not None for g in groups for window in g.windows.values() for e in window)
    return is_done or not facts.ranks_with_liveness("running", "sleeping", "stopped", "failed", "gone")
