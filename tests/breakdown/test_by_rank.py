"""Rows and spans are found by rank, in whichever order a table has them."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from overlapscope.breakdown.spans import RowsByRank, SpansByRank

ranks_of_rows = st.lists(st.integers(-1, 5), max_size=20)


@given(ranks_of_rows | ranks_of_rows.map(sorted))
def test_each_row_is_found_with_its_rank(ranks: list[int]) -> None:
    rows_of, number = RowsByRank(ranks), np.arange(len(ranks))
    assert rows_of.ranks == sorted(set(ranks))
    for rank in range(-2, 7):
        assert number[rows_of[rank]].tolist() == [row for row, own in enumerate(ranks) if own == rank]


def test_rows_that_are_in_order_are_not_copied() -> None:
    assert RowsByRank([0, 0, 3])[0] == slice(0, 2)


def test_spans_are_those_of_a_rank() -> None:
    spans = SpansByRank(np.array([1, 0, 1]), np.array([5, 6, 7]), np.array([8, 9, 10]))
    assert spans[1].tolist() == [[5, 7], [8, 10]]
    assert spans[2].shape == (2, 0)
