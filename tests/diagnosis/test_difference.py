"""What of two ranks' entries is a difference, without any files."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from overlapscope.diagnosis.order_difference import (
    COMPARED_DTYPE,
    MAX_SWAP_DISTANCE,
    NO_POSITION,
    Compared,
    EntryDifference,
    extract_compared,
    find_first_difference,
)
from overlapscope.trace.collective_log import ENTRY_DTYPE, UNEVEN_INPUTS

Row = tuple[int, int, int, int, int, bool]


def bucket(number: int, *, step: int, batch: int = NO_POSITION, kind: int = 7) -> Row:
    return number, kind, 0, step, batch, True


def named(names: Sequence[int]) -> Compared:
    """All-reduces of tensors of one size, in one step; a name is a number."""
    return rows((number, 1, name, 0, NO_POSITION, False) for number, name in enumerate(names, 1))


def rows(entries: object) -> Compared:
    return np.array(list(entries), dtype=COMPARED_DTYPE)  # type: ignore[call-overload]


def test_equal_entries_have_no_difference() -> None:
    one = rows(bucket(n, step=n, batch=n) for n in range(1, 9))
    assert find_first_difference(one, one) is None
    assert find_first_difference(one[:0], one[:0]) is None


@pytest.mark.parametrize(
    ("other", "divergence"), [(bucket(3, step=3, kind=8), "signature"), (bucket(3, step=4), "step")]
)
def test_what_must_agree_and_does_not_is_a_difference(other: Row, divergence: str) -> None:
    usual = [bucket(n, step=n) for n in range(1, 6)]
    found = find_first_difference(rows(usual), rows([*usual[:2], other, *usual[3:]]))
    assert found == EntryDifference(number=3, divergence=divergence)  # type: ignore[arg-type]


def test_the_step_of_an_entry_is_compared_unless_inputs_are_uneven() -> None:
    entries = np.zeros(2, dtype=ENTRY_DTYPE)
    entries["number"], entries["step"], entries["flags"] = (1, 2), (3, 4), (0, UNEVEN_INPUTS)
    assert extract_compared(entries, {})["step"].tolist() == [3, NO_POSITION]


def test_entries_that_one_rank_lacks_are_passed_over() -> None:
    usual = [bucket(n, step=n) for n in range(1, 6)]
    assert find_first_difference(rows(usual), rows(usual[2:])) is None
    assert find_first_difference(rows(usual), rows([usual[0], bucket(5, step=9)])) == EntryDifference(
        number=5, divergence="step"
    )


def test_a_batch_is_skipped_where_one_rank_gets_ahead_and_stays() -> None:
    ours = rows(bucket(n, step=n, batch=n) for n in range(1, 9))
    theirs = rows(bucket(n, step=n, batch=n + 40 + (n >= 5)) for n in range(1, 9))
    assert find_first_difference(ours, theirs) == EntryDifference(number=5, divergence="batch")
    assert find_first_difference(ours[:4], theirs[:4]) is None
    came_back = rows(bucket(n, step=n, batch=n + (50 if 3 <= n <= 5 else 0)) for n in range(1, 9))
    assert find_first_difference(ours, came_back) is None


def swapped_pair(ours: Sequence[int], theirs: Sequence[int]) -> bool:
    """Two entries near by in which two ranks have the same two names, each the other way round."""
    places = range(min(len(ours), len(theirs)))
    return any(
        (ours[i], theirs[i]) == (theirs[j], ours[j]) and ours[i] != theirs[i]
        for i in places
        for j in places
        if i < j <= i + MAX_SWAP_DISTANCE
    )


@given(st.lists(st.integers(1, 6), max_size=30), st.lists(st.integers(1, 6), max_size=30))
def test_any_pair_of_swapped_names_near_by_is_found(ours: list[int], theirs: list[int]) -> None:
    found = find_first_difference(named(ours), named(theirs))
    assert found is None or found.divergence == "names"
    if swapped_pair(ours, theirs):
        assert found is not None


@given(st.lists(st.integers(1, 6), max_size=30))
def test_other_names_that_are_nowhere_on_the_other_rank_are_no_difference(ours: list[int]) -> None:
    assert find_first_difference(named(ours), named([name + 10 for name in ours])) is None


@given(st.lists(st.integers(1, 6), max_size=30), st.lists(st.integers(1, 6), max_size=30))
def test_either_rank_may_come_first(ours: list[int], theirs: list[int]) -> None:
    assert find_first_difference(named(ours), named(theirs)) == find_first_difference(named(theirs), named(ours))
