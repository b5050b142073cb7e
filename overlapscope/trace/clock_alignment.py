"""Clock alignment: maps from the clock of each rank to one common clock.

The common clock is that of the lowest rank whose boot id is known. Ranks of the same boot share it and need no map.
Other ranks have exchanged pings with rank 0, whose clock may be a third one if its folder is missing. Without pings,
the offset is bounded by all-reduces, more narrowly if their kernels were seen to end. If these leave it open, the wall
clock is used for drawing only, and the rank is reported as unaligned.

Example: ranks 0 and 1 run on host A, ranks 2 and 3 on host B. A ping that rank 2 sends at 100 (clock B) is answered at
1130 (clock A) and comes back at 160, so the offset A - B is between 1130 - 160 = 970 and 1130 - 100 = 1030: the map
adds 1000 ± 30 ns to times of ranks 2 and 3 around then. An all-reduce that ends at 180 (clock B) after a rank of host A
arrived at 1170 (clock A) proves an offset of at least 1170 - 180 = 990, which narrows the range to 990 to 1030 (drift
ignored).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Any, Final, Literal

import numpy as np
import numpy.typing as npt
import pandas as pd

from overlapscope.errors import Problem
from overlapscope.text import rank_list
from overlapscope.trace.clocks import (
    MIN_WANDER,
    ClockMap,
    Fix,
    OffsetBounds,
    bounds_from_pings,
    compute_fix,
    compute_fixes_by_part,
    drop_poor_fixes,
)
from overlapscope.trace.collective_arrival import compute_arrival_ns, occurrence_index

_Int64s = npt.NDArray[np.int64]

_MATCH: Final = ["peers", "model", "step", "bucket", "occurrence"]
_NEVER: Final = np.iinfo(np.int64).min
_MAX_FIXES: Final = 64
_KERNEL_END_SKEWS_NS: Final = (10_000, 40_000)
"""By how much the ends of one all-reduce's kernels differ between ranks at most: seen are 1 to 7 µs."""


@dataclass(frozen=True, eq=False, kw_only=True)
class CollectiveBounds:
    """Bounds on the offset between two clocks, one pair per all-reduce.

    Seen from two clocks, every all-reduce is a ping that costs nothing. It ends on our clock after the ranks of the
    other clock have arrived, so at that moment their clock shows more than their arrival; likewise it ends on theirs
    after we arrive. A rank arrives when the bucket is ready and launched; recorded ends are never earlier than the true
    ones.

    Example: ranks of clock B arrive at 100 at the latest and see the end at 180, those of reference clock A arrive at
    1150 and see the end at 1190. At 180 (B) the offset A - B is at least 1150 - 180 = 970; at 100 (B) it is at most
    1190 - 100 = 1090. A map with an offset of 950 ± 10 is violated by 970 - 960 = 10 ns.
    """

    bounds: OffsetBounds
    step: _Int64s
    """Step of each all-reduce, in the order of ``bounds``."""
    bucket: _Int64s
    """Bucket of each all-reduce."""


@dataclass(frozen=True, kw_only=True)
class Violation:
    """All-reduce that ends before its last arrival according to a map, by ``early_ns`` more than the map's error."""

    step: int
    bucket: int
    early_ns: int


def group_all_reduces_by_clock(
    collectives: pd.DataFrame, clocks: Mapping[int, str], peers: Mapping[int, str]
) -> dict[str, pd.DataFrame]:
    """Return the latest arrival and the earliest end of each shared all-reduce, by clock.

    Args:
        collectives: collectives of some ranks, contiguous for each rank, with times of the rank's own clock.
        clocks: name of the clock of each rank.
        peers: key of each rank that is equal on ranks that train together: only these share all-reduces.
    """
    # The members of a rank's other process groups are unknown.
    wanted = ((collectives["op"] == "all_reduce") & (collectives["group"] == 0)).to_numpy()
    columns = {name: collectives[name].to_numpy()[wanted] for name in ("rank", "model", "step", "bucket")}
    columns["occurrence"] = _count_occurrences(columns["rank"], columns["step"], columns["model"], columns["bucket"])
    columns["arrival_ns"] = compute_arrival_ns(collectives)[wanted]
    columns["end_ns"] = collectives["end_ns"].to_numpy(np.int64, na_value=_NEVER)[wanted]
    has_ended = columns["end_ns"] != _NEVER
    ranks, rank_index = np.unique(columns["rank"], return_inverse=True)
    number = np.array([_hash_peers(peers[rank]) for rank in ranks.tolist()], dtype=np.int64)
    columns["peers"] = number[rank_index]
    names, clock = np.unique([clocks[rank] for rank in ranks.tolist()], return_inverse=True)
    return {
        str(name): _merge_equal_keys({key: column[of_clock] for key, column in columns.items()})
        for at, name in enumerate(names)
        if (of_clock := (clock[rank_index] == at) & has_ended).any()
    }


