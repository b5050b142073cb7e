"""Which clock each rank was recorded with, and how its times are mapped to the common clock.

The common clock is that of the lowest rank whose boot is known. Ranks of the same boot need nothing. Others have pinged
rank 0, whose clock may be a third one if its folder is missing. Without pings, the all-reduces have to do. What they
leave open is drawn by the wall clock and reported as unaligned.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

import pandas as pd

from overlapscope.trace.causality import (
    CollectiveBounds,
    Violation,
    all_reduces_by_clock,
    bounds_between,
    fixes_of,
    tightened,
    worst_violation,
)
from overlapscope.trace.clock import ClockMap, Fix, bounds_of_pings, fix, without_poor
from overlapscope.trace.log import Problem

Pings = Sequence[Sequence[int]]
"""The pings of one burst: sent, answered, received."""

_MOST_NAMES: Final = 8


@dataclass(frozen=True, eq=False, kw_only=True)
class RankClock:
    """What a rank's files say about its clock."""

    rank: int
    boot: str | None
    """Equal on ranks that share a clock; None if unknown."""
    unix_offset_ns: int | None
    """The wall clock less its own."""
    bursts: Sequence[tuple[str | None, Pings]]
    """Each with the boot of rank 0, which answered."""
    peers: str
    """Equal on ranks that train together."""
    begin_ns: int
    end_ns: int
    """Time span of what it recorded."""
    hooked_models: Sequence[Any] = ()
    """Those with a communication hook. It need not wait for all ranks: their all-reduces tell nothing of clocks."""

    @property
    def name(self) -> str:
        """The name of its clock; with an unknown boot, its own."""
        return self.boot or _nameless(self.rank)


@dataclass(frozen=True, eq=False, kw_only=True)
class Alignment:
    """How a rank's times are mapped to the common clock."""

    clock: Literal["same boot", "pings", "collectives", "none"]
    map: ClockMap


def are_of_one_clock(ranks: Sequence[RankClock]) -> bool:
    """Whether there is nothing to align."""
    return len({rank.name for rank in ranks}) == 1


def all_reduces_of(ranks: Sequence[RankClock], collectives: pd.DataFrame) -> dict[str, pd.DataFrame]:
    """What the all-reduces of some ranks say about their clocks: ``causality.all_reduces_by_clock``."""
    hooked = [(rank.rank, model) for rank in ranks for model in rank.hooked_models]
    if hooked:
        place = pd.MultiIndex.from_frame(collectives[["rank", "model"]])
        collectives = collectives[~place.isin(hooked)]
    return all_reduces_by_clock(
        collectives, {rank.rank: rank.name for rank in ranks}, {rank.rank: rank.peers for rank in ranks}
    )


def align(ranks: Sequence[RankClock], by_clock: Mapping[str, pd.DataFrame]) -> tuple[list[Alignment], list[Problem]]:
    """Map all ranks to one clock.

    Args:
        by_clock: what all-reduces say, from ``all_reduces_of``; not looked at if there is only one clock.

    Returns:
        The alignment of each rank, and a line on those that can't be aligned.
    """
    reference = next((rank for rank in ranks if rank.boot), ranks[0])
    names = dict.fromkeys(rank.name for rank in ranks)
    if are_of_one_clock(ranks):
        return [_SAME_BOOT] * len(ranks), []
    pinged = _maps_of_pings(ranks, reference.name)
    found, failures = {reference.name: _SAME_BOOT}, {}
    for name in names:
        if name != reference.name:
            outcome = _alignment(pinged.get(name), bounds_between(by_clock, name, reference.name))
            if isinstance(outcome, Alignment):
                found[name] = outcome
            else:
                failures[name] = outcome
    problems = [
        _problem([rank.rank for rank in ranks if failures.get(rank.name, rank) == why], why, reference.rank)
        for why in dict.fromkeys(failures.values())
    ]
    return [found.get(rank.name) or _by_wall_clock(rank, reference) for rank in ranks], problems


_SAME_BOOT: Final = Alignment(clock="same boot", map=ClockMap.constant(0, 0.0))


def _maps_of_pings(ranks: Sequence[RankClock], reference: str) -> dict[str, ClockMap]:
    """Maps to the reference, by clock, of those that rank 0's answers connect with it."""
    fixes: dict[str, list[Fix]] = {}
    pinged = _nameless(0)
    for rank in ranks:
        for boot_of_rank_0, pings in rank.bursts:
            pinged = boot_of_rank_0 or pinged
            if pings and (found := fix(bounds_of_pings(pings))):
                fixes.setdefault(rank.name, []).append(found)
    to_rank_0 = {name: ClockMap.through(without_poor(found)) for name, found in fixes.items()}
    if reference == pinged:
        return to_rank_0
    if reference not in to_rank_0:
        return {}
    back = to_rank_0[reference].inverse()
    return {pinged: back} | {name: clock.then(back) for name, clock in to_rank_0.items()}


def _alignment(by_pings: ClockMap | None, seen: CollectiveBounds | None) -> Alignment | Violation | None:
    """The best alignment from pings and all-reduces, or why they contradict each other; None without either."""
    fixes = fixes_of(seen) if seen is not None else []
    if by_pings is None:
        return Alignment(clock="collectives", map=ClockMap.through(fixes)) if fixes else None
    if seen is not None and (violation := worst_violation(by_pings, seen)):
        return violation
    return Alignment(clock="pings", map=tightened(by_pings, fixes) if fixes else by_pings)


def _by_wall_clock(rank: RankClock, reference: RankClock) -> Alignment:
    offset_ns = 0
    if rank.unix_offset_ns is not None and reference.unix_offset_ns is not None:
        offset_ns = rank.unix_offset_ns - reference.unix_offset_ns
    return Alignment(clock="none", map=ClockMap.constant(offset_ns, float("nan")))


def _problem(ranks: list[int], violation: Violation | None, reference: int) -> Problem:
    names = ", ".join(map(str, ranks[:_MOST_NAMES])) + (" ..." if len(ranks) > _MOST_NAMES else "")
    who = f"rank{'s' * (len(ranks) > 1)} {names} can't be aligned with rank {reference}"
    left_out = f"numbers that compare ranks leave {'them' if len(ranks) > 1 else 'it'} out"
    if violation is None:
        return Problem("note", f"{who}: no pings, and all-reduces leave the offset open; {left_out}")
    where = f"step {violation.step}, bucket {violation.bucket}" if violation.bucket >= 0 else f"step {violation.step}"
    why = f"by its pings the all-reduce of {where} ends {violation.early_ns / 1000:.1f} µs before its last arrival"
    return Problem("error", f"{who}: {why}; {left_out}")


def _nameless(rank: int) -> str:
    return f"the clock of rank {rank}"
