"""Tail probabilities of the binomial distribution and of the runs test."""

from __future__ import annotations

import math
from typing import Final

_NEGLIGIBLE: Final = 1e-12
"""Share of a sum below which a term, and the even smaller ones after it, can be dropped."""


def binomial_tail(hits: int, tries: int, share: float) -> float:
    """Return the probability of at least that many hits in independent tries that each hit with probability ``share``.

    Example: at least 2 hits in 3 tries with probability 0.5 have probability 0.5 (3/8 + 1/8).
    """
    if hits <= 0:
        return 1.0
    if share <= 0.0 or hits > tries:
        return 0.0
    if share >= 1.0:
        return 1.0
    total = 0.0
    for count in range(hits, tries + 1):
        term = math.exp(_log_binomial(tries, count) + count * math.log(share) + (tries - count) * math.log1p(-share))
        total += term
        if count > share * tries and term < _NEGLIGIBLE * total:
            break
    return min(1.0, total)


def runs_test_p_value(runs: int, hits: int, tries: int) -> float:
    """Return the probability that hits in random order among tries form at most that many runs.

    Wald and Wolfowitz, "On a test whether two samples are from the same population", 1940.

    Example: 2 hits in 4 tries form one run in 3 of the 6 orders, so the probability of at most 1 run is 0.5.
    """
    if hits < 1:
        return 1.0
    total = sum(
        math.exp(
            _log_binomial(hits - 1, count - 1) + _log_binomial(tries - hits + 1, count) - _log_binomial(tries, hits)
        )
        for count in range(1, min(runs, hits, tries - hits + 1) + 1)
    )
    return min(1.0, total)


def _log_binomial(of: int, taken: int) -> float:
    """Return the logarithm of the number of ways to choose some items out of so many."""
    return math.lgamma(of + 1) - math.lgamma(taken + 1) - math.lgamma(of - taken + 1)
