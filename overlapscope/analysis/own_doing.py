"""Separation of rank-specific delays from those that chance causes on any rank."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Final

import numpy as np

from overlapscope.account.intervals import Int64Array
from overlapscope.analysis.cycles import BLAMABLE_GROUPS, Cycles
from overlapscope.analysis.patterns import DelayPattern, count_runs

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
    """Return the significance level of each test, so that all tests on a recording together raise few false alarms."""
    return FALSE_ALARM_RATE / (_PATTERN_COUNT * (len(BLAMABLE_GROUPS) * len(cycles.ranks) + 1))


def keep_rank_specific(
    pattern: DelayPattern, series_ns: Int64Array, index: int, cycles: Cycles, step_time_ns: float
) -> DelayPattern | None:
    """Return the rank-specific part of a pattern; None if there is none.

    Transient delays are rank-specific if chance would hardly give all of them to this rank. A rank that is early in
    some steps, and no later than the others in the rest, is not late in the rest.

    Args:
        pattern: Pattern in the series of the rank.
        series_ns: (S, R) From ``excess_over_peers``.
        place: Index of the rank.
    """
    own_ns = series_ns[:, index]
    if pattern.kind in ("shift", "episode") and float(np.median(own_ns[pattern.where])) < -pattern.usual_ns:
        return None
    if pattern.kind != "transient":
        return pattern
    longest_other_ns = int(np.delete(series_ns, index, axis=1).max(initial=0))
    where = pattern.where & (own_ns > REPEATED_PAUSE_RATIO * longest_other_ns)
    times = count_runs(where)
    p_value = float(len(cycles.ranks)) ** (1 - times)
    if not times or p_value > get_significance_level(cycles):
        longest_other_ns, pause_ns = _find_pause_threshold(series_ns, step_time_ns)
        where, p_value = pattern.where & (own_ns >= pause_ns), math.nan
    if not where.any():
        return None
    statistic = f"{where.sum()} of {len(where)} steps, {_times_as_long(int(own_ns[where].min()), longest_other_ns)}"
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
