"""Who is named more often than chance explains: an exact test, corrected for how many could have been named.

In a *draw* somebody is named out of all that take part: a late rank of a run, or the host of it. If nothing but chance
decides, each of them is named with a known probability, which depends on its size in that draw. How often it is named
in many draws then has a Poisson binomial distribution, whose upper tail is the p-value.

The correction is that of Bonferroni, without candidates that could never be significant (Tarone 1990): one that was
drawn from twice can't be, whatever happens, and so costs the others nothing. It holds however draws depend on each
other across candidates, and keeps the probability of *any* false name below the level.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, kw_only=True)
class Draw:
    """One draw: who was named, and how probable that was for each if only chance decided."""

    named: frozenset[str]
    chances: Mapping[str, float]
    """Probability of being named, of each that takes part."""


@dataclass(frozen=True, kw_only=True)
class Count:
    """How often one candidate was named."""

    name: str
    draws: int
    """Draws that it took part in."""
    named: int
    """Draws in which it was named."""
    expected: float
    """Mean number of draws in which chance alone would name it."""
    p_value: float
    """Probability that chance alone names it as often."""
    chance: float
    """The same, corrected for the number of candidates: probability of any name as improbable; at most 1."""
    has_enough_draws: bool
    """False if it could not be significant even if it were named in all of its draws; it is not tested then."""


def compute_group_chances(sizes: Mapping[str, int], named: int) -> dict[str, float]:
    """Compute the probability of each group to be named, if ``named`` different ones are drawn in proportion to size.

    For one that is exact; for several it is an upper bound, as if the largest had been drawn before.

    Example: of hosts with 8, 8 and 16 ranks, one is named: 1/4, 1/4 and 1/2.
    """
    total = sum(sizes.values())
    largest = sorted(sizes.values(), reverse=True)[:named]
    chances = {}
    for name, size in sizes.items():
        before = sum(largest) - max(size, largest[-1])  # drawn before, at most: the largest of the others
        chances[name] = 1 - (1 - min(1.0, size / max(size, total - before))) ** named
    return chances


def compute_touching_chance(touching: int, total: int, named: int) -> float:
    """Compute the probability that at least one of ``named`` things, drawn out of ``total``, is among ``touching``.

    Example: of 4 links 2 touch a host: a slow one does with 1/2, at least one of two slow ones with 5/6.
    """
    return 1 - math.comb(total - touching, named) / math.comb(total, named)


def count_named(draws: Sequence[Draw], level: float) -> tuple[Count, ...]:
    """Count how often each candidate is named, and test it; the most improbable first.

    Args:
        level: probability of any false name that is allowed; candidates with ``chance`` up to it are significant.
    """
    chances: dict[str, list[float]] = defaultdict(list)
    named: dict[str, int] = defaultdict(int)
    for draw in draws:
        for name, chance in draw.chances.items():
            chances[name].append(chance)
            named[name] += name in draw.named
    attainable = {name: math.prod(each) for name, each in chances.items()}
    tests = count_tests(attainable.values(), level)
    counts = []
    for name, each in chances.items():
        p_value = compute_tail(each, named[name])
        counts.append(
            Count(
                name=name,
                draws=len(each),
                named=named[name],
                expected=math.fsum(each),
                p_value=p_value,
                chance=min(1.0, p_value * tests),
                has_enough_draws=attainable[name] <= level / tests,
            )
        )
    return tuple(sorted(counts, key=lambda count: (count.p_value, -count.named, count.name)))


def compute_tail(chances: Sequence[float], at_least: int) -> float:
    """Compute the probability that at least so many independent events happen, each with a probability of its own.

    Example: at least one of two with 1/2 each: 3/4.
    """
    if at_least <= 0:
        return 1.0
    state = np.zeros(at_least + 1)  # probability of each number so far; the last one: of as many or more
    state[0] = 1.0
    for chance in chances:
        moved = state[:-1] * chance
        state[:-1] -= moved
        state[1:] += moved
    return min(1.0, float(state[-1]))


def count_tests(attainable: Collection[float], level: float) -> int:
    """Return by how much p-values are multiplied: the number of candidates that can be significant at all, at least 1.

    Args:
        attainable: smallest p-value that each candidate can have.
        level: probability of any false name that is allowed.

    Example: with 0.001, 0.002 and 0.3 at a level of 0.01, the third can't be significant: 2.
    """
    ordered = np.sort(np.asarray([*attainable], dtype=np.float64))
    for tests in range(1, len(ordered) + 1):
        if np.searchsorted(ordered, level / tests, side="right") <= tests:
            return tests
    return max(1, len(ordered))
