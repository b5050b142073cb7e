"""Rank-specific delays: in which causes and steps single ranks are late, and what that costs.

The local time of every rank is compared with that of the other ranks, cause by cause and cycle by cycle. A significant
pattern is a delay; similar delays of all ranks of a host are merged into one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from overlapscope.breakdown.spans import Int64Array
from overlapscope.stragglers.cycles import BLAMABLE_GROUPS, CAUSE_GROUPS, CAUSES, Cycles, get_cause_indices
from overlapscope.stragglers.finding import Finding, compute_saving
from overlapscope.stragglers.location_test import LocationTest, independent_share, run_location_test
from overlapscope.stragglers.patterns import DelayPattern, count_runs, find_patterns
from overlapscope.stragglers.replay import Replay, Times, median_ns

# Separation of rank-specific delays from those that chance causes on any rank.

FALSE_ALARM_RATE: Final = 1e-3
"""Maximum probability that any finding is reported for a recording in which ranks differ only by noise, over all tests
on that recording together."""

_PATTERN_COUNT: Final = 5
"""Number of patterns that are tested for in each series."""

SINGLE_PAUSE_RATIO: Final = 15.0
"""A single pause is no noise if it is this many times as long as the next longest delay of any rank."""
REPEATED_PAUSE_RATIO: Final = 3.0
"""Several pauses are no noise if each is this many times as long as the next longest delay. Shorter delays of a rank
have to be this many times as long as those of other ranks, and so many that chance would not give all of them to one
rank."""

MIN_PAUSE_STEPS: Final = 1.0
"""A delay without a pattern is a finding if the longest one takes as long as this many steps."""


def excess_over_peers(total_ns: Int64Array) -> Int64Array:
    """Return how much longer each rank takes than the median of the others; of two ranks, than the other one.

    Of an even number of others that is the mean of the two in the middle. Either one of them would make every rank
    late, or early, more often than not.

    Example: times of 10, 12 and 20 give -6, -3 and 9, as the medians of the others are 16, 15 and 11.

    Args:
        total_ns: (S, R) Time of each rank in each cycle.

    Returns:
        (S, R)
    """
    order = np.argsort(total_ns, axis=1, kind="stable")
    in_order_ns = np.take_along_axis(total_ns, order, axis=1)
    index = np.argsort(order, axis=1, kind="stable")
    ranks = total_ns.shape[1]
    lower_ns, upper_ns = (
        np.where(index > middle, in_order_ns[:, [middle]], in_order_ns[:, [middle + 1]])
        for middle in ((ranks - 2) // 2, (ranks - 1) // 2)
    )
    series_ns: Int64Array = total_ns - (lower_ns + upper_ns) // 2
    return series_ns


def get_significance_level(cycles: Cycles) -> float:
    """Return the significance level of each test of single causes; all of these get half of the false alarms."""
    return FALSE_ALARM_RATE / 2 / (_PATTERN_COUNT * (len(BLAMABLE_GROUPS) * len(cycles.ranks) + 1))


def get_overall_level(ranks: int) -> float:
    """Return the significance level of the test of all local time of each rank, which gets the other half."""
    return FALSE_ALARM_RATE / 2 / ranks


CAUSE_LEVEL: Final = 1e-3
"""Significance level of a cause of which a rank is later, if it is known that it is later."""


def compute_overall_excess(local_ns: Int64Array) -> Int64Array:
    """Return how much longer each rank takes than its peers (S, R), all its own causes together.

    Late release is left out, as it compares clocks.

    Args:
        local_ns: (C, S, R) By cause.
    """
    causes = [cause for group in BLAMABLE_GROUPS if group != "release_skew" for cause in get_cause_indices(group)]
    return excess_over_peers(local_ns[causes].sum(axis=0))


def run_overall_test(overall_ns: Int64Array, index: int) -> LocationTest:
    """Test whether a rank is later than its peers, all its own causes together.

    Args:
        overall_ns: From ``compute_overall_excess``.
        index: Index of the rank.
    """
    series = overall_ns[:, index].astype(np.float64)
    return run_location_test(series, independent_share(series, tried=overall_ns.shape[1]))


def keep_rank_specific(
    pattern: DelayPattern, series_ns: Int64Array, index: int, cycles: Cycles, step_time_ns: float
) -> DelayPattern | None:
    """Return the rank-specific part of a pattern; None if there is none.

    Transient delays are rank-specific if chance would hardly give all of them to this rank. A rank that is early in
    some steps, and no later than the others in the rest, is not late in the rest.

    Args:
        pattern: Pattern in the series of the rank.
        series_ns: (S, R) From ``excess_over_peers``.
        index: Index of the rank.
    """
    local_ns = series_ns[:, index]
    if pattern.kind in ("shift", "episode") and float(np.median(local_ns[pattern.where])) < -pattern.usual_ns:
        return None
    if pattern.kind != "transient":
        return pattern
    longest_other_ns = int(np.delete(series_ns, index, axis=1).max(initial=0))
    where = pattern.where & (local_ns > REPEATED_PAUSE_RATIO * longest_other_ns)
    times = count_runs(where)
    p_value = float(len(cycles.ranks)) ** (1 - times)
    if not times or p_value > get_significance_level(cycles):
        longest_other_ns, pause_ns = _find_pause_threshold(series_ns, step_time_ns)
        where, p_value = pattern.where & (local_ns >= pause_ns), math.nan
    if not where.any():
        return None
    statistic = f"{where.sum()} of {len(where)} steps, {_times_as_long(int(local_ns[where].min()), longest_other_ns)}"
    return replace(pattern, where=where, statistic=statistic, p_value=p_value)


def _find_pause_threshold(series_ns: Int64Array, step_time_ns: float) -> tuple[int, float]:
    """Return the longest delay that is no pause, and the shortest that is one.

    A pause takes at least as long as a step and is far longer than all other delays.
    """
    in_order_ns = np.sort(series_ns, axis=None)[::-1]
    longest_ns = np.append(in_order_ns[in_order_ns >= MIN_PAUSE_STEPS * step_time_ns], 0)
    next_ns = np.maximum(in_order_ns[1 : len(longest_ns)], 1)
    times = np.where(np.arange(len(next_ns)) == 0, SINGLE_PAUSE_RATIO, REPEATED_PAUSE_RATIO)
    (isolated,) = np.nonzero(longest_ns[:-1] > times * next_ns)
    return (0, math.inf) if not len(isolated) else (int(next_ns[isolated[-1]]), float(longest_ns[isolated[-1]]))


def _times_as_long(delay_ns: int, other_ns: int) -> str:
    if other_ns <= 0 or delay_ns >= 1000 * other_ns:
        return "and nothing of the kind otherwise"
    return f"at least {delay_ns / other_ns:,.0f} times as long as anything of the kind otherwise"


MIN_COST_SHARE: Final = 0.01
"""Minimum time that a finding adds to a step, as a share of the step time."""

MIN_DELAY_SHARE: Final = 0.02
"""Minimum delay, as a share of the step time: healthy ranks differ by less."""


def find_delays(replay: Replay, hosts: dict[int, str], step_time_ns: float) -> list[Finding]:
    """Return all delays, including those that are not worth reporting.

    Args:
        hosts: Host of each rank.
    """
    delays = []
    overall_ns = compute_overall_excess(replay.recorded.local_ns)
    is_late = np.zeros(len(replay.cycles.ranks), dtype=bool)
    for index in _find_candidate_ranks(overall_ns, step_time_ns):
        test = run_overall_test(overall_ns, index)
        is_late[index] = test.p_value <= get_overall_level(len(replay.cycles.ranks))
    for group in BLAMABLE_GROUPS:
        series_ns = excess_over_peers(replay.recorded.local_ns[get_cause_indices(group)].sum(axis=0))
        for index in _find_candidate_ranks(series_ns, step_time_ns):
            level = CAUSE_LEVEL if is_late[index] else get_significance_level(replay.cycles)
            delays += _find_delays_of_rank(replay.cycles, group, series_ns, index, step_time_ns, level)
    return [_make_finding(replay, delay, hosts) for delay in _merge_by_host(replay.cycles, delays, hosts)]


@dataclass(frozen=True, eq=False, kw_only=True)
class _Delay:
    """A delay pattern in one group of causes of some ranks, from which a finding is made."""

    indices: tuple[int, ...]
    """Indices of the ranks."""
    group: str
    pattern: DelayPattern

    def excess(self, replay: Replay) -> Times:
        """Return the delay alone: the excess in delayed cycles over the usual excess of these ranks in other cycles."""
        causes = get_cause_indices(self.group)
        excess = replay.excess_of(self.indices).restricted(causes)
        if self.pattern.kind == "persistent":
            return excess
        where, others = self.pattern.where, ~self.pattern.where
        usual = Times(
            local_ns=median_ns(excess.local_ns[:, others], axis=1),
            lead_ns=median_ns(excess.lead_ns[others], axis=0),
            broadcast_ns=np.zeros_like(excess.broadcast_ns[:1]),
        )
        return excess.minus(usual).restricted(causes, where)


def _find_candidate_ranks(series_ns: Int64Array, step_time_ns: float) -> list[int]:
    """Return the indices of ranks that are late often enough, or once by enough, to matter.

    The other ranks need no statistics.
    """
    late_ns = np.maximum(series_ns, 0)
    is_costly = late_ns.mean(axis=0) >= MIN_COST_SHARE * step_time_ns / 2
    has_paused = late_ns.max(axis=0) >= MIN_PAUSE_STEPS * step_time_ns
    indices: list[int] = np.flatnonzero(is_costly | has_paused).tolist()
    return indices


def _find_delays_of_rank(
    cycles: Cycles, group: str, series_ns: Int64Array, index: int, step_time_ns: float, persistent_level: float
) -> list[_Delay]:
    """Find the delays of one rank in one group of causes.

    Args:
        series_ns: (S, R) From ``excess_over_peers``.
        persistent_level: Significance level of a delay all the time.
    """
    least_ns = MIN_DELAY_SHARE * step_time_ns
    if group == "release_skew":  # the only cause that compares clocks of two ranks
        least_ns = max(least_ns, 2 * cycles.clock_error_ns)
    patterns = find_patterns(
        series_ns[:, index],
        cycles.steps,
        least_ns,
        significance=get_significance_level(cycles),
        persistent_significance=persistent_level,
        others=_name_reference(cycles, [index]),
    )
    own = (keep_rank_specific(pattern, series_ns, index, cycles, step_time_ns) for pattern in patterns)
    return [_Delay(indices=(index,), group=group, pattern=pattern) for pattern in own if pattern is not None]


def _name_reference(cycles: Cycles, indices: Sequence[int]) -> str:
    """Name the reference that ranks are compared with; two ranks have no median."""
    return f"rank {cycles.ranks[1 - indices[0]]}" if len(cycles.ranks) == 2 else "the median rank"


def _merge_by_host(cycles: Cycles, delays: list[_Delay], hosts: dict[int, str]) -> list[_Delay]:
    """Merge the delays of a host into one if all its ranks are late in the same way.

    Only a host with several ranks is merged, and only if there are other hosts.
    """
    places_of_host: dict[str, list[int]] = {}
    for index, rank in enumerate(cycles.ranks.tolist()):
        places_of_host.setdefault(hosts.get(rank, "unknown"), []).append(index)
    by_kind: dict[tuple[str, str, str, int | None], list[_Delay]] = {}
    for delay in delays:
        host = hosts.get(int(cycles.ranks[delay.indices[0]]), "unknown")
        by_kind.setdefault((host, delay.group, delay.pattern.kind, delay.pattern.period), []).append(delay)
    merged: list[_Delay] = []
    for (host, *_), parts in by_kind.items():
        where = np.mean([part.pattern.where for part in parts], axis=0) > 0.5
        in_the_same_steps = all((where & part.pattern.where).sum() * 2 > part.pattern.where.sum() for part in parts)
        if in_the_same_steps and 1 < len(parts) == len(places_of_host[host]) < len(cycles.ranks):
            middle = sorted(parts, key=lambda part: part.pattern.p_value)[len(parts) // 2]
            indices = tuple(index for part in parts for index in part.indices)
            merged.append(_Delay(indices=indices, group=parts[0].group, pattern=replace(middle.pattern, where=where)))
        else:
            merged += parts
    return merged


def _make_finding(replay: Replay, delay: _Delay, hosts: dict[int, str]) -> Finding:
    """Compute by replay what a delay adds, and what it would save to fix it."""
    excess = delay.excess(replay)
    without, where = replay.without(delay.indices, excess), delay.pattern.where
    saving = compute_saving(replay, without, replay.length_ns(without), where)
    by_cause_ns = excess.local_ns[:, where].mean(axis=(1, 2))
    late_ns = excess.local_ns.sum(axis=0).mean(axis=1)
    ranks = tuple(int(rank) for rank in replay.cycles.ranks[list(delay.indices)])
    return Finding(
        ranks=ranks,
        host=hosts.get(ranks[0]) if len(ranks) > 1 else None,
        link=None,
        cause=delay.group,
        parts_ns={name: float(by_cause_ns[CAUSES.index(name)]) for name in CAUSE_GROUPS[delay.group]},
        compared_with=_name_reference(replay.cycles, delay.indices),
        pattern=delay.pattern,
        steps=replay.cycles.steps[where],
        worst_step=int(replay.cycles.steps[np.where(where, late_ns, -np.inf).argmax()]),
        delay_ns=float(late_ns[where].mean()),
        added_ns=float((replay.ideal_except_ns(delay.indices, excess) - replay.ideal_ns).mean()),
        saving=saving,
        step_ns=float(replay.recorded_ns.mean()),
    )
