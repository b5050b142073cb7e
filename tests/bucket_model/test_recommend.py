"""The advice on jobs in which everything is known: what a simulation of the advised plan takes."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from overlapscope.bucket_model import text as sentences
from overlapscope.bucket_model.fit import FittedModel, fit_model
from overlapscope.bucket_model.observation import Spans
from overlapscope.bucket_model.partition import Buckets, fill_plan
from overlapscope.bucket_model.plans import default_plan
from overlapscope.bucket_model.prediction import MeasuredSteps, Options, predict_curve
from overlapscope.bucket_model.recommend import Recommendation, Verdict, decide, recommend
from overlapscope.bucket_model.search import merge_gradients
from overlapscope.bucket_model.what_if import find_limits
from overlapscope.interval import Interval
from tests.bucket_model.jobs import costs_of, work_of_job
from tests.bucket_model.oracle import Job, observe, simulate
from tests.bucket_model.test_fit import probed_job, recording

KB = 1024
LATENCY = 1500.0


def large_job(**changes: object) -> Job:
    """Times in microseconds, sizes such that DDP's default has some buckets: 24 gradients of 4 MB on average."""
    job = probed_job()
    scale = 20
    sizes = [size * scale for size in job.sizes]
    return replace(job, sizes=sizes, wire=(job.wire[0], job.wire[1] / scale), **changes)


def advice_on(job: Job, noise: float = 0.01) -> Recommendation:
    return recommend(fit_model(recording(job, noise), lanes=job.lanes))


def simulated(job: Job, plan: Buckets) -> float:
    return simulate(job, plan).copied


@pytest.mark.parametrize("lanes", [1, 2])
@pytest.mark.parametrize("wire_factor", [0.5, 2.5])
@pytest.mark.parametrize("latency", [10.0, LATENCY])
def test_the_advised_size_really_is_the_best_or_next_to_it(lanes: int, wire_factor: float, latency: float) -> None:
    job = large_job(lanes=lanes, s=1.2)
    job = replace(job, wire=(latency, wire_factor * job.wire[1]))
    advice = advice_on(job)
    tried = [simulated(job, size.buckets) for size in (*advice.sizes, advice.default)]
    assert simulated(job, advice.best.buckets) <= min(tried) * 1.02
    assert simulated(job, advice.free.buckets) <= min(tried) * 1.02
    assert advice.best.step_ns.value == pytest.approx(simulated(job, advice.best.buckets), rel=0.03)
    really = 1 - simulated(job, advice.best.buckets) / simulated(job, advice.default.buckets)
    assert advice.gain_over_default.value == pytest.approx(really, abs=0.03)


def test_where_the_wire_is_slow_a_change_is_advised_and_its_gain_is_sure() -> None:
    job = large_job()
    job = replace(job, wire=(10.0, 2 * job.wire[1]))
    advice = advice_on(job)
    assert advice.verdict == "change"
    assert 0 < advice.gain.low <= advice.gain.value <= advice.gain.high
    assert advice.good_from_mb is not None
    assert advice.best.cap_mb is not None
    assert advice.good_from_mb < advice.best.cap_mb <= advice.good_to_mb
    text = sentences.format_headline(advice)
    assert text.startswith(f"Set bucket_cap_mb={advice.best.cap_mb:g}: ")
    assert text.endswith("MB are within 1 %.")


@pytest.mark.parametrize(
    ("gain", "verdict"),
    [
        ((0.006, 0.002, 0.01), "change"),  # surely slower, if by little
        ((0.02, -0.01, 0.04), "leave it"),  # a tie within noise
        ((0.02, -0.03, 0.08), "can't tell"),
        ((0.004, -0.24, 0.30), "can't tell"),  # hardly any gain is predicted, and any may be there
        ((-0.01, -0.24, 0.30), "leave it"),  # the present plan is better than all sizes
    ],
)
def test_what_the_interval_calls_slower_is_not_kept(gain: tuple[float, float, float], verdict: Verdict) -> None:
    value, low, high = gain
    assert decide(Interval(value=value, low=low, high=high), is_same=False) == verdict


def test_a_size_that_is_advised_has_two_digits() -> None:
    """Parameters are about 4 MB, so that most caps between them have more."""
    advice = advice_on(replace(large_job(), wire=(10.0, 2 * large_job().wire[1])))
    sizes = [size.cap_mb for size in advice.sizes if size.cap_mb is not None]
    assert len(sizes) == len(advice.sizes) > 5
    assert sizes == [float(f"{size:.2g}") for size in sizes]
    assert advice.best.cap_mb in sizes


@pytest.mark.parametrize(
    ("given", "said"), [("bucket_cap_mb=1", "Remove bucket_cap_mb=1"), ("", "Leave bucket_cap_mb")]
)
def test_who_gets_as_much_by_setting_nothing_is_told_to_set_nothing(given: str, said: str) -> None:
    """Small buckets cost latency, and those of DDP's default are as large as any that are worth it."""
    job = replace(large_job(), wire=(LATENCY, 1e-7))
    fit = fit_model(recording(job, 0.01), lanes=1)
    advice = recommend(fit, in_force=fill_plan(job.gradients, [KB]), size_arguments=given)
    assert advice.verdict == "change"
    assert advice.best.is_default
    assert min(size.step_ns.value for size in advice.sizes) >= advice.best.step_ns.value * 0.99
    assert sentences.format_headline(advice).startswith(said)


