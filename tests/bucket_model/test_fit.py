"""From recordings of jobs in which everything is known, back to what was known."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from overlapscope.bucket_model.contention import estimate_compute_slowdown
from overlapscope.bucket_model.cost import ZERO_COST
from overlapscope.bucket_model.fit import FittedModel, fit_model
from overlapscope.bucket_model.observation import Observations, Spans
from overlapscope.bucket_model.partition import Buckets, fill_plan
from overlapscope.bucket_model.plans import plan_probe
from overlapscope.bucket_model.prediction import Options, draw_step_times_ns
from overlapscope.bucket_model.schedule import replay
from overlapscope.bucket_model.work import extract_backward
from tests.bucket_model.jobs import costs_of, jobs, plans_of
from tests.bucket_model.oracle import Job, observe, simulate

KB = 1024


def probed_job(**changes: object) -> Job:
    """Times in microseconds: backward takes 24 ms, and all that is sent, in one piece, 12 ms."""
    random = np.random.default_rng(3)
    sizes = random.integers(20, 400, size=24) * KB
    job = Job(
        sizes=sizes.tolist(),
        start=[9000.0, 9500.0],
        work=[(24_000 * sizes / sizes.sum()).tolist()] * 2,
        wire=(150.0, 12_000 / sizes.sum()),
    )
    return replace(job, **changes)  # type: ignore[arg-type]


def noisy(job: Job, random: np.random.Generator, noise: float) -> Job:
    speed = np.exp(noise * random.standard_normal(2))
    work = [[each * speed[rank] for each in job.work[rank]] for rank in range(2)]
    return replace(job, work=work, start=[start * float(speed[0]) for start in job.start])


def recording(job: Job, noise: float = 0.0, plans: list[Buckets] | None = None) -> Observations:
    random = np.random.default_rng(0)
    probed = plan_probe(job.gradients)
    in_force = plans or [probed.plans[number] for number in probed.plan_of_step]
    return observe([noisy(job, random, noise) for _ in in_force], in_force)


@given(job=jobs(), data=st.data())
def test_replaying_the_recorded_plan_gives_the_recorded_times(job: Job, data: st.DataObject) -> None:
    """Also where compute was slowed down, as long as one knows by how much."""
    plan, costs = data.draw(plans_of(job)), costs_of(job)
    step = simulate(job, plan)
    work = extract_backward(observe([job], [plan]), costs.copy_in).without_slowdown(costs.compute_slowdown)
    replayed = replay([plan], work, costs)
    assert replayed.cycle_ns[0, 0] == pytest.approx(step.copied, abs=1e-6)
    assert replayed.backward_end_ns[0, 0] == pytest.approx(step.backward_end.max(), abs=1e-6)


@given(job=jobs(), data=st.data())
def test_the_recording_of_one_plan_tells_the_times_of_another(job: Job, data: st.DataObject) -> None:
    recorded, other = data.draw(plans_of(job)), data.draw(plans_of(job))
    costs = costs_of(job)
    work = extract_backward(observe([job], [recorded]), costs.copy_in).without_slowdown(costs.compute_slowdown)
    assert replay([other], work, costs).cycle_ns[0, 0] == pytest.approx(simulate(job, other).copied, abs=1e-6)


@pytest.mark.parametrize("lanes", [1, 2])
@pytest.mark.parametrize("slowdowns", [(1.0, 1.0), (1.3, 1.0), (1.4, 1.5)])
def test_a_probe_tells_costs_slowdowns_and_the_times_of_plans_that_it_has_not_run(
    lanes: int, slowdowns: tuple[float, float]
) -> None:
    s, c = slowdowns
    job = probed_job(s=s, c=c, lanes=lanes, copy_in=(20.0, 2e-4), copy_out=(10.0, 1e-4))
    fitted = fit_model(recording(job, noise=0.01), lanes=lanes)
    assert fitted.compute_slowdown.value == pytest.approx(s, abs=0.06)
    assert fitted.costs.copy_in.alpha_ns == pytest.approx(20.0, rel=0.05)
    sizes = np.geomspace(150 * KB, sum(job.sizes), 7)
    alpha, beta = job.wire
    np.testing.assert_allclose(fitted.costs.collective.time_ns(sizes), alpha + beta * sizes, rtol=0.06)
    for cap in (300, 700, 1500, 3000):
        plan = fill_plan(job.gradients, [cap * KB])
        predicted = float(replay([plan], fitted.work, fitted.costs).typical_ns[0])
        assert predicted == pytest.approx(simulate(job, plan).copied, rel=0.02)


@pytest.mark.parametrize("lane_slowdown", [1.0, 1.4, 2.0])
def test_a_probe_tells_how_much_two_that_run_together_slow_each_other_down(lane_slowdown: float) -> None:
    job = probed_job(lanes=2, lane_slowdown=lane_slowdown)
    fitted = fit_model(recording(job, noise=0.01), lanes=2)
    assert fitted.lane_slowdown.is_known
    assert fitted.lane_slowdown.value == pytest.approx(lane_slowdown, abs=0.1)
    plan = fill_plan(job.gradients, [700 * KB])
    assert _predicted(fitted, plan) == pytest.approx(simulate(job, plan).copied, rel=0.02)


def test_pairs_of_a_calibration_tell_it_where_one_plan_does_not() -> None:
    job = probed_job(lanes=2, lane_slowdown=1.3, s=1.25)
    alpha, beta = job.wire
    sizes = np.geomspace(10 * KB, 4000 * KB, 9)
    alone = Spans(bytes=sizes, time_ns=alpha + beta * sizes, cycle=np.zeros(9, dtype=np.int64))
    pairs = Spans(bytes=sizes[-3:], time_ns=alpha + 1.3 * beta * sizes[-3:], cycle=np.zeros(3, dtype=np.int64))
    even = recording(job, 0.01, [fill_plan(job.gradients, [4000 * KB])] * 20)
    plan = fill_plan(job.gradients, [700 * KB])
    blind, told = fit_model(even, lanes=2), fit_model(even, lanes=2, calibration=alone, pairs=pairs)
    assert not blind.lane_slowdown.is_known
    assert told.lane_slowdown.value == pytest.approx(1.3)
    assert _predicted(told, plan) == pytest.approx(simulate(job, plan).copied, rel=0.03)
    low, high = blind.lane_slowdown.interval
    assert low < 1.3 < high, "whoever doesn't know is unsure"


def test_what_copies_back_take_beyond_their_spans_stays_with_the_step() -> None:
    job = probed_job(copy_out=(10.0, 1e-4))
    observations = recording(job)
    late = replace(
        observations,
        copies_out_ns=observations.copies_out_ns + 70.0,
        backward_start_ns=observations.backward_start_ns + 70.0,
        collectives=replace(
            observations.collectives,
            end_ns=observations.collectives.end_ns + 70.0,
            launch_ns=observations.collectives.launch_ns + 70.0,
        ),
    )
    plan = observations.plans[0]
    before, after = (_predicted(fit_model(each, lanes=1), plan) for each in (observations, late))
    assert after - before == pytest.approx(70.0, abs=1.0)


def test_the_first_step_with_a_plan_does_not_count_as_its_buffers_are_new() -> None:
    job = probed_job()
    probed = plan_probe(job.gradients)
    slow = replace(job, work=[[1.5 * each for each in rank] for rank in job.work])
    is_new = np.diff(probed.plan_of_step, prepend=-1) != 0
    plans = [probed.plans[number] for number in probed.plan_of_step]
    observations = observe([slow if new else job for new in is_new], plans)
    for plan in probed.plans:
        assert _predicted(fit_model(observations, lanes=1), plan) == pytest.approx(simulate(job, plan).copied, rel=0.02)


def test_without_gradient_times_they_are_put_where_their_bytes_say() -> None:
    job = probed_job()
    observations = recording(job)
    ready_ns = np.full_like(observations.ready_ns, np.nan)
    blind = replace(observations, ready_ns=ready_ns)
    plan = observations.plans[-1]
    assert _predicted(fit_model(blind, lanes=1), plan) == pytest.approx(
        _predicted(fit_model(observations, lanes=1), plan), rel=0.01
    )


def test_one_plan_alone_tells_no_slowdown_of_compute() -> None:
    job = probed_job(s=1.5)
    plan = fill_plan(job.gradients, [500 * KB])
    slowdown = estimate_compute_slowdown(extract_backward(recording(job, plans=[plan] * 10), ZERO_COST))
    assert not slowdown.is_known
    low, high = slowdown.interval
    assert low < 1.1 < slowdown.value == 1.25 < 1.4 < high


def test_more_cycles_make_it_surer() -> None:
    job = probed_job()
    observations = recording(job, noise=0.05)
    few = fit_model(observations.select_cycles(np.arange(24) % 4 == 0), lanes=1)
    many = fit_model(observations, lanes=1)
    plans = list(observations.plans)
    narrow, wide = (np.ptp(draw_step_times_ns(each, plans, Options(), count=60), axis=0).mean() for each in (many, few))
    assert narrow < wide


def test_recorded_plans_check_the_model() -> None:
    """Who takes two lanes for one is off where latency matters, says so, and is less sure."""
    observations = recording(probed_job(lanes=2, wire=(1500.0, probed_job().wire[1])), noise=0.005)
    right, wrong = fit_model(observations, lanes=2), fit_model(observations, lanes=1)
    assert len(right.checks) == len(observations.plans)
    assert all(abs(check.off) < 0.02 for check in right.checks)
    counts = [len(plan) for plan in observations.plans]
    assert 2 * right.estimate_model_errors(counts).max() < wrong.estimate_model_errors(counts).max()


def test_steps_that_take_longer_while_another_plan_is_active_do_not_make_the_model_wrong() -> None:
    """In the second half of a recording, which has other buckets, all that ranks compute takes four times as long."""
    job = probed_job()
    slow = replace(job, work=[[4 * each for each in of_rank] for of_rank in job.work], start=[4 * 9000.0, 4 * 9500.0])
    plans = [fill_plan(job.gradients, [size]) for size in (500 * KB, 2000 * KB)]
    in_force = [plan for plan in plans for _ in range(8)]
    fitted = fit_model(observe([job] * 8 + [slow] * 8, in_force), lanes=1)
    assert fitted.estimate_model_errors([len(plan) for plan in plans]).max() < 0.02


def test_a_plan_is_off_like_the_recorded_ones_with_about_as_many_buckets() -> None:
    """What each launch costs beyond the model is seen where launches are many, and does not blur where they are few."""
    job = probed_job()
    probed = plan_probe(job.gradients)
    observations = recording(job)
    counts = np.array([len(probed.plans[number]) for number in probed.plan_of_step])
    slow = replace(observations, cycle_ns=observations.cycle_ns * np.where(counts > 10, 1.3, 1.0)[:, None])
    fitted = fit_model(slow, lanes=1)
    many, few = fitted.estimate_model_errors([counts.max(), 1])
    assert many > 0.15
    assert few < 0.03
    plans = [probed.plans[probed.plan_of_step[number]] for number in (counts.argmax(), counts.argmin())]
    unsure, sure = np.std(np.log(draw_step_times_ns(fitted, [observations.plans[0], *plans], Options())[:, 1:]), axis=0)
    assert unsure > 2 * sure


def test_draws_are_about_the_prediction_and_the_same_each_time() -> None:
    fitted = fit_model(recording(probed_job(), noise=0.03), lanes=1)
    plans = list(fitted.observations.plans)
    draws = draw_step_times_ns(fitted, plans, Options(), count=80)
    low, high = np.quantile(draws, [0.02, 0.98], axis=0)
    predicted = replay(plans, fitted.work, fitted.costs).typical_ns
    assert ((low <= predicted) & (predicted <= high)).all()
    np.testing.assert_array_equal(draws[:10], draw_step_times_ns(fitted, plans, Options(), count=10))


def _predicted(fitted: FittedModel, plan: Buckets) -> float:
    return float(replay([plan], fitted.work, fitted.costs).typical_ns[0])
