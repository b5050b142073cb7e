"""Probabilities of being named by chance: exact where they are said to be, and bounds where not."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from overlapscope.fleet.chance import (
    Draw,
    compute_group_chances,
    compute_tail,
    compute_touching_chance,
    count_named,
    count_tests,
)

chances = st.lists(st.floats(0, 1), min_size=1, max_size=9)
sizes = st.lists(st.integers(1, 9), min_size=1, max_size=5)


def tail_by_enumeration(chances: Sequence[float], at_least: int) -> float:
    total = 0.0
    for happened in itertools.product((False, True), repeat=len(chances)):
        if sum(happened) >= at_least:
            total += math.prod(chance if is_so else 1 - chance for chance, is_so in zip(chances, happened, strict=True))
    return total


@given(chances, st.integers(0, 10))
def test_a_tail_is_the_sum_over_all_outcomes(chances: list[float], at_least: int) -> None:
    assert compute_tail(chances, at_least) == pytest.approx(tail_by_enumeration(chances, at_least), abs=1e-12)


def test_a_tail_is_exact_where_it_is_far_below_the_precision_of_its_complement() -> None:
    assert compute_tail([1 / 64] * 20, 20) == pytest.approx(64.0**-20)


def drawn_in_turn(sizes: Sequence[int], named: int) -> list[float]:
    """The probability of each group to be among ``named`` different ones, drawn in proportion to size."""
    found = [0.0] * len(sizes)
    for order in itertools.permutations(range(len(sizes)), named):
        probability, left = 1.0, sum(sizes)
        for group in order:
            probability *= sizes[group] / left
            left -= sizes[group]
        for group in order:
            found[group] += probability
    return found


@given(sizes, st.integers(1, 5))
def test_chances_of_groups_are_exact_for_one_and_never_too_small_for_several(sizes: list[int], named: int) -> None:
    named = min(named, len(sizes))
    known = compute_group_chances({str(index): size for index, size in enumerate(sizes)}, named)
    expected = drawn_in_turn(sizes, named)
    for index, probability in enumerate(expected):
        if named == 1:
            assert known[str(index)] == pytest.approx(probability)
        assert probability - 1e-9 <= known[str(index)] <= 1


@given(st.integers(0, 6), st.integers(0, 6), st.integers(0, 12))
def test_chances_of_ends_are_those_of_drawing_without_replacement(touching: int, others: int, named: int) -> None:
    total = touching + others
    named = min(named, total)
    hands = [*itertools.combinations(range(total), named)]
    expected = sum(any(each < touching for each in hand) for hand in hands) / len(hands)
    assert compute_touching_chance(touching, total, named) == pytest.approx(expected)


@given(st.lists(st.floats(0, 1), min_size=1, max_size=40), st.floats(0.001, 0.1))
def test_a_test_that_can_be_significant_is_corrected_for_all_that_can_be(attainable: list[float], level: float) -> None:
    tests = count_tests(attainable, level)
    assert 1 <= tests <= len(attainable)
    assert sum(each <= level / tests for each in attainable) <= tests


def test_who_takes_part_too_seldom_to_be_named_costs_the_others_nothing() -> None:
    busy = [Draw(named=frozenset("a"), chances={"a": 0.1, "b": 0.9}) for _ in range(5)]
    rare = [Draw(named=frozenset({f"other{n}"}), chances={f"x{n}": 0.5, f"other{n}": 0.5}) for n in range(100)]
    alone, together = count_named(busy, 0.01)[0], count_named(busy + rare, 0.01)[0]
    assert (alone.name, together.name) == ("a", "a")
    assert together.chance == alone.chance == pytest.approx(1e-5)
    assert (alone.draws, alone.named, alone.expected) == (5, 5, pytest.approx(0.5))
