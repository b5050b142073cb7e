"""Rules for faults before the first step: missing ranks, different world sizes, or addresses that can't be reached."""

from __future__ import annotations

from typing import Final

from overlapscope.diagnosis.evidence import STARTING, CallSite, Failure, RankEvidence
from overlapscope.diagnosis.failures import (
    UnreachableAddress,
    find_unreachable_address,
    has_own_failure,
    is_consequence,
)
from overlapscope.diagnosis.text import loop_step
from overlapscope.diagnosis.texts import processes as text
from overlapscope.diagnosis.verdict import Verdict, known_sites
from overlapscope.diagnosis.wait_graph import Facts, find_minority

_MIN_REPORTED_NS: Final = 3_000_000_000


def find_wrong_world_size(facts: Facts) -> Verdict | None:
    """Find ranks with different world sizes, or a rank beyond the world size."""
    by_call: dict[int, dict[int, list[int]]] = {}
    for rank, one in sorted(facts.ranks.items()):
        if one.world_size is not None:
            by_call.setdefault(one.init_calls, {}).setdefault(one.world_size, []).append(rank)
    for call, world_sizes in sorted(by_call.items(), reverse=True):
        # In a later call a process may be given another rank. A folder without a process is not a rank's.
        beyond = [
            rank
            for size, ranks in world_sizes.items()
            for rank in ranks
            if rank >= size and call == 1 and facts.ranks[rank].pid > 0
        ]
        if len(world_sizes) > 1 or beyond:
            return _world_size_verdict(facts, call, world_sizes, beyond)
    return None


def _world_size_verdict(facts: Facts, call: int, world_sizes: dict[int, list[int]], beyond: list[int]) -> Verdict:
    members = sorted(rank for ranks in world_sizes.values() for rank in ranks)
    return Verdict(
        kind="wrong world size",
        **text.wrong_world_size(world_sizes, beyond, call),
        blamed=tuple(beyond) or find_minority(world_sizes.values(), len(members)),
        concerned=tuple(members),
        call_sites=known_sites({rank: _line(facts.ranks[rank]) for rank in members}),
    )


def find_never_started(facts: Facts) -> Verdict | None:
    """Find an expected rank that left nothing, and with which no collective ever completed."""
    ended = _find_ended_early(facts)
    observed = (*facts.ranks_with_liveness("never started"), *ended)
    reported = _reported(facts)
    gone = _find_absent(facts, observed, reported)
    # A folder that is not here is no evidence on its own: those of other hosts have to be copied.
    is_known = bool(observed) or reported is not None or facts.evidence.is_live
    if not gone or not facts.ranks or facts.is_from_dumps:
        return None
    if _is_explained(facts, is_observed=bool(observed), is_known=is_known):
        return None
    others = tuple(rank for rank in facts.world if rank not in gone)
    return Verdict(
        kind="never started",
        **text.never_started(
            gone,
            len(facts.world),
            ended=[rank for rank in gone if rank in ended],
            is_joining=not _has_launched(facts, others),
            waited_ns=_longest_wait_ns(facts, others) if facts.evidence.is_live else None,
            is_known=is_known,
        ),
        blamed=gone if is_known else (),
        concerned=(*gone, *others),
        call_sites=known_sites({rank: _line(facts.ranks.get(rank)) for rank in others[:1]}),
    )


def _is_explained(facts: Facts, *, is_observed: bool, is_known: bool) -> bool:
    """Return True if ranks failed by themselves, so that others may still be on their way, or were ended for that."""
    if not is_observed and any(map(has_own_failure, facts.ranks.values())):
        return True
    return not is_known and bool(_find_unreachable(facts))


def _reported(facts: Facts) -> tuple[int, ...] | None:
    """Return the ranks that a watchdog reported not to have come, while it waited for them; None without a report."""
    reports = [report for report in facts.evidence.reports if report.kind == "never started"]
    latest = max(reports, key=lambda report: report.time_ns, default=None)
    return None if latest is None else latest.blamed or latest.suspected


