"""The page of bucket sizes, read from the documents and sources that the server would send."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from bokeh.document import Document

from dashboards.app import ROUTES
from dashboards.forecast import BucketChoice, Forecast, predict_mean_step
from dashboards.pages import buckets
from dashboards.plots.bucket_columns import (
    build_curve_columns,
    build_mark_columns,
    build_measured_columns,
    build_span_columns,
    build_strip_columns,
    compute_size_range_mb,
    format_caps,
)
from dashboards.plots.buckets import BucketsPlot, select_ranks
from dashboards.recording import RecordingCache, Snapshot
from overlapscope.advice.advice import Advice, advise
from overlapscope.analysis import Analysis
from overlapscope.breakdown.lanes import CATEGORIES
from overlapscope.bucket_model.fit import fit_model
from overlapscope.bucket_model.partition import MB, fill_plan
from overlapscope.bucket_model.plans import UniformPlan
from overlapscope.bucket_model.prediction import Options
from overlapscope.bucket_model.recommend import recommend
from overlapscope.bucket_model.schedule import replay_step
from overlapscope.trace.recording import read_trace
from tests.bucket_model.oracle import Job
from tests.bucket_model.test_fit import probed_job, recording
from tests.bucket_model.test_prediction import measured_in
from tests.cli.test_recommend import calibrated
from tests.dashboards.test_pages import words
from tests.synthetic import write_recording

Ask = Callable[..., dict[str, Any]]


def forecast_of(job: Job, plans: Any = None) -> Forecast:
    fitted = fit_model(recording(job, noise=0.01, plans=plans), lanes=job.lanes)
    measured = measured_in(fitted)
    return Forecast(
        Advice(
            recorded_steps=24,
            fitted=fitted,
            recommendation=recommend(fitted, measured=measured),
            parameters=(),
            is_calibrated=False,
            other_models=0,
            missing_ranks=0,
            drift=None,
        )
    )


@pytest.fixture(scope="module")
def forecast() -> Forecast:
    """Of a job that was probed with plans of many sizes."""
    return forecast_of(probed_job())


@pytest.fixture
def plot(forecast: Forecast) -> BucketsPlot:
    return BucketsPlot(forecast, forecast.choose(BucketChoice()).result())


@pytest.fixture
def ask(plot: BucketsPlot, snapshot: Snapshot, forecast: Forecast) -> Ask:
    """Asks what the browser would, and gives the answer."""
    rpc = buckets.ChoiceRpc(plot, snapshot.summary, forecast)

    def asked(**question: Any) -> dict[str, Any]:
        usual = {"cap_mb": None, "move": 0, "special": "", "first_mb": None, "is_compressed": False, "width_px": 1000}
        number = len(rpc.response.data["id"]) and rpc.response.data["id"][0]
        rpc.request.data = {name: [value] for name, value in {"id": number + 1, **usual, **question}.items()}
        assert rpc.response.data["id"] == [number + 1]
        return {name: values[0] for name, values in rpc.response.data.items()}

    return asked


def category(name: str) -> int:
    return CATEGORIES.index(name)


def test_every_size_on_the_curve_has_the_step_time_of_the_buckets_it_gives(forecast):
    curve = forecast.reference
    columns = build_curve_columns(curve, compute_size_range_mb(curve))
    middle = np.sqrt(columns["x"][0::2] * columns["x"][1::2])
    for x_mb, y_ns in zip(middle, columns["predicted"][0::2], strict=True):
        index = curve.index_of_cap(x_mb)
        assert y_ns == curve.predicted_ns[index]
        if x_mb * MB > curve.sizes[index].low_bytes:
            assert curve.plans[index] == fill_plan(forecast.gradients, [int(x_mb * MB)])
    assert (columns["low"] <= columns["predicted"]).all()
    assert (columns["predicted"] <= columns["high"]).all()
    assert columns["x"][0] == compute_size_range_mb(curve)[0]
    assert (np.diff(columns["x"]) >= 0).all()


def test_the_best_size_on_the_page_is_that_of_the_advice(forecast):
    curve, advice = forecast.reference, forecast.advice.recommendation
    assert curve.plans[curve.fastest] == advice.best.buckets
    assert curve.plans[curve.special["best"]] == advice.free.buckets
    marks = build_mark_columns(curve, compute_size_range_mb(curve))
    at = [text.startswith("best size") for text in marks["text"]].index(True)
    assert marks["y"][at] == advice.best.step_ns.value


def test_recorded_plans_are_points_beside_what_is_predicted_of_them(forecast):
    measured = build_measured_columns(forecast.reference)
    assert len(measured["x"]) > 2
    for x_mb, y_ns in zip(measured["x"], measured["y"], strict=True):
        index = forecast.reference.index_of_cap(x_mb)
        if x_mb != 25.0:
            assert y_ns == pytest.approx(forecast.reference.predicted_ns[index], rel=0.05)


def test_a_size_changes_the_predicted_step_and_leaves_the_recorded_one(plot, ask):
    ask(cap_mb=0.05)
    recorded, many = dict(plot.spans[0].data), dict(plot.spans[1].data)
    ask(cap_mb=100.0)
    assert len(plot.chosen.plan) == 1
    assert plot.spans[0].data == recorded
    assert len(plot.spans[1].data["left"]) < len(many["left"])
    assert set(plot.strip.data["bucket"].tolist()) == {0}
    assert plot.point.data["x"] == [100.0]


def test_the_predicted_step_of_the_recorded_plan_is_the_recorded_one(forecast):
    recorded = forecast.step.recorded
    predicted = replay_step(recorded.plan, forecast.step.work, forecast.fitted.costs)
    np.testing.assert_allclose(predicted.ready_ns, recorded.ready_ns, rtol=0.02)
    np.testing.assert_allclose(predicted.end_ns, recorded.end_ns, rtol=0.05)
    np.testing.assert_allclose(predicted.backward_end_ns, recorded.backward_end_ns, rtol=0.02)


def test_lanes_hold_backward_what_is_exposed_and_each_bucket(plot, forecast):
    step = plot.chosen.step
    spans = build_span_columns(step, [0], plot.layout, 1)
    exposed = spans["category"].index(category("exposed"))
    assert spans["left"][exposed] == step.backward_end_ns[0]
    assert spans["right"][exposed] == pytest.approx(step.end_ns[0].max())
    buckets_drawn = [each for each in spans["category"] if CATEGORIES[each].startswith("bucket")]
    assert len(buckets_drawn) == len(step.plan)
    assert min(spans["top"]) >= plot.layout.step_px
    assert max(spans["bottom"]) <= plot.layout.height_px


def test_the_strip_is_all_bytes_in_the_order_of_gradients(forecast):
    gradients, plan = forecast.gradients, forecast.reference.plans[0]
    strip = build_strip_columns(gradients, plan)
    np.testing.assert_array_equal(strip["right"] - strip["left"], gradients.bytes[gradients.order])
    assert strip["right"][-1] == gradients.total_bytes
    for index, number in enumerate(gradients.order.tolist()):
        assert number in plan[strip["bucket"][index]]


def test_arrows_go_from_partition_to_partition_and_stop_at_the_ends(forecast, plot, ask):
    sizes = forecast.reference.sizes
    ask(cap_mb=sizes[0].cap_mb)
    ask(cap_mb=plot.cap_mb, move=-1)
    assert plot.chosen.index == 0
    for index in range(1, len(sizes)):
        response = ask(cap_mb=plot.cap_mb, move=1)
        assert plot.chosen.index == index
        assert response["cap_mb"] == sizes[index].cap_mb
    ask(cap_mb=plot.cap_mb, move=1)
    assert plot.chosen.index == len(sizes) - 1


@pytest.mark.parametrize(
    ("question", "code"),
    [
        ({"cap_mb": 100.0}, "bucket_cap_mb=25"),
        ({"special": "default"}, "bucket_cap_mb=None"),
        ({"cap_mb": 100.0, "first_mb": 0.5}, "bucket_cap_mb_list=[0.5, 25]"),
        ({"cap_mb": 100.0, "is_compressed": True}, "fp16_compress_hook"),
        ({"special": "best"}, "bucket_cap_mb"),
    ],
)
def test_the_setting_to_copy_says_what_is_shown(ask, question, code):
    markup = ask(**question)["chosen"]
    setting = markup.partition('<code id="setting">')[2].partition("</code>")[0]
    assert code in setting


def test_the_list_of_the_best_plan_gives_the_best_plan(forecast):
    curve = forecast.reference
    index = curve.special["best"]
    code = curve.format_setting(index, "best")
    caps = [float(cap) for cap in code.partition("=")[2].strip("[]").split(",")]
    assert fill_plan(forecast.gradients, [int(cap * MB) for cap in caps]) == curve.plans[index]


def test_half_the_bytes_are_never_slower_and_the_gain_is_against_the_job_as_it_is(forecast):
    usual, compressed = forecast.reference, forecast.curve(Options(is_compressed=True)).result()
    for index, plan in enumerate(usual.plans):
        if plan in compressed.plans:
            assert compressed.predicted_ns[compressed.plans.index(plan)] <= usual.predicted_ns[index] + 1e-6
    assert compressed.compute_gain(0, usual).value > usual.compute_gain(0, usual).value
    assert usual.compute_gain(usual.special["present"], usual).value == 0
    assert not build_measured_columns(compressed)["x"]


def test_a_limit_of_the_first_bucket_splits_it_off(forecast, plot, ask):
    response = ask(cap_mb=100.0, first_mb=0.1)
    assert response["first_mb"] == 0.1
    assert len(plot.chosen.step.plan) == 2
    assert plot.chosen.step.bytes[0] < 0.1 * MB + forecast.gradients.bytes.max()


def test_pointing_reads_sizes_buckets_and_parameters(plot, ask):
    ask(cap_mb=0.5)

    def read(name: str, x: float, y: float = 0.0) -> tuple[str, dict[str, str]]:
        plot.pointed.data = {"id": [1], "plot": [name], "x": [x], "y": [y], "ns_per_px": [1.0]}
        tooltip = plot.tooltip.data
        return tooltip["title"][0], dict(zip(tooltip["label"], tooltip["value"], strict=True))

    title, rows = read("curve", 0.5)
    assert "0.5" in title or "MB" in title
    assert "90 % interval" in rows
    title, rows = read("strip", 1.0)
    assert title == "p0"
    assert rows["bucket"].startswith("0 of")
    step, layout = plot.chosen.step, plot.layout
    top, bottom = layout.lane_px(1, 1, "communication")
    title, rows = read("steps", float(step.start_ns[1, 0] + step.end_ns[1, 0]) / 2, (top + bottom) / 2)
    assert title.startswith("Bucket 0")
    assert rows["rank"] == "1"
    assert read("steps", 1.0, 1.0)[0] == ""


def test_of_many_ranks_those_that_differ_most_are_shown(forecast):
    recorded = forecast.step.recorded
    ends = np.array([5.0, 3.0, 9.0, 4.0, 8.0, 1.0, 7.0])
    many = replace(recorded, ranks=np.arange(7), backward_end_ns=ends)
    shown = select_ranks(many)
    assert len(shown) == 4
    assert {2, 5} <= set(shown)
    assert select_ranks(recorded) == [0, 1]


def test_the_address_says_what_is_chosen_and_nonsense_is_ignored():
    def choice(**arguments: str) -> BucketChoice:
        return buckets.parse_choice({name: [value.encode()] for name, value in arguments.items()})

    assert choice(cap_mb="5", first="1", compression="fp16") == BucketChoice(
        options=Options(first_mb=1.0, is_compressed=True), cap_mb=5.0
    )
    assert choice(plan="best").special == "best"
    for nonsense in ("nan", "-1", "0", "inf", "1e99", "five"):
        assert choice(cap_mb=nonsense, first=nonsense, plan=nonsense, compression=nonsense) == BucketChoice()


def test_the_page_begins_with_the_advice_and_shows_how_to_set_it(tmp_path: Path):
    snapshot = RecordingCache(write_recording(tmp_path / "traces", steps=30)).latest()
    snapshot.forecast.result()
    for route in ("/buckets", "/plots/buckets"):
        document = Document()
        ROUTES[route](document, snapshot, {"cap_mb": [b"2.5"]})
        page = words(document)
        assert '<code id="setting">bucket_cap_mb=2</code>' in page
        assert ("it hardly matters here" in page) == (route == "/buckets")


def test_until_the_model_is_there_the_page_says_so_and_comes_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("dashboards.forecast._PATIENCE_S", 0.0)
    snapshot = RecordingCache(write_recording(tmp_path / "traces", steps=30)).latest()
    document = Document()
    buckets.build(document, snapshot, {})
    assert "Computing" in words(document)
    snapshot.forecast.result()


def test_a_calibration_that_is_made_later_is_taken_up(tmp_path: Path):
    shown = RecordingCache(write_recording(tmp_path / "traces", steps=12))
    assert not shown.latest().forecast.result(60).advice.is_calibrated
    assert shown.latest() is shown.latest()
    calibrated(tmp_path / "traces")
    assert shown.latest().forecast.result(60).advice.is_calibrated


def test_the_ends_of_a_narrow_band_read_differently():
    size = UniformPlan(buckets=((0,),), low_bytes=10_083_000, high_bytes=10_084_000)
    assert format_caps(size) == "Sizes above 9.616 MB, up to 9.617 MB"


def test_a_prediction_is_a_breakdown_of_the_same_step_and_sums_to_it(tmp_path: Path) -> None:
    analysis = Analysis(read_trace(write_recording(tmp_path, steps=20)))
    curve = advise(analysis).recommendation.curve
    mean = analysis.summary.mean
    for place in range(len(curve.plans)):
        predicted = predict_mean_step(mean, curve, place)
        assert sum(each.value for each in predicted.blocks.values()) == pytest.approx(predicted.step.value)
        assert {"backward", "bucket_copies", "exposed"} >= {
            name for name, each in predicted.blocks.items() if each != mean.blocks[name]
        }
    now = predict_mean_step(mean, curve, curve.special["present"])
    assert {name: each.value for name, each in now.blocks.items()} == pytest.approx(
        {name: each.value for name, each in mean.blocks.items()}
    )