def merge_by_clock(parts: Iterable[Mapping[str, pd.DataFrame]]) -> dict[str, pd.DataFrame]:
    """Combine the results of ``group_all_reduces_by_clock`` of disjoint sets of ranks."""
    by_clock: dict[str, list[pd.DataFrame]] = {}
    for part in parts:
        for name, all_reduces in part.items():
            by_clock.setdefault(name, []).append(all_reduces)
    return {
        name: found[0]
        if len(found) == 1
        else _merge_equal_keys({str(key): _concat_column(found, str(key)) for key in found[0]})
        for name, found in by_clock.items()
    }


def _concat_column(tables: Sequence[pd.DataFrame], column: str) -> npt.NDArray[np.int64]:
    return np.concatenate([table[column].to_numpy() for table in tables])


def _merge_equal_keys(columns: Mapping[str, npt.NDArray[np.int64]]) -> pd.DataFrame:
    """Return the latest arrival and the earliest end of rows that are equal in all columns of ``_MATCH``.

    If all ranks have the same keys in the same order, the columns are reshaped instead of grouped: keys ``a b a b a b``
    of three ranks repeat after 2 rows, so arrivals ``1 5 2 4 3 6`` become rows ``1 5``, ``2 4``, ``3 6``, with maxima
    ``3 6``.
    """
    keys = [columns[name] for name in _MATCH]
    repeats = np.flatnonzero(np.logical_and.reduce([key == key[:1] for key in keys]))
    each = int(repeats[1]) if len(repeats) > 1 else len(keys[0])
    if len(repeats) * each == len(keys[0]) and all(np.array_equal(key[each:], key[:-each]) for key in keys):
        # All ranks did the same in the same order, as they should.
        table = pd.DataFrame({name: key[:each] for name, key in zip(_MATCH, keys, strict=True)})
        arrival_ns, end_ns = (columns[name].reshape(-1, each) for name in ("arrival_ns", "end_ns"))
        return table.assign(arrival_ns=arrival_ns.max(axis=0), end_ns=end_ns.min(axis=0))
    rows = pd.DataFrame({name: columns[name] for name in (*_MATCH, "arrival_ns", "end_ns")})
    return rows.groupby(_MATCH, as_index=False, sort=False).agg({"arrival_ns": "max", "end_ns": "min"})


def _count_occurrences(rank: _Int64s, step: _Int64s, model: _Int64s, bucket: _Int64s) -> _Int64s:
    """Count how many all-reduces of the same bucket in the same step a rank has launched before each row."""
    columns = rank, step, model, bucket
    is_equal = np.ones(max(0, len(rank) - 1), dtype=bool)
    ascends = np.zeros(len(is_equal), dtype=bool)
    for column in columns:
        ascends |= is_equal & (column[1:] > column[:-1])
        is_equal &= column[1:] == column[:-1]
    return np.zeros(len(rank), dtype=np.int64) if ascends.all() else occurrence_index(*columns)


def _hash_peers(peers: str) -> int:
    """Hash a key of peers to a number that is the same in every process."""
    return int.from_bytes(sha256(peers.encode()).digest()[:7])