def _find_absent(facts: Facts, observed: tuple[int, ...], reported: tuple[int, ...] | None) -> tuple[int, ...]:
    gone = (*(rank for rank in facts.missing if not _was_there(facts, rank)), *observed)
    return gone if reported is None else tuple(rank for rank in gone if rank in reported)


def _find_ended_early(facts: Facts) -> tuple[int, ...]:
    """Return the ranks that ended well before they came to ``init_process_group``."""
    positions = {rank: facts.ranks[rank].position for rank in facts.ranks_with_liveness("ended")}
    return tuple(rank for rank, where in positions.items() if where is not None and where.phase == STARTING)


def _longest_wait_ns(facts: Facts, ranks: tuple[int, ...]) -> int:
    return max((facts.ranks[rank].idle_ns or 0 for rank in ranks if rank in facts.ranks), default=0)


def _has_launched(facts: Facts, ranks: tuple[int, ...]) -> bool:
    """Return True if any of these ranks has launched a collective."""
    return any(facts.latest(group, rank) is not None for group in facts.evidence.groups for rank in ranks)


def find_slow_start(facts: Facts) -> Verdict | None:
    """Find a rank without a completed step that the others wait for: that may take minutes, or be where it hangs."""
    for rank in facts.awaited:
        one, wait = facts.ranks.get(rank), facts.wait_for((rank,))
        if one is None or wait is None or not one.is_starting or one.position is None or one.idle_ns is None:
            continue
        if one.idle_ns < _MIN_REPORTED_NS:
            continue
        position = one.position
        return Verdict(
            kind="slow",
            **text.slow_start(rank, position, one.idle_ns, facts.waiting, wait.first_missed_by((rank,))),
            concerned=(rank, *facts.waiting),
            step=loop_step(position),
            call_sites=known_sites({rank: position.call_site}),
        )
    return None


def find_unreachable(facts: Facts) -> Verdict | None:
    """Find ranks that failed because they could not connect to the store, or to another rank."""
    unreachable = _find_unreachable(facts)
    if not unreachable or any(map(_was_killed, facts.ranks.values())):
        return None
    address, failure = min(unreachable.values(), key=lambda found: found[1].time_ns)
    failed = [rank for rank, (other, _) in unreachable.items() if other.is_store == address.is_store]
    rest = [rank for rank, one in sorted(facts.ranks.items()) if rank not in failed and is_consequence(one.failure)]
    hosts = {one.host for one in facts.ranks.values()} - {""}
    return Verdict(
        kind="failed",
        **text.unreachable(
            failed,
            address,
            failure,
            consequences=[facts.ranks[rank] for rank in rest],
            missing=facts.missing,
            gone=facts.ranks_with_liveness("gone"),
            is_on_several_hosts=len(hosts) > 1,
        ),
        concerned=(*failed, *rest),
        call_sites=known_sites({rank: _line(facts.ranks[rank]) for rank in failed}),
    )


def _was_killed(one: RankEvidence) -> bool:
    return one.exit_status is not None and one.exit_status < 0 and not one.was_signaled


def _find_unreachable(facts: Facts) -> dict[int, tuple[UnreachableAddress, Failure]]:
    """Return what ranks could not connect to; not after their first step, when it is rather because a rank has died."""
    return {
        rank: (address, one.failure)
        for rank, one in sorted(facts.ranks.items())
        if one.failure is not None
        and not one.steps_done
        and (address := find_unreachable_address(one.failure)) is not None
    }


def _line(one: RankEvidence | None) -> CallSite | None:
    return one.position.call_site if one is not None and one.position is not None else None


def _was_there(facts: Facts, rank: int) -> bool:
    """Return True if only a rank's folder may be lost: others completed collectives with it, or all ended well."""
    groups = [group for group in facts.evidence.groups if rank in group.ranks]
    is_done = any(e.completed_ns is not None for g in groups for window in g.windows.values() for e in window)
    return is_done or not facts.ranks_with_liveness("running", "sleeping", "stopped", "failed", "gone")
