"""Chances: by hand, and by counting all orders there are."""

from __future__ import annotations

import itertools

import pytest

from overlapscope.stragglers.patterns import binomial_tail, runs_test_p_value


@pytest.mark.parametrize(
    ("hits", "tries", "share", "chance"),
    [(0, 5, 0.5, 1.0), (5, 5, 0.5, 1 / 32), (1, 2, 0.5, 0.75), (3, 3, 0.0, 0.0), (4, 3, 0.5, 0.0), (2, 3, 1.0, 1.0)],
)
def test_chances_by_hand(hits: int, tries: int, share: float, chance: float) -> None:
    assert binomial_tail(hits, tries, share) == pytest.approx(chance)


@pytest.mark.parametrize(("tries", "hits"), [(8, 3), (7, 5), (6, 1), (5, 5)])
def test_the_chance_of_few_runs_is_that_among_all_orders(tries: int, hits: int) -> None:
    orders = list(itertools.combinations(range(tries), hits))
    for runs in range(1, hits + 1):
        few = sum(1 + sum(b - a > 1 for a, b in itertools.pairwise(order)) <= runs for order in orders)
        assert runs_test_p_value(runs, hits, tries) == pytest.approx(few / len(orders))
