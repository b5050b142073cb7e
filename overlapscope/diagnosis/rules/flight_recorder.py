"""Rules for ranks of which only the launches are known, as in dumps of a Flight Recorder."""

from __future__ import annotations

from overlapscope.diagnosis.evidence import Entry, GroupOrder
from overlapscope.diagnosis.texts import waiting as text
from overlapscope.diagnosis.verdict import Verdict, known_sites
from overlapscope.diagnosis.wait_graph import Facts, Wait

_MOST_SHOWN = 4


def find_missing_launch(facts: Facts) -> Verdict | None:
    """Find ranks that wait in a collective that others have not launched."""
    if not facts.is_from_dumps:
        return None
    ranks = tuple(rank for rank in facts.awaited if rank in facts.ranks and facts.is_stuck(rank))
    wait = facts.wait_for(ranks)
    return _find_scheduled(facts) if wait is None else _missing_launch_verdict(facts, ranks, wait)


def _find_scheduled(facts: Facts) -> Verdict | None:
    """Find a collective that ranks have launched, that no device has begun, and that others have not launched.

    Their devices may be at earlier work, so nobody is known to wait; but nobody can go on without the others either.
    """
    for group in facts.evidence.groups:
        for rank, entry in sorted(group.oldest_incomplete.items()):
            late = tuple(
                sorted(other for other in facts.ranks if other in group.ranks and _lacks(facts, group, other, entry))
            )
            if late and facts.is_stuck(rank):
                return _missing_launch_verdict(facts, late, Wait(rank, group, entry, late), is_begun=False)
    return None


def _lacks(facts: Facts, group: GroupOrder, rank: int, entry: Entry) -> bool:
    return group.latest.get(rank, 0) < entry.number and facts.is_stuck(rank)


def _missing_launch_verdict(facts: Facts, ranks: tuple[int, ...], wait: Wait, *, is_begun: bool = True) -> Verdict:
    missed, waiting = wait.first_missed_by(ranks), facts.waiting or (wait.rank,)
    group, shown = wait.group, ranks[:_MOST_SHOWN]
    is_minority = not wait.is_point_to_point and 2 < len(group.ranks) > 2 * len(ranks)
    latest = [(rank, group.latest.get(rank), facts.latest(group, rank)) for rank in shown]
    sites = {one.rank: one.entry.call_site for one in facts.waits[:_MOST_SHOWN]}
    sites |= {rank: position.call_site for rank in ranks if (position := facts.ranks[rank].position)}
    return Verdict(
        kind="stuck",
        **text.not_launched(ranks, waiting, wait, latest, is_begun=is_begun),
        blamed=ranks if is_minority else (),
        concerned=tuple(sorted({*ranks, *waiting})),
        group=group.name,
        number=missed.number,
        call_sites=known_sites(sites),
        windows=group.windows_of((*shown, *waiting[:_MOST_SHOWN])),
    )


def find_missing_dump(facts: Facts) -> Verdict | None:
    """Find ranks that wait in a collective with ranks that left no dump."""
    wait = facts.wait_for(set(facts.awaited) & set(facts.missing))
    if wait is None or not facts.is_from_dumps or not facts.is_stuck(wait.rank):
        return None
    absent = sorted(set(wait.late) & set(facts.missing))
    entry, waiting = wait.entry, facts.waiting
    return Verdict(
        kind="stuck",
        **text.no_dump(absent, waiting, wait),
        concerned=tuple(sorted({*waiting, *absent})),
        group=wait.group.name,
        number=entry.number,
        call_sites=known_sites({one.rank: one.entry.call_site for one in facts.waits[:_MOST_SHOWN]}),
        windows=wait.group.windows_of(waiting[:_MOST_SHOWN]),
    )


def find_incomplete_dumps(facts: Facts) -> Verdict | None:
    """Return a verdict of missing dumps if nothing is wrong in the others."""
    if not facts.missing or not facts.is_from_dumps:
        return None
    is_gloo = any(group.backend == "gloo" for group in facts.evidence.groups)
    return Verdict(
        kind="cannot tell",
        **text.dumps_agree(facts.ranks.keys(), facts.missing, is_gloo=is_gloo),
        concerned=tuple(sorted(facts.ranks)),
    )
