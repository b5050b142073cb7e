"""What is said of runs whose times are known: a gain is set if it is beyond noise, and a tie keeps what there is."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from overlapscope.interval import Interval
from overlapscope.trace.ddp_trial import DDPSetting
from overlapscope.tuning import text
from overlapscope.tuning.candidates import Choice, OwnSettings
from overlapscope.tuning.verdict import (
    Run,
    Trained,
    TuningOutcome,
    decide,
    find_fastest,
    find_favorite,
    measure_gain,
    needs_another_pair,
)

BASE_NS = 100e6
SIZE = DDPSetting(caps_mb=(10.0,))
VIEWS = DDPSetting(caps_mb=(10.0,), bucket_views=True)
PREDICTED = Interval(value=0.04, low=-0.01, high=0.08)


def trained(setting: DDPSetting, *runs: tuple[int, float], noise: float = 0.02) -> Trained:
    """A setting whose runs, by number, had these mean steps, in shares of the base's."""
    predicted = None if setting == DDPSetting() else PREDICTED
    steps_ns = (
        (number, share * BASE_NS * (1 + noise * np.random.default_rng(number).standard_normal(100)))
        for number, share in runs
    )
    return Trained(setting=setting, predicted=predicted, runs=tuple(Run(number=n, steps_ns=ns) for n, ns in steps_ns))


def test_two_pairs_that_agree_set_what_is_faster() -> None:
    base, new = trained(DDPSetting(), (1, 1.0), (4, 1.0)), trained(SIZE, (2, 0.95), (3, 0.95))
    measured = measure_gain(base, new)
    assert measured.gain.value == pytest.approx(0.05, abs=0.006)
    assert 0.03 < measured.gain.low < 0.05 < measured.gain.high < 0.07
    assert measured.pairs == 2
    outcome = decide(base, [new])
    assert (outcome.verdict, outcome.best) == ("set", new)


def test_one_pair_is_never_enough() -> None:
    base, new = trained(DDPSetting(), (1, 1.0)), trained(SIZE, (2, 0.9))
    assert find_favorite(base, [new]) is new
    assert needs_another_pair(base, new)
    assert decide(base, [new]).verdict == "keep: unsure"


def test_pairs_that_differ_are_less_sure_than_pairs_that_agree() -> None:
    base = trained(DDPSetting(), (1, 1.0), (4, 1.0))
    agree, differ = trained(SIZE, (2, 0.95), (3, 0.95)), trained(SIZE, (2, 0.90), (3, 1.0))
    assert measure_gain(base, agree).is_faster
    assert not measure_gain(base, differ).is_faster
    assert decide(base, [differ]).verdict == "keep: unsure"


def test_a_run_is_paired_with_the_nearest_of_the_base() -> None:
    """The machine got slower by a tenth from the fourth run on, which is no difference between settings."""
    base, new = trained(DDPSetting(), (1, 1.0), (5, 1.1), noise=0.001), trained(SIZE, (2, 1.0), (4, 1.1), noise=0.001)
    assert measure_gain(base, new).gain.value == pytest.approx(0.0, abs=0.001)


def test_runs_stop_once_nothing_can_gain_a_percent() -> None:
    base = trained(DDPSetting(), (1, 1.0))
    slower = trained(SIZE, (2, 1.06))
    assert find_favorite(base, [slower]) is None
    outcome = decide(base, [slower])
    assert (outcome.verdict, outcome.best) == ("keep: no gain", slower)


def test_the_fastest_is_run_again_until_it_is_sure_or_was_run_often() -> None:
    base, new = trained(DDPSetting(), (1, 1.0), (4, 1.0)), trained(SIZE, (2, 0.995), (3, 0.995))
    assert needs_another_pair(base, new)  # its gain may be 1 %
    base = trained(DDPSetting(), (1, 1.0), (4, 1.0), (6, 1.0), (8, 1.0))
    assert not needs_another_pair(base, trained(SIZE, (2, 0.995), (3, 0.995), (5, 0.995), (7, 0.995)))
    base, sure = trained(DDPSetting(), (1, 1.0), (4, 1.0)), trained(SIZE, (2, 0.95), (3, 0.95))
    assert not needs_another_pair(base, sure)


def test_a_setting_that_was_run_again_is_believed_over_one_that_was_not() -> None:
    base = trained(DDPSetting(), (1, 1.0), (5, 1.0))
    once, twice = trained(VIEWS, (2, 0.93)), trained(SIZE, (3, 0.94), (4, 0.94))
    assert decide(base, [once, twice]).best is twice


def test_what_is_added_is_added_to_the_fastest_so_far() -> None:
    base = trained(DDPSetting(), (1, 1.0))
    slower, faster = trained(SIZE, (2, 1.05)), trained(VIEWS, (3, 0.97))
    failed = Trained(setting=SIZE, predicted=PREDICTED, failure="Rank 0 failed")
    assert find_fastest(base, [slower, failed]) is base
    assert find_fastest(base, [slower, faster]) is faster


def test_what_failed_is_left_out() -> None:
    base = trained(DDPSetting(), (1, 1.0))
    failed = Trained(setting=SIZE, predicted=PREDICTED, failure="Rank 0 failed")
    assert find_favorite(base, [failed]) is None
    assert decide(base, [failed]).best is None


def test_sentences(golden: Callable[[str, str], None]) -> None:
    own = OwnSettings(arguments={"bucket_cap_mb": 50}, given=frozenset(), torch_version=(2, 13), compression="fp16")
    choice = Choice(sizes=(), additions=(), reachable=0.2, kept=("views: on", "compression: not allowed"), own=own)
    base = trained(DDPSetting(), (1, 1.0), (4, 1.0), noise=0)
    faster = trained(
        DDPSetting(caps_mb=(1.0, 25.0), bucket_views=True, compression="bf16"), (2, 0.9), (3, 0.9), noise=0
    )
    same, slower = trained(SIZE, (2, 0.995), (3, 0.995), noise=0), trained(DDPSetting(caps_mb=()), (2, 1.06), noise=0)
    said = [text.describe_own_settings(choice), *text.describe_kept(choice)]
    for tried in ([faster], [same], [slower], []):
        said += [text.format_outcome(decide(base, tried), choice)]
    nothing = TuningOutcome(verdict="keep: hopeless", best=None, gain=None)
    said.append(text.format_outcome(nothing, Choice(sizes=(), additions=(), reachable=0.004, kept=(), own=own)))
    said += [text.format_code(faster.setting), text.describe_prediction(PREDICTED)]
    golden("sentences/tune", "\n".join(said))
