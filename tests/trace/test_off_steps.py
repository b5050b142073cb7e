"""Which steps are missing because recording was off, and how that is said."""

from __future__ import annotations

import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from overlapscope.trace.off_steps import OffSteps, describe_all_off_steps, find_off_steps, list_off_spans
from overlapscope.trace.recording_modes import OFF
from overlapscope.trace.tables import MODE_COLUMNS


def modes(*rows: tuple[int, int, int]) -> pd.DataFrame:
    """Modes of ranks: rank, step, every; a step takes 10 ns."""
    full = [(rank, step, step, every, "buckets", 10 * step) for rank, step, every in rows]
    return pd.DataFrame(full, columns=list(MODE_COLUMNS))


@given(st.lists(st.sampled_from([OFF, 1, 5]), min_size=1, max_size=8), st.integers(0, 3))
def test_steps_are_off_if_the_latest_mode_before_them_is(every: list[int], distance: int) -> None:
    begun = [(0, (distance + 1) * at, one) for at, one in enumerate(every)]
    last = begun[-1][1] + 5
    expected = {step for step in range(last) if [one for _, first, one in begun if first <= step][-1] == OFF}
    found: set[int] = set()
    for span in find_off_steps(begun):
        steps = set(range(span.first, last if span.end is None else span.end))
        assert not found & steps
        found |= steps
    assert found == expected


def test_ranks_that_were_off_in_the_same_steps_are_taken_together() -> None:
    begun = [(rank, step, every) for rank in (0, 1, 2) for step, every in ((5 + (rank == 2), OFF), (9, 1))]
    assert find_off_steps(begun) == [
        OffSteps(ranks=(0, 1), first=5, end=9),
        OffSteps(ranks=(2,), first=6, end=9),
    ]


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ([(0, 3, OFF), (0, 9, 1), (1, 3, OFF), (1, 9, 1)], ["in steps 3-8"]),
        ([(0, 3, OFF), (0, 4, 10)], ["in step 3"]),
        ([(0, 0, OFF), (1, 0, OFF)], ["from step 0 on"]),
        ([(0, 3, 10)], []),
        ([(0, 3, OFF), (0, 9, 1), (1, 9, 10)], ["in steps 3-8, on rank 0"]),
    ],
)
def test_it_is_said_of_which_steps_and_ranks(rows: list[tuple[int, int, int]], said: list[str]) -> None:
    assert describe_all_off_steps(modes(*rows)) == said


def test_spans_are_those_of_the_lowest_rank_that_was_off() -> None:
    found = list_off_spans(modes((0, 4, 10), (1, 3, OFF), (1, 7, 1), (1, 9, OFF), (2, 3, OFF)))
    assert [(span.start_ns, span.end_ns) for span in found] == [(30, 70), (90, None)]
    assert [span.steps for span in found] == ["in steps 3-6", "from step 9 on"]
    assert list_off_spans(modes()) == []
