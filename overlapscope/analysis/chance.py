"""How likely it is that chance alone shows as much."""

from __future__ import annotations

import math
from typing import Final

_NEGLIGIBLE: Final = 1e-12
"""Of a sum whose terms only get smaller."""


def chance_of_at_least(hits: int, tries: int, share: float) -> float:
    """The probability of that many hits among independent tries that each hit with probability ``share``."""
    if hits <= 0:
        return 1.0
    if share <= 0.0 or hits > tries:
        return 0.0
    if share >= 1.0:
        return 1.0
    total = 0.0
    for count in range(hits, tries + 1):
        term = math.exp(_log_ways(tries, count) + count * math.log(share) + (tries - count) * math.log1p(-share))
        total += term
        if count > share * tries and term < _NEGLIGIBLE * total:
            break
    return min(1.0, total)


def chance_of_runs(runs: int, hits: int, tries: int) -> float:
    """The probability that so many hits among tries are in at most that many runs, if their order is chance.

    Wald and Wolfowitz, "On a test whether two samples are from the same population", 1940.
    """
    if hits < 1:
        return 1.0
    total = sum(
        math.exp(_log_ways(hits - 1, count - 1) + _log_ways(tries - hits + 1, count) - _log_ways(tries, hits))
        for count in range(1, min(runs, hits, tries - hits + 1) + 1)
    )
    return min(1.0, total)


def _log_ways(of: int, taken: int) -> float:
    """The logarithm of the number of ways to take some out of so many."""
    return math.lgamma(of + 1) - math.lgamma(taken + 1) - math.lgamma(of - taken + 1)
