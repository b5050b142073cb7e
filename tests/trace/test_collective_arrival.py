"""Occurrence numbers of rows."""

from __future__ import annotations

from collections import Counter

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from overlapscope.trace.collective_arrival import index_in_runs, occurrence_index

rows = st.lists(st.tuples(st.integers(0, 2), st.integers(0, 2)), max_size=30)


@given(rows=rows)
def test_turns_count_equal_rows_before(rows: list[tuple[int, int]]) -> None:
    seen: Counter[tuple[int, int]] = Counter()
    expected = []
    for row in rows:
        expected.append(seen[row])
        seen[row] += 1
    columns = np.array(rows, dtype=np.int64).reshape(-1, 2).T
    assert occurrence_index(*columns).tolist() == expected


def test_places_begin_anew_with_each_run() -> None:
    assert index_in_runs(np.array([5, 5, 5, 7, 5]), np.array([1, 1, 2, 2, 1])).tolist() == [0, 1, 0, 0, 0]
