"""Step-time predictions for other buckets, computed in the background, once for each snapshot and setting."""

from __future__ import annotations

import math
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Final, TypeVar

from overlapscope.advice.advice import Advice, advise
from overlapscope.analysis import Analysis
from overlapscope.breakdown.means import MeanStep
from overlapscope.bucket_model.partition import Buckets, Gradients
from overlapscope.bucket_model.prediction import Curve, Options, Special, predict_curve
from overlapscope.bucket_model.schedule import DrawnStep, replay_step
from overlapscope.bucket_model.search import find_best_plan
from overlapscope.bucket_model.typical_step import find_typical_step
from overlapscope.errors import OverlapScopeError
from overlapscope.interval import Interval

_EXECUTOR: Final = ThreadPoolExecutor(max_workers=1, thread_name_prefix="forecast")
"""Background thread for fits and predictions, which take longer than a page may take to load."""


_PATIENCE_S: Final = 0.5
"""Seconds to wait for a result; after that, the browser polls."""

Awaited = TypeVar("Awaited")


def soon(future: Future[Awaited]) -> Awaited | None:
    """Return the result if it is ready within a short wait; else None."""
    try:
        return future.result(_PATIENCE_S)
    except TimeoutError:
        return None


def is_forecast_ready(forecast: Future[Forecast], options: Options) -> bool:
    """Return whether the curve for some options, or the error instead of it, is ready within a short wait."""
    try:
        made = soon(forecast)
        return made is not None and soon(made.curve(options)) is not None
    except OverlapScopeError:
        return True


@dataclass(frozen=True, kw_only=True)
class BucketChoice:
    """The choice of the user."""

    options: Options = field(default_factory=Options)
    cap_mb: float | None = None
    """A bucket size; the best one if not given."""
    special: Special | None = None
    """A plan instead of a size, which possibly no size gives."""


@dataclass(frozen=True, kw_only=True)
class ChosenPlan:
    """A choice and the resulting plan."""

    choice: BucketChoice
    curve: Curve
    index: int
    """Index of the plan on the curve."""
    step: DrawnStep
    """The typical step with this plan."""

    @property
    def plan(self) -> Buckets:
        """Return the buckets of the plan."""
        return self.curve.plans[self.index]


class Forecast:
    """The performance model of a recording, and the curves predicted by it.

    Args:
        advice: recommendation for the recording, with the fitted model.
    """

    def __init__(self, advice: Advice) -> None:
        self.advice = advice
        self.fitted = advice.fitted
        self._curves: dict[Options, Future[Curve]] = {}
        self.reference = advice.recommendation.curve
        """Curve of the job as it is, with default options."""
        self.step = find_typical_step(self.fitted, advice.recommendation.now.buckets)

    @classmethod
    def soon(cls, analysis: Analysis) -> Future[Forecast]:
        """Compute a forecast in the background; the future raises OverlapScopeError if nothing can be predicted."""
        return _EXECUTOR.submit(lambda: cls(advise(analysis)))

    @property
    def gradients(self) -> Gradients:
        """Return the gradients that are reduced."""
        return self.fitted.work.gradients

    def choose(self, choice: BucketChoice) -> Future[ChosenPlan]:
        """Return the plan of a choice, computed in the background if its curve is."""
        curve = self.curve(choice.options)
        if not curve.done():
            return _EXECUTOR.submit(lambda: self._choose(choice, curve.result()))  # after the curve
        chosen: Future[ChosenPlan] = Future()
        chosen.set_result(self._choose(choice, curve.result()))
        return chosen

    def curve(self, options: Options) -> Future[Curve]:
        """Return the curve for some options, computed in the background if not cached."""
        if options == self.reference.options:
            known: Future[Curve] = Future()
            known.set_result(self.reference)
            return known
        if options not in self._curves:
            self._curves[options] = _EXECUTOR.submit(self._curve, options)
        return self._curves[options]

    def _choose(self, choice: BucketChoice, curve: Curve) -> ChosenPlan:
        """Resolve a choice: by default the best size, or DDP's default if no size is better."""
        if choice.special is None and choice.cap_mb is None and curve.is_default_best:
            choice = replace(choice, special="default")
        index = curve.fastest if choice.cap_mb is None else curve.index_of_cap(choice.cap_mb)
        if choice.special is not None:
            index = curve.special[choice.special]
        step = replay_step(curve.plans[index], self.step.work, choice.options.apply_to(self.fitted.costs))
        return ChosenPlan(choice=choice, curve=curve, index=index, step=step)

    def _curve(self, options: Options) -> Curve:
        advice, fitted = self.advice.recommendation, self.fitted
        best = advice.free.buckets  # independent of a limit of the first bucket
        if options.is_compressed:
            best = find_best_plan(fitted.work, options.apply_to(fitted.costs))
        specials: dict[Special, Buckets] = {
            "present": advice.now.buckets,
            "default": advice.default.buckets,
            "best": best,
        }
        return predict_curve(fitted, options, specials, advice.curve.measured)


def predict_mean_step(mean: MeanStep, curve: Curve, index: int) -> MeanStep:
    """Return the breakdown of a predicted step.

    Args:
        mean: mean of the measured steps.
        index: index of the plan on the curve.
    """
    predicted = curve.predicted
    copies_ns = mean.blocks["bucket_copies"].value + float(predicted.copies_ns[index])
    backward_ns = mean.blocks["backward"].value + float(predicted.backward_ns[index])
    changed_ns = {
        "backward": backward_ns + min(copies_ns, 0.0),  # copies can't take less than no time
        "bucket_copies": max(copies_ns, 0.0),
        "exposed": float(predicted.exposed_ns[index]),
    }
    changed = {name: Interval(value=ns, low=math.nan, high=math.nan) for name, ns in changed_ns.items()}
    return MeanStep(step=curve.step_of(index), blocks={**mean.blocks, **changed})
