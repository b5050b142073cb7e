"""Spans are cut at the edges of steps, against an oracle that looks at each span and each step."""

from __future__ import annotations

from itertools import pairwise
from random import Random

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from overlapscope.breakdown.spans import StepsByRank

times = st.integers(0, 30)
edges_of_steps = st.lists(times, min_size=2, max_size=8, unique=True).map(sorted)
lists_of_spans = st.lists(st.tuples(times, st.integers(1, 12)).map(lambda pair: (pair[0], sum(pair))), max_size=6)


@given(edges_of_steps, lists_of_spans, st.randoms(use_true_random=False))
def test_each_part_is_in_its_step(edges: list[int], spans: list[tuple[int, int]], shuffle: Random) -> None:
    steps = [(1, *step) for step in pairwise(edges)] + [(0, 0, 30)]
    shuffle.shuffle(steps)
    expected = [
        (which, row, max(start, begin), min(end, until))
        for which, (start, end) in enumerate(spans)
        for begin, until, row in sorted((begin, until, row) for row, (rank, begin, until) in enumerate(steps) if rank)
        if start < until and begin < end
    ]
    which, row, edges_ns = StepsByRank(*np.array(steps).T).cut(1, np.array(spans, dtype=np.int64).reshape(-1, 2).T)
    assert list(zip(which.tolist(), row.tolist(), *edges_ns.tolist(), strict=True)) == expected
