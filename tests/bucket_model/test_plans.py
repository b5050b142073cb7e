"""Plans that DDP's settings express, what to set for a plan, and which plans a probe runs."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from overlapscope.bucket_model.partition import MB, NO_LIMIT, SPARSE_KIND, Gradients, fill_plan
from overlapscope.bucket_model.plans import (
    PROBED_STEPS,
    default_plan,
    find_caps_mb,
    find_round_cap_mb,
    format_caps,
    plan_probe,
    uniform_plans,
)
from tests.bucket_model.test_partition import gradients, limits, of

first_limits = st.none() | st.integers(1, 2000)


@given(gradients(), first_limits)
def test_they_are_all_that_caps_can_give(gradients: Gradients, first_bytes: int | None) -> None:
    found = [plan.buckets for plan in uniform_plans(gradients, first_bytes)]
    assert len(set(found)) == len(found)
    first = [] if first_bytes is None else [first_bytes]
    for cap in range(1, gradients.total_bytes + 2, 7):
        assert fill_plan(gradients, [*first, cap]) in found


@given(gradients(), first_limits)
def test_bands_meet_without_a_gap_and_each_cap_in_one_gives_its_plan(
    gradients: Gradients, first_bytes: int | None
) -> None:
    plans = uniform_plans(gradients, first_bytes)
    first = [] if first_bytes is None else [first_bytes]
    assert plans[0].low_bytes == 0
    assert plans[-1].high_bytes == NO_LIMIT
    for plan, following in pairwise(plans):
        assert plan.high_bytes == following.low_bytes
    for plan in plans:
        for cap in (plan.low_bytes + 1, min(plan.high_bytes, 10**9), int(plan.cap_mb * MB)):
            assert fill_plan(gradients, [*first, cap]) == plan.buckets


def test_of_too_many_plans_some_are_listed_from_small_to_one_bucket() -> None:
    random = np.random.default_rng(0)
    many = of(random.integers(1000, 9_000_000, size=400).tolist())
    plans = uniform_plans(many, max_plans=50)
    assert 25 <= len(plans) <= 51
    assert plans[-1].buckets == fill_plan(many, [NO_LIMIT])
    assert len(plans[0].buckets) > 350


@given(gradients())
def test_the_default_has_a_small_first_bucket(gradients: Gradients) -> None:
    scaled = of((gradients.bytes * 100_000).tolist())
    plan = default_plan(scaled)
    assert plan.buckets == fill_plan(scaled, [MB, 25 * MB])
    assert plan.cap_mb == 25


@given(gradients(kinds=(0,)), limits)
def test_of_one_kind_any_plan_is_a_list_of_caps(gradients: Gradients, limits_bytes: list[int]) -> None:
    plan = fill_plan(gradients, limits_bytes)
    caps = find_caps_mb(plan, gradients)
    assert caps is not None
    assert fill_plan(gradients, [int(cap * MB) for cap in caps]) == plan


@given(gradients(), limits)
def test_of_several_kinds_a_list_gives_the_plan_or_there_is_none(gradients: Gradients, limits_bytes: list[int]) -> None:
    plan = fill_plan(gradients, limits_bytes)
    caps = find_caps_mb(plan, gradients)
    assert caps is not None  # it came from a list
    assert fill_plan(gradients, [int(cap * MB) for cap in caps]) == plan


def test_buckets_of_two_kinds_that_need_other_caps_have_no_list() -> None:
    mixed = of([4, 4, 4, 4], [0, 0, 1, 1])
    assert find_caps_mb(((0,), (1,), (2, 3)), mixed) is None
    assert find_caps_mb(((1,), (0,), (2, 3)), mixed) is None  # nor has another order


def test_sparse_gradients_take_no_place_in_the_list() -> None:
    mixed = of([4 * MB, 1 * MB, 4 * MB, 8 * MB], [0, SPARSE_KIND, 0, 0])
    assert find_caps_mb(((0,), (1,), (2, 3)), mixed) == [1.0, 25.0]


def test_caps_are_round_numbers() -> None:
    assert find_round_cap_mb(21 * MB, 28 * MB) == 25
    assert find_round_cap_mb(0, 3 * MB) == 1
    assert find_round_cap_mb(9 * MB, 10 * MB) == 10
    assert find_round_cap_mb(int(0.31 * MB), int(0.36 * MB)) == 0.35
    assert find_round_cap_mb(99 * MB, NO_LIMIT) == 100


@given(st.integers(0, 10**10), st.integers(1, 10**9))
def test_a_round_cap_lies_in_its_band(low: int, width: int) -> None:
    assert low < int(find_round_cap_mb(low, low + width) * MB) <= low + width


@given(gradients(kinds=(0,)))
def test_a_cap_that_is_printed_gives_the_plan_that_it_was_printed_for(gradients: Gradients) -> None:
    for plan in uniform_plans(gradients):
        name, _, value = format_caps([plan.cap_mb]).partition("=")
        assert name == "bucket_cap_mb"
        assert fill_plan(gradients, [int(float(value) * MB)]) == plan.buckets


def test_caps_are_printed_as_one_would_write_them() -> None:
    assert format_caps([25.0]) == "bucket_cap_mb=25"
    assert format_caps([1.0, 4.0053711, 25.0]) == "bucket_cap_mb_list=[1, 4.0053711, 25]"


@given(gradients())
def test_plans_are_distinct_begin_with_the_default_and_fill_the_steps(gradients: Gradients) -> None:
    probed = plan_probe(gradients)
    assert len(set(probed.plans)) == len(probed.plans)
    assert probed.plans[0] == default_plan(gradients).buckets
    assert len(probed.plan_of_step) == PROBED_STEPS
    assert set(probed.plan_of_step.tolist()) == set(range(len(probed.plans)))


@given(gradients())
def test_a_steady_drift_meets_all_plans_alike(gradients: Gradients) -> None:
    plan_of_step = plan_probe(gradients).plan_of_step
    middle = [np.flatnonzero(plan_of_step == plan).mean() for plan in np.unique(plan_of_step)]
    np.testing.assert_allclose(middle, (PROBED_STEPS - 1) / 2, atol=1.0)


@given(gradients())
def test_no_plan_runs_for_a_single_step(gradients: Gradients) -> None:
    plan_of_step = plan_probe(gradients).plan_of_step
    lengths = np.diff(np.flatnonzero(np.diff(plan_of_step, prepend=-1, append=-1)))
    assert lengths.min() >= 2


def test_the_sizes_of_a_usual_model_are_spanned() -> None:
    usual = of([MB // 2, 2 * MB, 2 * MB, 8 * MB] * 12)
    probed = plan_probe(usual)
    assert len(probed.plans) == 5
    assert fill_plan(usual, [NO_LIMIT]) in probed.plans
    sizes = {sum(int(usual.bytes[number]) for number in bucket) for plan in probed.plans for bucket in plan}
    assert max(sizes) > 50 * min(sizes)
    assert max(len(plan) for plan in probed.plans) <= 48