def test_one_plan_predicts_the_middle_of_what_communication_may_slow_compute() -> None:
    """The gain of overlapping more is smaller than without any slowdown, in value as in interval."""
    job = replace(large_job(s=1.25), wire=(10.0, 2 * large_job().wire[1]))
    sizes = np.geomspace(100 * KB, sum(job.sizes), 12)
    alone = Spans(bytes=sizes, time_ns=job.wire[0] + job.wire[1] * sizes, cycle=np.zeros(12, dtype=np.int64))
    one = fill_plan(job.gradients, [1000 * KB * KB])
    advice = recommend(fit_model(recording(job, 0.0, [one] * 24), lanes=1, calibration=alone))
    really = 1 - simulated(job, advice.best.buckets) / simulated(job, one)
    assert really > 0.1
    assert advice.gain.value == pytest.approx(really, abs=0.02)
    assert advice.gain.low < advice.gain.value - 0.02 < advice.gain.value + 0.02 < advice.gain.high
    assert "slows compute by 0 to 50 %" in sentences.format_headline(advice)


def test_where_the_wire_is_quick_one_should_leave_it() -> None:
    job = large_job()
    advice = advice_on(replace(job, wire=(1.0, job.wire[1] / 50)))
    assert advice.verdict == "leave it"
    assert sentences.format_headline(advice).startswith("Keep the bucket size")
    assert advice.limits.limit == "compute"


def test_what_is_in_force_already_is_not_advised_again() -> None:
    job = large_job()
    best = advice_on(job).best.buckets
    advice = recommend(fit_model(recording(job), lanes=1), in_force=best)
    assert advice.verdict == "leave it"
    assert advice.gain.value == 0
    assert advice.now.buckets == best


def test_the_best_plan_of_all_is_never_predicted_to_be_slower_than_the_best_size() -> None:
    for wire_factor in (0.3, 1.0, 3.0):
        job = large_job()
        advice = advice_on(replace(job, wire=(300.0, wire_factor * job.wire[1])))
        assert advice.free.step_ns.value <= advice.best.step_ns.value * 1.001
        if advice.free_caps_mb is not None:
            limits = [int(cap * KB * KB) for cap in advice.free_caps_mb]
            assert fill_plan(job.gradients, limits) == advice.free.buckets


def test_a_plan_that_is_better_than_all_sizes_is_kept() -> None:
    fitted = fit_model(recording(large_job()), lanes=1)
    free = recommend(fitted).free.buckets
    advice = recommend(fitted, in_force=free)
    assert advice.free.buckets == free != advice.best.buckets
    assert advice.gain.value <= 0
    assert advice.verdict == "leave it"
    assert sentences.format_headline(advice).startswith("Keep the bucket size: at ")


def test_a_model_of_one_gradient_has_no_choice() -> None:
    job = Job(sizes=[5000], start=[100.0, 100.0], work=[[50.0], [50.0]], wire=(5.0, 0.01))
    advice = recommend(fit_model(observe([job] * 6, [((0,),)] * 6), lanes=1))
    assert not advice.has_choice
    assert sentences.format_headline(advice).startswith("Nothing to choose")


def test_one_plan_of_equal_buckets_and_no_calibration_says_what_is_missing_and_is_less_sure() -> None:
    job = large_job()
    plan = fill_plan(replace(job, sizes=[4_000_000] * 24).gradients, [1])
    even = replace(job, sizes=[4_000_000] * 24, wire=(LATENCY, job.wire[1]))
    blind = recommend(fit_model(recording(even, 0.01, [plan] * 24), lanes=1))
    probed = recommend(fit_model(recording(even, 0.01), lanes=1))
    assert "sizes" in blind.missing
    assert "sizes" not in probed.missing
    assert width(blind) > 1.5 * width(probed)


def width(advice: Recommendation) -> float:
    return float(np.mean([size.step_ns.high / size.step_ns.low - 1 for size in advice.sizes]))


def fitted(job: Job) -> FittedModel:
    return fit_model(recording(job), lanes=1)


LIMITS = {
    "compute": replace(large_job(), wire=(0.1, 1e-7)),
    "latency": replace(large_job(), wire=(3000.0, 1e-7)),
    "bandwidth": replace(large_job(), wire=(1.0, 5 * large_job().wire[1])),
    "differences": replace(large_job(), start=[9000.0, 19000.0], wire=(1.0, 1e-7)),
}


@pytest.mark.parametrize("limit", LIMITS)
def test_what_a_step_is_limited_by(limit: str) -> None:
    job = LIMITS[limit]
    plan = fill_plan(job.gradients, [8 * KB * KB])
    limits = find_limits(
        plan, work_of_job(job), costs_of(job), gain_if_equal_ranks=0.4 if limit == "differences" else 0.0
    )
    assert limits.limit == limit
    assert limit.split()[0] in sentences.format_limit(limits)


