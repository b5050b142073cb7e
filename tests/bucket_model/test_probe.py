"""Which plans a probe runs, and when."""

from __future__ import annotations

import numpy as np
from hypothesis import given

from overlapscope.bucket_model.partition import NO_LIMIT, Gradients, fill_plan
from overlapscope.bucket_model.plans import PROBED_STEPS, default_plan, plan_probe
from tests.bucket_model.test_partition import gradients, of

MB = 1024**2


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
