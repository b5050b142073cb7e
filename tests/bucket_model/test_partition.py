"""How buckets are filled, and plans as arrays."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from overlapscope.bucket_model.partition import (
    NO_LIMIT,
    SPARSE_KIND,
    Gradients,
    buckets_from_cuts,
    build_table,
    build_table_from_cuts,
    cuts_from_buckets,
    fill_plan,
)


@st.composite
def gradients(draw: st.DrawFn, most: int = 12, kinds: Any = (0, 1, SPARSE_KIND)) -> Gradients:
    count = draw(st.integers(1, most))
    return Gradients(
        names=tuple(f"p{number}" for number in range(count)),
        bytes=np.array(draw(st.lists(st.integers(1, 1000), min_size=count, max_size=count))),
        kinds=np.array(draw(st.lists(st.sampled_from(kinds), min_size=count, max_size=count))),
        order=np.array(draw(st.permutations(range(count)))),
    )


limits = st.lists(st.integers(1, 4000), min_size=1, max_size=3)


def of(sizes: list[int], kinds: list[int] | None = None) -> Gradients:
    return Gradients(
        names=tuple(f"p{number}" for number in range(len(sizes))),
        bytes=np.array(sizes),
        kinds=np.array(kinds or [0] * len(sizes)),
        order=np.arange(len(sizes)),
    )


def test_a_bucket_is_closed_once_it_holds_its_limit_or_more() -> None:
    assert fill_plan(of([4, 4, 4, 4, 4]), [8]) == ((0, 1), (2, 3), (4,))
    assert fill_plan(of([4, 4, 4, 4, 4]), [7]) == ((0, 1), (2, 3), (4,))
    assert fill_plan(of([4, 4, 4, 4, 4]), [1, 9]) == ((0,), (1, 2, 3), (4,))
    assert fill_plan(of([4, 4, 4]), [NO_LIMIT]) == ((0, 1, 2),)


def test_kinds_are_not_mixed_and_each_counts_its_own_limits() -> None:
    assert fill_plan(of([4, 4, 4, 4], [0, 1, 0, 1]), [1, 100]) == ((0,), (1,), (2,), (3,))
    assert fill_plan(of([4, 4, 4, 4], [0, 1, 0, 1]), [8]) == ((0, 2), (1, 3))


def test_sparse_gradients_are_alone_and_don_t_close_a_bucket() -> None:
    assert fill_plan(of([4, 4, 4], [0, SPARSE_KIND, 0]), [8]) == ((1,), (0, 2))


@given(gradients(), limits)
def test_cuts_say_all_of_a_plan(gradients: Gradients, limits_bytes: list[int]) -> None:
    plan = fill_plan(gradients, limits_bytes)
    cuts = cuts_from_buckets(plan, gradients)
    assert cuts is not None
    assert buckets_from_cuts(cuts, gradients) == plan


@given(gradients(), st.lists(limits, min_size=1, max_size=5))
def test_a_table_is_the_same_from_buckets_and_from_cuts(gradients: Gradients, limits_bytes: list[list[int]]) -> None:
    plans = [fill_plan(gradients, each) for each in limits_bytes]
    cuts = np.array([cuts_from_buckets(plan, gradients) for plan in plans])
    table, other = build_table(plans, gradients), build_table_from_cuts(cuts, gradients)
    np.testing.assert_array_equal(table.is_bucket, other.is_bucket)
    np.testing.assert_array_equal(table.bytes, other.bytes)
    np.testing.assert_array_equal(table.last[table.is_bucket], other.last[table.is_bucket])


def test_a_plan_in_another_order_than_that_of_gradients_has_no_cuts() -> None:
    assert cuts_from_buckets(((0, 2), (1, 3)), of([1, 1, 1, 1])) is None
    assert cuts_from_buckets(((2, 3), (0, 1)), of([1, 1, 1, 1])) is None