def test_a_last_bucket_that_nothing_hides_limits_the_step() -> None:
    """One large gradient comes last, and everything before it is sent by then."""
    job = Job(
        sizes=[100, 100, 10_000],
        start=[1000.0, 1000.0],
        work=[[500.0, 500.0, 500.0]] * 2,
        wire=(1.0, 0.1),
    )
    limits = find_limits(((0,), (1,), (2,)), work_of_job(job), costs_of(job))
    assert limits.limit == "last bucket"
    # 1000 of the 3501 are exposed, and 10 of latency
    assert limits.exposed == pytest.approx(1001 / 3501)
    assert limits.bandwidth == pytest.approx(1000 / 3501, rel=1e-3)
    assert limits.communication == pytest.approx(1001 / 3501, rel=1e-3)


@pytest.mark.parametrize(("wire_factor", "matters"), [(3.0, True), (0.001, False)])
def test_who_does_not_know_how_lanes_share_the_wire_is_sent_to_calibrate_where_it_matters(
    wire_factor: float, matters: bool
) -> None:
    job = large_job(lanes=2)
    job = replace(job, wire=(job.wire[0], wire_factor * job.wire[1]))
    plan = fill_plan(job.gradients, [40 * KB * KB])
    advice = recommend(fit_model(recording(job, 0.01, [plan] * 24), lanes=2))
    assert ("lane slowdown" in advice.missing) == matters


def test_what_if_has_what_can_be_changed() -> None:
    job = large_job(copy_in=(5.0, 1e-6), copy_out=(5.0, 1e-6))
    job = replace(job, wire=(50.0, 3 * job.wire[1]))
    changes = {(each.kind, each.number): each for each in advice_on(job, noise=0.0).what_ifs}
    twice = changes["twice the bandwidth", None]
    faster = replace(job, wire=(50.0, job.wire[1] / 2))
    sizes = [simulated(faster, fill_plan(job.gradients, [cap * KB * KB])) for cap in (1, 2, 4, 8, 12, 16, 25, 50, 100)]
    assert twice.step_ns == pytest.approx(min(sizes), rel=0.03)
    assert changes["bucket views", None].gain >= 0
    assert changes["compression", None].gain == pytest.approx(twice.gain, abs=0.01)
    assert changes["more ranks", 8].step_ns > changes["more ranks", 4].step_ns > 0
    assert changes["more ranks", 4].gain < 0
    gains = [changes["fewer reductions", every].gain for every in (2, 4)]
    assert 0 < gains[0] < gains[1]


@pytest.mark.parametrize(("lanes", "latency", "algorithm"), [(1, 200.0, "tree"), (2, 200.0, "ring")])
def test_more_ranks_are_reduced_by_a_tree_where_nccl_would_take_one(lanes: int, latency: float, algorithm: str) -> None:
    job = large_job(lanes=lanes)
    job = replace(job, wire=(latency, job.wire[1]))
    assert {each.algorithm for each in advice_on(job).what_ifs if each.number == 8} == {algorithm}


def test_a_step_with_fp16_is_the_same_in_the_table_and_on_the_curve() -> None:
    fitted = fit_model(recording(large_job(), 0.05), lanes=1)
    in_force = fitted.observations.plans[-1]
    measured = MeasuredSteps(plan=in_force, step_ns=Interval(value=2e8, low=1.9e8, high=2.1e8), exposed_ns=3e7)
    advice = recommend(fitted, in_force, measured=measured)
    curve = predict_curve(fitted, Options(is_compressed=True), {"present": in_force}, measured)
    (compressed,) = (each for each in advice.what_ifs if each.kind == "compression")
    assert compressed.step_ns == pytest.approx(curve.predicted_ns.min())
    assert compressed.gain == pytest.approx(1 - compressed.step_ns / advice.best.step_ns.value)


def test_who_makes_no_copies_is_not_told_to_save_them() -> None:
    assert not any(each.kind == "bucket views" for each in advice_on(large_job()).what_ifs)


def test_of_thousands_of_gradients_the_advice_is_as_good() -> None:
    """They are joined for the search; every plan still holds each of them once, in order."""
    job = large_job()
    parts = 30
    many = replace(
        job,
        sizes=np.repeat(np.array(job.sizes) // parts, parts).tolist(),
        work=[np.repeat(np.array(rank) / parts, parts).tolist() for rank in job.work],
        order=[],
        kinds=[],
    )
    joined = merge_gradients(work_of_job(many))
    assert joined is not None
    assert merge_gradients(work_of_job(job)) is None
    assert [number for members in joined.members for number in members] == many.gradients.order.tolist()
    assert joined.work.gradients.total_bytes == many.gradients.total_bytes
    few = recommend(fit_model(recording(many, plans=[default_plan(many.gradients).buckets] * 4), lanes=1))
    assert sorted(number for bucket in few.free.buckets for number in bucket) == list(range(len(many.sizes)))
    assert few.free.step_ns.value <= few.best.step_ns.value * 1.001
