"""Which settings are run: those that the model finds promising, none that the script has decided on, or none at all."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from overlapscope.advice.advice import Advice, advise
from overlapscope.analysis import Analysis
from overlapscope.bucket_model.search import MIN_GAIN
from overlapscope.interval import Interval
from overlapscope.trace.ddp_trial import DDPSetting, Trial, read_trial
from overlapscope.trace.recording import read_trace
from overlapscope.tuning.candidates import (
    Addition,
    Choice,
    OwnSettings,
    choose_candidates,
    compute_reachable_gain,
)
from tests.synthetic import write_recording

NO_GAIN = Interval(value=0.0, low=0.0, high=0.0)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> tuple[Analysis, Advice]:
    analysis = Analysis(read_trace(write_recording(tmp_path_factory.mktemp("own") / "traces", ranks=2, steps=30)))
    return analysis, advise(analysis)


def choose(
    recorded: tuple[Analysis, Advice], arguments: dict[str, object], given: list[str], *, compression: bool = False
) -> Choice:
    """What is chosen of a model that was made with these arguments, of which the script has given some."""
    analysis, advice = recorded
    model = {"model": 0, "class": "Net", "ddp_arguments": arguments, "trial": {"given": given}}
    analysis = Analysis(replace(analysis.trace, run={**analysis.trace.run, "models": [model]}))
    return choose_candidates(analysis, advice, allows_compression=compression)


def settings_of(choice: Choice) -> list[DDPSetting]:
    """All that may be run, additions by themselves."""
    alone = [addition.on(DDPSetting(), NO_GAIN).setting for addition in choice.additions]
    return [*(size.setting for size in choice.sizes), *alone]


def test_promising_settings_are_run_the_most_promising_size_first(recorded: tuple[Analysis, Advice]) -> None:
    choice = choose(recorded, {}, [], compression=True)
    gains = [each.gain.value for each in choice.sizes]
    assert 0 < len(gains) <= 3
    assert gains == sorted(gains, reverse=True)
    assert all(size.gain.high >= MIN_GAIN for size in choice.sizes)
    assert all(addition.gain.high >= MIN_GAIN for addition in choice.additions)
    settings = settings_of(choice)
    assert len(set(settings)) == len(settings)
    assert DDPSetting() not in settings
    assert settings[-1].compression == "fp16"  # gloo has no hook for bf16


def test_an_addition_is_run_on_top_of_a_setting() -> None:
    size = DDPSetting(caps_mb=(8.0,))
    views = Addition(kind="views", gain=Interval(value=0.02, low=0.0, high=0.03))
    added = views.on(size, Interval(value=0.05, low=-0.01, high=0.1))
    assert added.setting == DDPSetting(caps_mb=(8.0,), bucket_views=True)
    assert added.gain.value == pytest.approx(0.07)
    half = Addition(kind="compression", gain=NO_GAIN, compression="bf16")
    assert half.on(added.setting, NO_GAIN).setting == replace(added.setting, compression="bf16")


@pytest.mark.parametrize(
    ("arguments", "given", "kept"),
    [
        ({"bucket_cap_mb": "auto"}, [], "sizes: auto"),
        ({"bucket_plan": "plan.json"}, [], "sizes: plan"),
        ({"strategy": "ring"}, [], "sizes: strategy"),
        ({"gradient_as_bucket_view": True}, [], "views: on"),
        ({"gradient_as_bucket_view": False}, ["gradient_as_bucket_view"], "views: given"),
    ],
)
def test_what_the_script_decides_stays(
    recorded: tuple[Analysis, Advice], arguments: dict[str, object], given: list[str], kept: str
) -> None:
    choice = choose(recorded, arguments, given)
    assert set(choice.kept) == {kept, "compression: not allowed"}
    for setting in settings_of(choice):
        assert not setting.compression
        assert setting.caps_mb is None or not kept.startswith("sizes")
        assert not setting.bucket_views or not kept.startswith("views")


def test_a_size_of_the_script_is_named_and_others_are_tried(recorded: tuple[Analysis, Advice]) -> None:
    choice = choose(recorded, {"bucket_cap_mb": 50}, ["bucket_cap_mb"])
    assert choice.own.sizes == {"bucket_cap_mb": 50}
    assert choice.sizes


def test_no_setting_gains_more_than_exposed_communication_and_copies(recorded: tuple[Analysis, Advice]) -> None:
    analysis, _ = recorded
    summary = analysis.summary
    step = summary.mean.step.value
    blocks = {**summary.mean.blocks, "exposed": _exactly(0.03 * step)}
    exposed = replace(summary, mean=replace(summary.mean, blocks=blocks))
    waits = {**summary.exposed_for, "straggler": NO_GAIN}
    assert compute_reachable_gain(replace(exposed, exposed_for=waits), copies=0.02) == pytest.approx(0.05)
    waits["straggler"] = _exactly(0.025 * step)  # which is as long with any buckets
    bound = compute_reachable_gain(replace(exposed, exposed_for=waits), copies=0.0)
    assert bound == pytest.approx(0.005)
    assert not choose(recorded, {}, []).is_hopeless
    assert replace(choose(recorded, {}, []), reachable=bound).is_hopeless


def _exactly(value: float) -> Interval:
    return Interval(value=value, low=math.nextafter(value, -1), high=math.nextafter(value, math.inf))


def test_nothing_promising_is_hopeless(recorded: tuple[Analysis, Advice]) -> None:
    choice = choose(recorded, {"bucket_cap_mb": "auto", "gradient_as_bucket_view": True}, [])
    assert not settings_of(choice)
    assert choice.is_hopeless


def test_a_setting_replaces_what_it_names_and_leaves_the_rest() -> None:
    given = {"bucket_cap_mb_list": [1, 2], "gradient_as_bucket_view": False, "static_graph": True}
    DDPSetting().change(given)
    assert given == {"bucket_cap_mb_list": [1, 2], "gradient_as_bucket_view": False, "static_graph": True}
    DDPSetting(caps_mb=(8.0,), bucket_views=True).change(given)
    assert given == {"bucket_cap_mb": 8.0, "gradient_as_bucket_view": True, "static_graph": True}
    DDPSetting(caps_mb=(1.0, 8.0)).change(given)
    assert given["bucket_cap_mb_list"] == [1.0, 8.0]
    assert "bucket_cap_mb" not in given
    DDPSetting(caps_mb=()).change(given)
    assert set(given) == {"gradient_as_bucket_view", "static_graph"}


@pytest.mark.parametrize("caps_mb", [None, (), (2.5,), (1.0, 25.0)])
def test_the_environment_carries_a_trial(caps_mb: tuple[float, ...] | None) -> None:
    trial = Trial(setting=DDPSetting(caps_mb=caps_mb, bucket_views=True, compression="fp16"), calibrates=True)
    assert read_trial(trial.to_environment()) == trial
    assert read_trial({}) is None


def test_which_torch_has_lists_of_caps_is_read(recorded: tuple[Analysis, Advice]) -> None:
    trace = recorded[0].trace
    versions = {"torch": "2.13.0+cpu"}
    own = OwnSettings.of(replace(trace, run={**trace.run, "versions": versions, "backend": "nccl"}))
    assert own.torch_version == (2, 13)
    assert own.compression == "bf16"
