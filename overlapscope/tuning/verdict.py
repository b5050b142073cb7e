"""What the runs have shown: measured gains, when to stop, and what to set."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal

import numpy as np

from overlapscope.breakdown.spans import Float64Array
from overlapscope.bucket_model.search import MIN_GAIN
from overlapscope.compare.changes import BETWEEN_RUN_SHARE, Change, TimeDifference, compare_series
from overlapscope.compare.side import STEP
from overlapscope.interval import Interval
from overlapscope.trace.ddp_trial import DDPSetting

_MIN_PAIRS: Final = 2
"""Number of pairs of runs that a setting is advised by; the fastest of several is so partly by chance."""
_MAX_PAIRS: Final = 4
"""Number of times that the script's own settings are run at most."""

Verdict = Literal["set", "keep: hopeless", "keep: no gain", "keep: unsure"]
"""What to do. ``keep: hopeless``: nothing was worth a run. ``keep: no gain``: what was run gains less than 1 %, surely.
``keep: unsure``: it may gain more, but the runs don't show it."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Run:
    """One run of the training."""

    number: int
    """Number of the run among all, from 1 in their order."""
    steps_ns: Float64Array
    """(S,) steady steps, means over ranks."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Trained:
    """The runs of one setting."""

    setting: DDPSetting
    predicted: Interval | None
    """Predicted gain; None of the script's own settings."""
    runs: tuple[Run, ...] = ()
    failure: str = ""
    """Why its run gave no steps, if it did not."""

    @property
    def steps(self) -> int:
        """Return the number of steps of all runs."""
        return sum(len(run.steps_ns) for run in self.runs)

    def with_run(self, run: Run) -> Trained:
        """Add one more run."""
        return replace(self, runs=(*self.runs, run))


@dataclass(frozen=True, kw_only=True)
class MeasuredGain:
    """Measured difference between two settings."""

    base_ns: float
    new_ns: float
    gain: Interval
    """Share of the base's step that is saved, with its 99 % interval."""
    pairs: int
    """Number of pairs of runs that it is measured by."""

    @property
    def is_faster(self) -> bool:
        """Return True if the gain is beyond noise."""
        return self.gain.low > 0


def measure_gain(base: Trained, new: Trained) -> MeasuredGain:
    """Measure the gain of one setting over another, from pairs of runs as ``compare`` takes them.

    Each run is compared with the nearest one of the base, as ``overlapscope compare`` does, with what two runs of the
    same program differ by. The mean of several pairs is surer than one; the difference between pairs shows whether runs
    differ by more than that.
    """
    changes = [
        compare_series({STEP: one.steps_ns}, {STEP: other.steps_ns}, between_run_share=BETWEEN_RUN_SHARE)[STEP]
        for one, other in _pair(base.runs, new.runs)
    ]
    change = Change(mean=_mean_of([each.mean for each in changes]), middle=_mean_of([each.middle for each in changes]))
    shown = change.most_significant
    longer = shown.ns.times(1 / shown.base)
    return MeasuredGain(
        base_ns=shown.base,
        new_ns=shown.new,
        gain=Interval(value=-longer.value, low=-longer.high, high=-longer.low),
        pairs=len(changes),
    )


def _pair(base: Sequence[Run], new: Sequence[Run]) -> list[tuple[Run, Run]]:
    """Pair each run with the nearest one of the base that is in no other pair, the latest first."""
    free = list(base)
    pairs = []
    for run in reversed(new[-len(base) :]):
        nearest = min(free, key=lambda other: abs(other.number - run.number))
        free.remove(nearest)
        pairs.append((nearest, run))
    return pairs


def _mean_of(pairs: Sequence[TimeDifference]) -> TimeDifference:
    """Return the mean difference of pairs of runs, whose errors are independent."""
    count = len(pairs)
    values = np.array([each.noise.value for each in pairs])
    value = float(values.mean())
    low, high = (
        float(np.sqrt(np.sum([(edge(each.noise) - each.noise.value) ** 2 for each in pairs]))) / count
        for edge in (lambda noise: noise.low, lambda noise: noise.high)
    )
    scatter_ns = float(values.std(ddof=1)) if count > 1 else 0.0
    between_ns = max(scatter_ns, float(np.mean([each.between_run_ns for each in pairs])))
    return TimeDifference(
        base=float(np.mean([each.base for each in pairs])),
        new=float(np.mean([each.new for each in pairs])),
        noise=Interval(value=value, low=value - low, high=value + high),
        between_run_ns=between_ns / math.sqrt(count),
    )


@dataclass(frozen=True, eq=False, kw_only=True)
class TuningOutcome:
    """Result of all runs."""

    verdict: Verdict
    best: Trained | None
    """Setting that was measured to be the fastest of those tried; None if none was run to its end."""
    gain: MeasuredGain | None
    """Its gain."""


def find_fastest(base: Trained, tried: Sequence[Trained]) -> Trained:
    """Return the fastest of the settings so far, the script's own if none is faster, as far as is measured."""
    return max((base, *(each for each in tried if each.runs)), key=lambda each: measure_gain(base, each).gain.value)


def find_favorite(base: Trained, tried: Sequence[Trained]) -> Trained | None:
    """Return the fastest of the tried settings; None if no setting can gain 1 %, as far as is measured."""
    favorite = find_fastest(base, tried)
    return favorite if favorite is not base and measure_gain(base, favorite).gain.high >= MIN_GAIN else None


def needs_another_pair(base: Trained, favorite: Trained) -> bool:
    """Return whether the favorite and the script's own settings are to be run once more."""
    measured = measure_gain(base, favorite)
    is_open = measured.pairs < _MIN_PAIRS or not measured.is_faster
    return is_open and len(base.runs) < _MAX_PAIRS


def decide(base: Trained, tried: Sequence[Trained]) -> TuningOutcome:
    """Decide what to set after all runs."""
    measured = [(measure_gain(base, each), each) for each in tried if each.runs]
    if not measured:
        return TuningOutcome(verdict="keep: hopeless", best=None, gain=None)
    # A setting that was run again is surer than one that was not, which it was chosen over.
    gain, best = max(measured, key=lambda pair: (pair[0].pairs, pair[0].gain.value))
    if gain.is_faster and gain.pairs >= _MIN_PAIRS:
        return TuningOutcome(verdict="set", best=best, gain=gain)
    verdict: Verdict = "keep: unsure" if gain.gain.high >= MIN_GAIN else "keep: no gain"
    return TuningOutcome(verdict=verdict, best=best, gain=gain)
