"""Rules for ranks of which only the launches are known, as in dumps of a Flight Recorder."""

from __future__ import annotations

from overlapscope.diagnosis.evidence import GroupOrder
from overlapscope.diagnosis.text import at_line, capitalize, collective_text, group_text, join_and, plural, rank_list
from overlapscope.diagnosis.verdict import Verdict
from overlapscope.diagnosis.wait_graph import Facts

_MOST_SHOWN = 4


def find_missing_launch(facts: Facts) -> Verdict | None:
    """Find ranks that wait in a collective that others have not launched."""
    if not facts.is_from_dumps:
        return None
    ranks = tuple(rank for rank in facts.awaited if rank in facts.ranks and facts.is_stuck(rank))
    wait = facts.wait_for(ranks)
    if wait is None:
        return None
    missed, waiting = wait.first_missed_by(ranks), facts.waiting
    is_minority = not wait.is_point_to_point and len(wait.group.ranks) > 2 and 2 * len(ranks) < len(wait.group.ranks)
    what = f"collective {missed.number} of {group_text(wait.group)}, in which"
    latest = [f"Last launches there: {join_and([_newest(facts, wait.group, rank) for rank in ranks[:_MOST_SHOWN]])}."]
    if wait.is_point_to_point:
        what, latest = "the counterpart of what", []
    shown = sorted({*ranks[:_MOST_SHOWN], *waiting[:_MOST_SHOWN]} & set(wait.group.windows))
    sites = {one.rank: one.entry.call_site for one in facts.waits[:_MOST_SHOWN]}
    sites |= {rank: position.call_site for rank in ranks if (position := facts.ranks[rank].position)}
    return Verdict(
        kind="stuck",
        sentence=f"{capitalize(rank_list(ranks))} {plural(ranks, 'has', 'have')} not launched {what} "
        f"{rank_list(waiting)} {plural(waiting, 'waits', 'wait')}"
        f"{' in' if wait.is_point_to_point else ''}: {collective_text(missed)}{at_line(missed.call_site)}.",
        blamed=ranks if is_minority else (),
        concerned=tuple(sorted({*ranks, *waiting})),
        group=wait.group.name,
        number=missed.number,
        call_sites={rank: site for rank, site in sorted(sites.items()) if site} or None,
        windows={rank: wait.group.windows[rank] for rank in shown},
        evidence=(
            *latest,
            f"The dumps don't say whether {rank_list(ranks)} left it out, {plural(ranks, 'is', 'are')} late or "
            f"{plural(ranks, 'has', 'have')} ended, or whether the others launched one too many.",
        ),
        advice=(
            "Look for a collective, or a part of the model, inside an `if` that depends on the rank or on the data.",
            f"Look at what {rank_list(ranks)} {plural(ranks, 'does', 'do')}: py-spy dump, its log, its data loader.",
        ),
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
        sentence=f"{capitalize(rank_list(waiting))} {plural(waiting, 'waits', 'wait')} in collective {entry.number} of "
        f"{group_text(wait.group)} ({collective_text(entry)}{at_line(entry.call_site)}): {rank_list(absent)}, which "
        "left no dump, "
        f"{plural(absent, 'takes', 'take')} part in it.",
        concerned=tuple(sorted({*waiting, *absent})),
        group=wait.group.name,
        number=entry.number,
        call_sites={one.rank: s for one in facts.waits[:_MOST_SHOWN] if (s := one.entry.call_site)} or None,
        windows={rank: wait.group.windows[rank] for rank in waiting[:_MOST_SHOWN] if rank in wait.group.windows},
        evidence=("The existing dumps agree as far as they go.",),
        advice=(
            f"Look at {rank_list(absent)} first: a rank that is dead or hangs in native code can't dump.",
            "Look at the network between the hosts, and at the backend's own log (NCCL_DEBUG=INFO).",
        ),
    )


def find_incomplete_dumps(facts: Facts) -> Verdict | None:
    """Return a verdict of missing dumps if nothing is wrong in the others."""
    if not facts.missing or not facts.is_from_dumps:
        return None
    return Verdict(
        kind="cannot tell",
        sentence=f"The dumps of {rank_list(facts.ranks)} agree, and no rank waits in them; "
        f"there is no dump of {rank_list(facts.missing)}.",
        concerned=tuple(sorted(facts.ranks)),
        evidence=("gloo reports timed-out collectives as completed.",)
        if any(group.backend == "gloo" for group in facts.evidence.groups)
        else (),
        advice=(f"Dump on {rank_list(facts.missing)} as well, or copy all dumps into one folder.",),
    )


def _newest(facts: Facts, group: GroupOrder, rank: int) -> str:
    entry = facts.latest(group, rank)
    if entry is None:
        number = group.latest.get(rank)
        return f"rank {rank} number {number}" if number else f"rank {rank} unknown"
    return f"rank {rank} launched there is number {entry.number}, {collective_text(entry)}{at_line(entry.call_site)}"