def compute_offset_bounds(by_clock: Mapping[str, pd.DataFrame], clock: str, reference: str) -> CollectiveBounds | None:
    """Return bounds on the reference clock minus another clock, from all-reduces of both; None if there are none."""
    if clock not in by_clock or reference not in by_clock:
        return None
    ours, theirs = _match_all_reduces(by_clock[clock], by_clock[reference])
    if ours.empty:
        return None
    order = np.argsort(ours["end_ns"].to_numpy(), kind="stable")
    step, bucket, arrival_ns, end_ns = (
        ours[name].to_numpy()[order] for name in ("step", "bucket", "arrival_ns", "end_ns")
    )
    bounds = OffsetBounds(
        low_at_ns=end_ns,
        low_ns=theirs["arrival_ns"].to_numpy()[order] - end_ns,
        high_at_ns=arrival_ns,
        high_ns=theirs["end_ns"].to_numpy()[order] - arrival_ns,
    )
    return CollectiveBounds(bounds=bounds, step=step, bucket=bucket)


def _match_all_reduces(ours: pd.DataFrame, theirs: pd.DataFrame) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Return the rows of two clocks that are of the same all-reduces, in one order."""
    if len(ours) == len(theirs) and all((ours[name].to_numpy() == theirs[name].to_numpy()).all() for name in _MATCH):
        return ours, theirs
    both = ours.merge(theirs, on=_MATCH, suffixes=("", "_of_theirs"))
    return both, both[["arrival_ns_of_theirs", "end_ns_of_theirs"]].set_axis(["arrival_ns", "end_ns"], axis=1)


def tighten_by_kernel_ends(seen: CollectiveBounds, skew_ns: int) -> CollectiveBounds:
    """Narrow bounds, given that the kernels of an all-reduce end on all ranks within ``skew_ns``.

    Example: an all-reduce ends at 180 on clock B and at 1190 on reference clock A, so the offset is 1010 but for the
    skew. Bounds of 970 and 1090 become 1000 and 1020 with a skew of 10.
    """
    bounds = seen.bounds
    # An end on the reference clock is a higher bound of its offset to an arrival, and the end is at low_at_ns.
    apart_ns = bounds.high_ns + bounds.high_at_ns - bounds.low_at_ns
    is_high_less = bounds.high_ns > apart_ns + skew_ns
    return CollectiveBounds(
        bounds=OffsetBounds(
            low_at_ns=bounds.low_at_ns,
            low_ns=np.maximum(bounds.low_ns, apart_ns - skew_ns),
            high_at_ns=np.where(is_high_less, bounds.low_at_ns, bounds.high_at_ns),
            high_ns=np.minimum(bounds.high_ns, apart_ns + skew_ns),
        ),
        step=seen.step,
        bucket=seen.bucket,
    )


def find_worst_violation(clock: ClockMap, seen: CollectiveBounds) -> Violation | None:
    """Return the all-reduce that contradicts a map the most; None if none does."""
    bounds = seen.bounds
    below = bounds.low_ns - clock.offset_at(bounds.low_at_ns) - clock.error_at(bounds.low_at_ns)
    above = clock.offset_at(bounds.high_at_ns) - clock.error_at(bounds.high_at_ns) - bounds.high_ns
    early_ns = np.maximum(below, above)
    worst = int(np.argmax(early_ns))
    if early_ns[worst] <= 0:
        return None
    return Violation(step=int(seen.step[worst]), bucket=int(seen.bucket[worst]), early_ns=int(np.ceil(early_ns[worst])))


def compute_fixes(seen: CollectiveBounds) -> list[Fix]:
    """Compute offsets along the recording from its all-reduces alone; none if these contradict each other."""
    count = len(seen.bounds.low_ns)
    begins = np.array([part[0] for part in np.array_split(np.arange(count), min(_MAX_FIXES, count))])
    fixes = compute_fixes_by_part(seen.bounds, begins)
    if len(fixes) < len(begins):
        return []
    low_ns, high_ns = _bounds_from_fixes(fixes).at([each.own_ns for each in fixes])
    if np.any(low_ns > high_ns):
        return []
    return [
        Fix(own_ns=each.own_ns, low_ns=int(low), high_ns=int(high))
        for each, low, high in zip(fixes, low_ns, high_ns, strict=True)
    ]


def tighten_map(clock: ClockMap, fixes: Sequence[Fix]) -> ClockMap:
    """Narrow a map to the bounds that all-reduces set, where these are tighter than its error.

    Example: offset 1010 ± 50 allows 960 to 1060; all-reduces allow 970 to 1000 at that moment. The result is the middle
    of 970 to 1000, 985, with an error of 15 + 1 (for rounding).
    """
    own_ns = np.union1d(clock.own_ns, [each.own_ns for each in fixes])
    offset_ns, error_ns = clock.offset_at(own_ns), clock.error_at(own_ns)
    low_ns, high_ns = _bounds_from_fixes(fixes).at(own_ns)
    bend_error_ns = MIN_WANDER * np.diff([each.own_ns for each in fixes]).max(initial=0)
    low = np.maximum(low_ns - bend_error_ns, offset_ns - error_ns)
    high = np.minimum(high_ns + bend_error_ns, offset_ns + error_ns)
    is_less = (high - low < 2 * error_ns) & (low <= high)
    return ClockMap(
        own_ns=own_ns,
        offset_ns=np.where(is_less, np.rint((low + high) / 2), offset_ns).astype(np.int64),
        error_ns=np.where(is_less, np.minimum((high - low) / 2 + 1, error_ns), error_ns),
    )


def _bounds_from_fixes(fixes: Sequence[Fix]) -> OffsetBounds:
    own_ns, low_ns, high_ns = np.array([(each.own_ns, each.low_ns, each.high_ns) for each in fixes]).T
    return OffsetBounds(low_at_ns=own_ns, low_ns=low_ns, high_at_ns=own_ns, high_ns=high_ns)


Pings = Sequence[Sequence[int]]
"""Pings of one burst: times sent, answered and received, in nanoseconds."""


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
    ends_are_kernels: bool = False
    """True if ends of collectives are those of their kernels, as a profiler sees them."""

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
    """Return arrivals and ends of the all-reduces of some ranks, by clock: ``group_all_reduces_by_clock``."""
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
            have_kernels = all(rank.ends_are_kernels for rank in ranks if rank.name in (name, reference.name))
            seen = compute_offset_bounds(by_clock, name, reference.name)
            outcome = _align_clock(pinged.get(name), seen, have_kernels=have_kernels)
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


def _align_clock(
    by_pings: ClockMap | None, seen: CollectiveBounds | None, *, have_kernels: bool
) -> Alignment | Violation | None:
    """Return the best alignment from pings and all-reduces, or how they contradict each other; None without either."""
    fixes = _compute_best_fixes(seen, have_kernels=have_kernels) if seen is not None else []
    if by_pings is None:
        return Alignment(clock="collectives", map=ClockMap.from_fixes(fixes)) if fixes else None
    if seen is not None and (violation := find_worst_violation(by_pings, seen)):
        return violation
    return Alignment(clock="pings", map=tighten_map(by_pings, fixes) if fixes else by_pings)


def _compute_best_fixes(seen: CollectiveBounds, *, have_kernels: bool) -> list[Fix]:
    """Return fixes with the least skew of kernels' ends that all-reduces allow; without kernels, with none."""
    for skew_ns in _KERNEL_END_SKEWS_NS if have_kernels else ():
        if fixes := compute_fixes(tighten_by_kernel_ends(seen, skew_ns)):
            return fixes
    return compute_fixes(seen)


def _align_by_wall_clock(rank: RankClock, reference: RankClock) -> Alignment:
    offset_ns = 0
    if rank.unix_offset_ns is not None and reference.unix_offset_ns is not None:
        offset_ns = rank.unix_offset_ns - reference.unix_offset_ns
    return Alignment(clock="none", map=ClockMap.constant(offset_ns, float("nan")))


def _problem(ranks: list[int], violation: Violation | None, reference: int) -> Problem:
    who = f"{rank_list(ranks)} can't be aligned with rank {reference}"
    left_out = f"numbers that compare ranks leave {'them' if len(ranks) > 1 else 'it'} out"
    if violation is None:
        return Problem("note", f"{who}: no pings, and all-reduces leave the offset open; {left_out}")
    where = f"step {violation.step}, bucket {violation.bucket}" if violation.bucket >= 0 else f"step {violation.step}"
    why = f"by its pings the all-reduce of {where} ends {violation.early_ns / 1000:.1f} µs before its last arrival"
    return Problem("error", f"{who}: {why}; {left_out}")


def _private_clock_name(rank: int) -> str:
    return f"the clock of rank {rank}"
