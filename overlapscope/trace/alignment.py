"""Clock alignment: maps from the clock of each rank to one common clock.

The common clock is that of the lowest rank whose boot id is known. Ranks of the same boot share it and need no map.
Other ranks have exchanged pings with rank 0, whose clock may be a third one if its folder is missing. Without pings,
the offset is estimated from all-reduces. If these leave it open, the wall clock is used for drawing only, and the rank
is reported as unaligned.

Example: ranks 0 and 1 run on host A, ranks 2 and 3 on host B. A ping that rank 2 sends at 100 (clock B) is answered at
1130 (clock A) and comes back at 160, so the offset A - B is between 1130 - 160 = 970 and 1130 - 100 = 1030: the map
adds 1000 ± 30 ns to times of ranks 2 and 3 around then. An all-reduce that ends at 180 (clock B) after a rank of host A
arrived at 1170 (clock A) proves an offset of at least 1170 - 180 = 990, which narrows the range to 990 to 1030 (drift
ignored).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

import pandas as pd

from overlapscope.trace.causality import (
    CollectiveBounds,
    Violation,
    compute_fixes,
    compute_offset_bounds,
    find_worst_violation,
    group_all_reduces_by_clock,
    tighten_map,
)
from overlapscope.trace.clock import ClockMap, Fix, bounds_from_pings, compute_fix, drop_poor_fixes
from overlapscope.trace.log import Problem

Pings = Sequence[Sequence[int]]
"""Pings of one burst: times sent, answered and received, in nanoseconds."""

_MOST_NAMES: Final = 8


@dataclass(frozen=True, eq=False, kw_only=True)
class RankClock:
    """Clock data from the files of one rank."""

    rank: int
    boot: str | None
    """Boot id, equal on ranks that share a clock; None if unknown."""
    unix_offset_ns: int | None
    """Wall clock minus the rank's clock; None if unknown."""
    bursts: Sequence[tuple[str | None, Pings]]
    """Ping bursts, each with the boot id of rank 0, which answered."""
    peers: str
    """Key that is equal on ranks that train together."""
    begin_ns: int
    end_ns: int
    """End of the time span that the rank recorded; ``begin_ns`` is its beginning."""
    hooked_models: Sequence[Any] = ()
    """Models with a communication hook. It need not wait for all ranks, so their all-reduces don't bound clock
    offsets."""

    @property
    def name(self) -> str:
        """Return the name of the rank's clock; if the boot id is unknown, a name that no other rank shares."""
        return self.boot or _private_clock_name(self.rank)


@dataclass(frozen=True, eq=False, kw_only=True)
class Alignment:
    """Map from the clock of one rank to the common clock, and the data that it is based on."""

    clock: Literal["same boot", "pings", "collectives", "none"]
    map: ClockMap


def share_one_clock(ranks: Sequence[RankClock]) -> bool:
    """Return whether all ranks share one clock, so that there is nothing to align."""
    return len({rank.name for rank in ranks}) == 1


def collect_all_reduces(ranks: Sequence[RankClock], collectives: pd.DataFrame) -> dict[str, pd.DataFrame]:
    """Return arrivals and ends of the all-reduces of some ranks, by clock: ``causality.group_all_reduces_by_clock``."""
    hooked = [(rank.rank, model) for rank in ranks for model in rank.hooked_models]
    if hooked:
        rank_and_model = pd.MultiIndex.from_frame(collectives[["rank", "model"]])
        collectives = collectives[~rank_and_model.isin(hooked)]
    return group_all_reduces_by_clock(
        collectives, {rank.rank: rank.name for rank in ranks}, {rank.rank: rank.peers for rank in ranks}
    )


def align_clocks(
    ranks: Sequence[RankClock], by_clock: Mapping[str, pd.DataFrame]
) -> tuple[list[Alignment], list[Problem]]:
    """Map all ranks to one clock.

    Args:
        by_clock: all-reduces by clock, from ``collect_all_reduces``; not used if there is only one clock.

    Returns:
        The alignment of each rank, and a problem for each group of ranks that can't be aligned.
    """
    reference = next((rank for rank in ranks if rank.boot), ranks[0])
    names = dict.fromkeys(rank.name for rank in ranks)
    if share_one_clock(ranks):
        return [_SAME_BOOT] * len(ranks), []
    pinged = _maps_from_pings(ranks, reference.name)
    found, failures = {reference.name: _SAME_BOOT}, {}
    for name in names:
        if name != reference.name:
            outcome = _align_clock(pinged.get(name), compute_offset_bounds(by_clock, name, reference.name))
            if isinstance(outcome, Alignment):
                found[name] = outcome
            else:
                failures[name] = outcome
    problems = [
        _problem([rank.rank for rank in ranks if failures.get(rank.name, rank) == why], why, reference.rank)
        for why in dict.fromkeys(failures.values())
    ]
    return [found.get(rank.name) or _align_by_wall_clock(rank, reference) for rank in ranks], problems


_SAME_BOOT: Final = Alignment(clock="same boot", map=ClockMap.constant(0, 0.0))


def _maps_from_pings(ranks: Sequence[RankClock], reference: str) -> dict[str, ClockMap]:
    """Return the maps to the reference clock, by clock, of those that are linked with it by pings to rank 0."""
    fixes: dict[str, list[Fix]] = {}
    pinged = _private_clock_name(0)
    for rank in ranks:
        for boot_of_rank_0, pings in rank.bursts:
            pinged = boot_of_rank_0 or pinged
            if pings and (found := compute_fix(bounds_from_pings(pings))):
                fixes.setdefault(rank.name, []).append(found)
    to_rank_0 = {name: ClockMap.from_fixes(drop_poor_fixes(found)) for name, found in fixes.items()}
    if reference == pinged:
        return to_rank_0
    if reference not in to_rank_0:
        return {}
    back = to_rank_0[reference].inverse()
    return {pinged: back} | {name: clock.compose(back) for name, clock in to_rank_0.items()}


def _align_clock(by_pings: ClockMap | None, seen: CollectiveBounds | None) -> Alignment | Violation | None:
    """Return the best alignment from pings and all-reduces, or how they contradict each other; None without either."""
    fixes = compute_fixes(seen) if seen is not None else []
    if by_pings is None:
        return Alignment(clock="collectives", map=ClockMap.from_fixes(fixes)) if fixes else None
    if seen is not None and (violation := find_worst_violation(by_pings, seen)):
        return violation
    return Alignment(clock="pings", map=tighten_map(by_pings, fixes) if fixes else by_pings)


def _align_by_wall_clock(rank: RankClock, reference: RankClock) -> Alignment:
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


def _private_clock_name(rank: int) -> str:
    return f"the clock of rank {rank}"
