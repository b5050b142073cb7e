"""Predictions as changes of what was measured."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from overlapscope.bucket_model.fit import FittedModel, fit_model
from overlapscope.bucket_model.partition import build_table
from overlapscope.bucket_model.prediction import (
    MeasuredSteps,
    Options,
    draw_step_times_ns,
    predict_curve,
    predict_steps,
)
from overlapscope.bucket_model.schedule import replay
from overlapscope.interval import Interval
from tests.bucket_model.test_fit import probed_job, recording


def measured_in(fitted: FittedModel, factor: float = 1.0) -> MeasuredSteps:
    """The means of the recorded plans, the last of them as that of the job.

    Args:
        factor: by which the recorded steps are longer than the model knows.
    """
    observations = fitted.observations
    cycle_ns = factor * observations.cycle_ns.mean(axis=1)
    steps_ns = {}
    for plan, buckets in enumerate(observations.plans):
        mean = float(cycle_ns[observations.plan == plan].mean())
        steps_ns[buckets] = Interval(value=mean, low=0.99 * mean, high=1.01 * mean)
    plan = observations.plans[int(observations.plan[-1])]
    exposed_ns = factor * float(np.median(replay([plan], fitted.work, fitted.costs).exposed_ns))
    return MeasuredSteps(plan=plan, step_ns=steps_ns.pop(plan), exposed_ns=exposed_ns, others_ns=steps_ns)


@pytest.fixture(scope="module")
def fitted() -> FittedModel:
    return fit_model(recording(probed_job(), noise=0.01), lanes=1)


@given(factor=st.floats(0.5, 2.0), exposed=st.floats(0.0, 0.9))
def test_the_measured_plan_is_predicted_as_measured_and_others_change_block_by_block(
    fitted: FittedModel, factor: float, exposed: float
) -> None:
    known = measured_in(fitted, factor)
    known = MeasuredSteps(plan=known.plan, step_ns=known.step_ns, exposed_ns=exposed * known.step_ns.value)
    plans = [known.plan, *fitted.observations.plans]
    found = predict_steps(build_table(plans, fitted.work.gradients), fitted.work, fitted.costs, fitted.costs, known)
    assert found.step_ns[0] == pytest.approx(known.step_ns.value)
    assert found.exposed_ns[0] == pytest.approx(known.exposed_ns)
    assert (found.backward_ns[0], found.copies_ns[0]) == pytest.approx((0.0, 0.0), abs=1e-6)
    changes = found.backward_ns + found.copies_ns + found.exposed_ns - known.exposed_ns
    np.testing.assert_allclose(changes, found.step_ns - known.step_ns.value, atol=1e-6 * known.step_ns.value)
    assert (found.exposed_ns >= 0).all()
    model_ns = replay(plans, fitted.work, fitted.costs).typical_ns
    np.testing.assert_allclose(found.step_ns / found.step_ns[0], model_ns / model_ns[0])
    assert found.error == pytest.approx(model_ns[0] / known.step_ns.value - 1)


def test_without_a_measurement_the_model_is_all_there_is(fitted: FittedModel) -> None:
    plans = list(fitted.observations.plans)
    found = predict_steps(build_table(plans, fitted.work.gradients), fitted.work, fitted.costs, fitted.costs, None)
    np.testing.assert_array_equal(found.step_ns, replay(plans, fitted.work, fitted.costs).typical_ns)
    assert np.isnan(found.error)


def test_a_curve_goes_through_what_was_measured_and_its_interval(fitted: FittedModel) -> None:
    known = measured_in(fitted, 1.2)
    specials = {"present": known.plan, "default": known.plan, "best": known.plan}
    curve = predict_curve(fitted, Options(), specials, known)
    place = curve.plans.index(known.plan)
    step = curve.step_of(place)
    assert (step.value, step.low, step.high) == pytest.approx(
        (known.step_ns.value, known.step_ns.low, known.step_ns.high)
    )
    assert curve.measured_steps_ns()[place] == known.step_ns
    assert curve.compute_gain(place, curve) == Interval(value=0.0, low=0.0, high=0.0)
    compressed = predict_curve(fitted, Options(is_compressed=True), specials, known)
    assert compressed.measured_steps_ns() == {}
    assert compressed.compute_gain(compressed.plans.index(known.plan), curve).low > -0.1


def test_what_is_sure_of_a_plan_is_sure_of_its_gain_though_another_day_is_slower(fitted: FittedModel) -> None:
    known = measured_in(fitted)
    plans = [known.plan, fitted.observations.plans[0]]
    draws_ns = draw_step_times_ns(fitted, plans, Options(), count=200, measured=known)
    gains = 1 - draws_ns[:, 1] / draws_ns[:, 0]
    assert np.std(np.log(draws_ns[:, 0])) > 0.02, "another day"
    assert np.std(gains) < np.std(np.log(draws_ns[:, 1])), "which both have in common"
