"""Whose doing a delay is: what ranks are compared with."""

from __future__ import annotations

import numpy as np
import pytest

from overlapscope.stragglers.delays import excess_over_peers


@pytest.mark.parametrize("ranks", range(2, 10))
def test_ranks_that_are_alike_are_longer_than_the_others_as_often_as_shorter(ranks: int) -> None:
    rng = np.random.default_rng(ranks)
    series_ns = excess_over_peers((1e6 * rng.standard_normal((20_000, ranks))).astype(np.int64))
    np.testing.assert_allclose((series_ns > 0).mean(axis=0), 0.5, atol=0.02)


@pytest.mark.parametrize(
    ("total_ns", "longer_ns"),
    [
        ([5, 9], [-4, 4]),
        ([5, 9, 100], [5 - 54, 9 - 52, 100 - 7]),
        ([5, 9, 100, 20], [5 - 20, 9 - 20, 100 - 9, 20 - 9]),
        ([1, 2, 3, 4, 5], [1 - 3, 2 - 3, 3 - 3, 4 - 2, 5 - 2]),
    ],
)
def test_ranks_are_compared_with_the_median_of_the_others(total_ns: list[int], longer_ns: list[int]) -> None:
    assert excess_over_peers(np.array([total_ns]))[0].tolist() == longer_ns
