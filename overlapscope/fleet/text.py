"""Sentences about a fleet: who stands out, and what is missing."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from datetime import date
from typing import Final

from overlapscope.fleet.chance import Count
from overlapscope.fleet.fleet import Coverage, Fleet, ModelKey
from overlapscope.fleet.standouts import Kind, Ranking, Standout
from overlapscope.text import count_of, rank_list

KIND_LABELS: Final[dict[Kind, str]] = {
    "host": "host",
    "device": "device",
    "rank": "rank",
    "link": "link",
    "end": "links of host",
}
_NEVER_BELOW: Final = 1e-12
_PLURALS: Final = {"link": "links", "end": "hosts with links", "host": "hosts", "device": "devices", "rank": "ranks"}


def format_week(week: date | None) -> str:
    """Format a week by its Monday: ``2026-11-23``."""
    return "unknown" if week is None else week.isoformat()


def format_odds(probability: float) -> str:
    """Format a small probability as odds with two digits: ``1 in 4,800``; one of a half or more as ``likely``."""
    if probability >= 0.5:
        return "likely"
    odds = 1 / max(probability, _NEVER_BELOW)
    digits = max(0, len(f"{odds:.0f}") - 2)
    prefix = "below 1" if probability < _NEVER_BELOW else "1"
    return f"{prefix} in {round(odds, -digits):,.0f}"


def format_chance(count: Count) -> str:
    """Format the probability of a count; of one that was not tested, say so."""
    return format_odds(count.chance) if count.has_enough_draws else "too few runs"


def name_models(keys: Iterable[ModelKey]) -> dict[ModelKey, str]:
    """Name models, with the digest of their parameters only where several have one name."""
    digests: dict[str, set[str]] = {}
    for key in (known := [*keys]):
        digests.setdefault(key.model, set()).add(key.digest)
    return {
        key: f"{key.model} ({key.digest})" if key.digest and len(digests[key.model]) > 1 else key.model for key in known
    }


def describe_standouts(fleet: Fleet) -> list[str]:
    """Return a sentence for each host, device, rank and link that stands out, and last one if nobody is late."""
    return [
        *(_describe_late(fleet, each) for each in fleet.late.standouts),
        *(_describe_link(fleet, each) for each in fleet.links.standouts),
        *(_describe_fault(fleet, each) for each in fleet.faults.standouts),
        *([] if fleet.late.standouts else [_describe_nobody(fleet)]),
    ]


def _describe_late(fleet: Fleet, standout: Standout) -> str:
    appearance = fleet.appearances[standout.kind, standout.name]
    who = f"Rank {standout.name}" if standout.kind == "rank" else standout.name
    often = f"is late in {appearance.late:,} of its {count_of(appearance.runs, 'run')}"
    chance = _describe_chance(fleet.late, standout)
    if standout.or_ranks:
        ranks = rank_list(standout.or_ranks)
        return (
            f"{who}, or {ranks}, {often}. {chance} These runs can't tell the two apart, as {ranks} ran there: start "
            "one with the hosts in another order."
        )
    if standout.kind == "rank":
        where = f", on {count_of(appearance.hosts, 'host')}" if appearance.hosts else ""
        return f"{who} {often}{where}. {chance} The program does more on it, or it gets more to do."
    return f"{who} {often}. {chance}"


def _describe_chance(ranking: Ranking, standout: Standout) -> str:
    count, tested = standout.count, len(ranking.counts[standout.kind])
    return (
        f"By chance it would be {count.expected:.1f}; the odds that any of {tested:,} {_PLURALS[standout.kind]} gets "
        f"that far by chance are {format_odds(count.chance)}."
    )


def _describe_nobody(fleet: Fleet) -> str:
    coverage = fleet.coverage
    compared = coverage.read - coverage.not_compared
    if not compared:
        return "Nobody could be found late: in no run can ranks be compared with each other."
    if not fleet.with_late_ranks:
        return f"No rank is late in {'any of ' * (compared > 1)}{count_of(compared, 'run')}."
    return (
        f"No host, device or rank is late more often than by chance: in {fleet.with_late_ranks:,} of "
        f"{count_of(compared, 'run')} somebody is late, and not one of them in too many."
    )


def _describe_link(fleet: Fleet, standout: Standout) -> str:
    count = standout.count
    what, is_are = ("Links of", "are") if standout.kind == "end" else ("The link", "is")
    often = f"slow in {count.named:,} of {count_of(count.draws, 'run')} with a slow link"
    return f"{what} {standout.name} {is_are} {often}. {_describe_chance(fleet.links, standout)}"


def _describe_fault(fleet: Fleet, standout: Standout) -> str:
    count = standout.count
    who = f"Rank {standout.name}" if standout.kind == "rank" else standout.name
    ranks = f", or {rank_list(standout.or_ranks)}," if standout.or_ranks else ""
    often = f"is named by {count.named:,} of {count_of(count.draws, 'fault')} that a host may cause"
    return f"{who}{ranks} {often}. {_describe_chance(fleet.faults, standout)}"


def describe_tests(fleet: Fleet) -> str:
    """Say how many were compared, and what the probabilities are."""
    counts = fleet.late.counts
    tested = ", ".join(count_of(len(counts[kind]), kind) for kind in ("host", "device", "rank") if counts[kind])
    if not tested:
        return ""
    return (
        f"Compared: {tested}. If only chance decided who is late, anybody would be named here in less than 1 % of "
        "fleets."
    )


def describe_coverage(coverage: Coverage) -> Iterator[str]:
    """Return what is missing, a sentence for each kind of run that doesn't count everywhere."""
    reasons = (
        (coverage.unreadable, "could not be read, and counts nowhere", "could not be read, and count nowhere"),
        (coverage.running, "is being recorded, and counts nowhere yet", "are being recorded, and count nowhere yet"),
        (
            coverage.copies,
            "is a copy of another, and is left out",
            "are copies of others, and are left out",
        ),
        (
            coverage.damaged,
            "is damaged or lacks ranks: what is left of it counts",
            "are damaged or lack ranks: what is left of them counts",
        ),
        (
            coverage.not_judged,
            "has no verdict, as collectives were not recorded",
            "have no verdict, as collectives were not recorded",
        ),
        (
            coverage.undecided,
            "has too little evidence for a verdict",
            "have too little evidence for a verdict",
        ),
        (coverage.without_steps, "has no mean step", "have no mean step"),
        (
            coverage.not_compared,
            "can't show who is late, as its ranks can't be compared",
            "can't show who is late, as their ranks can't be compared",
        ),
        (
            coverage.without_hosts,
            "doesn't say on which hosts it ran: only its ranks count",
            "don't say on which hosts they ran: only their ranks count",
        ),
        (coverage.without_date, "has no date", "have no date"),
    )
    for number, one, several in reasons:
        if number:
            yield f"{count_of(number, 'run')} {one if number == 1 else several}."


def order_counts(ranking: Ranking, kind: Kind) -> list[Count]:
    """Return those that were named, the most improbable first."""
    return [count for count in ranking.counts.get(kind, ()) if count.named]
