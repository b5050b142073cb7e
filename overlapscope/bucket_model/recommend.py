"""The recommendation: which bucket size to set, what it gains, how certain that is, and when to keep the old one."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final, Literal

import numpy as np

from overlapscope.bucket_model.fit import FittedModel
from overlapscope.bucket_model.partition import MB, NO_LIMIT, Buckets, Gradients
from overlapscope.bucket_model.plans import UniformPlan, find_caps_mb
from overlapscope.bucket_model.prediction import Curve, MeasuredSteps, Options, predict_curve
from overlapscope.bucket_model.schedule import replay
from overlapscope.bucket_model.search import MIN_GAIN, PredictedSizes, find_best_plan, predict_sizes
from overlapscope.bucket_model.what_if import Limits, WhatIf, find_limits, predict_changes
from overlapscope.interval import Interval

Verdict = Literal["change", "leave it", "can't tell"]
MissingMeasurement = Literal["sizes", "compute slowdown", "lane slowdown"]

_MIN_GAIN_TO_INVESTIGATE: Final = 0.05
"""Possible gain above which more measurements are worthwhile if no gain is certain."""
_GOOD_SHARE: Final = 0.01
_SIZES_SHOWN: Final = 14


@dataclass(frozen=True, eq=False, kw_only=True)
class Prediction:
    """Prediction for one bucket plan."""

    buckets: Buckets
    cap_mb: float | None
    """Round ``bucket_cap_mb`` that gives this plan; None if there is none, or only DDP's default gives it."""
    low_mb: float | None
    """Lower end of the caps that give these buckets, exclusive."""
    high_mb: float | None
    """Upper end of the caps that give these buckets; infinite if every larger cap does."""
    is_default: bool
    """True if this is DDP's default."""
    step_ns: Interval
    exposed_ns: float
    """Exposed communication of the predicted step."""
    recorded_ns: Interval | None
    """Mean of the steps that were recorded with this plan."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Recommendation:
    """Recommendation for one job. Gains are shares of the step time before the change."""

    verdict: Verdict
    """Verdict. ``leave it``: almost nothing can be gained. ``can't tell``: the gain may be large, but is uncertain."""
    size_arguments: str
    """Arguments of DistributedDataParallel by which the job sets bucket sizes, as code; empty if it sets none."""
    curve: Curve
    """Predictions for all sizes, from which the other predictions are taken."""
    now: Prediction
    """Active plan at the end of the recording."""
    default: Prediction
    best: Prediction
    """Best plan that a single size can express, of those with two digits; DDP's default if none gains 1 % over that."""
    good_from_mb: float | None
    """Lower end of the caps predicted to be within 1 % of the best, exclusive."""
    good_to_mb: float | None
    gain: Interval
    """Gain of the best size over the present plan."""
    gain_over_default: Interval
    free: Prediction
    """Best plan of all, with buckets of any sizes; it may be the plan of a single size."""
    free_gain: Interval
    """Gain of the best plan of all over the best size."""
    free_bucket_mb: tuple[float, ...]
    """Bucket sizes of ``free``, in MB."""
    free_caps_mb: tuple[float, ...] | None
    """The plan ``free`` as torch's ``bucket_cap_mb_list``, if that can express it."""
    sizes: tuple[Prediction, ...]
    """Some sizes to show, small ones first."""
    limits: Limits
    """Limits of the step with the best size."""
    what_ifs: tuple[WhatIf, ...]
    missing: tuple[MissingMeasurement, ...]
    """Measurements that would make the recommendation more certain."""
    world_size: int
    hosts: int
    """Number of hosts that the ranks run on: were all-reduces measured within one or between several?"""

    @property
    def has_choice(self) -> bool:
        """Return True if the size makes any difference; a model of few parameters may have one plan for all sizes."""
        return len(self.free.buckets) > 1 or len({size.buckets for size in self.sizes}) > 1

    @property
    def hardly_matters(self) -> bool:
        """Return True if the best size surely gains and loses little, compared with the present plan."""
        return self.gain.low > -_MIN_GAIN_TO_INVESTIGATE and self.gain.high < _MIN_GAIN_TO_INVESTIGATE

    @property
    def is_free_faster(self) -> bool:
        """Return True if buckets of different sizes are predicted to gain something over the best size.

        The best of many predictions is too optimistic by chance, so a gain smaller than an error doesn't count.
        """
        return self.free.buckets != self.best.buckets and self.free_gain.value >= MIN_GAIN


def recommend(
    fitted: FittedModel,
    in_force: Buckets | None = None,
    hosts: int = 1,
    measured: MeasuredSteps | None = None,
    gain_if_equal_ranks: float = math.nan,
    size_arguments: str = "",
) -> Recommendation:
    """Compare all sizes, search for the best plan, and decide what to recommend.

    Args:
        in_force: Present plan; that of the last recorded step if not given.
        hosts: Number of hosts that the ranks run on.
        measured: Mean steps as recorded, if known.
        gain_if_equal_ranks: Share by which the step would be shorter if all ranks were equally fast; NaN if unknown.
        size_arguments: Arguments by which the job sets bucket sizes, as code.
    """
    observations, gradients = fitted.observations, fitted.work.gradients
    in_force = in_force or observations.plans[int(observations.plan[-1])]
    sizes = predict_sizes(fitted.work, fitted.costs)
    default = sizes.default
    free = find_best_plan(fitted.work, fitted.costs, also=[sizes.best.buckets, in_force])
    curve = predict_curve(
        fitted, Options(), {"present": in_force, "default": default.buckets, "best": free}, measured, sizes
    )
    best = default if curve.is_default_best else curve.sizes[curve.fastest]
    predictions = _Predictions(curve, default)
    now, advised = predictions.of(in_force), predictions.of_size(best)
    gain = curve.compute_gain(curve.plans.index(best.buckets), curve)
    good_from, good_to = _good_range(sizes, best)
    exposed = advised.exposed_ns / advised.step_ns.value
    return Recommendation(
        verdict=decide(gain, is_same=best.buckets == in_force),
        size_arguments=size_arguments,
        curve=curve,
        now=now,
        default=predictions.of_size(default),
        best=advised,
        good_from_mb=good_from,
        good_to_mb=good_to,
        gain=gain,
        gain_over_default=curve.compute_gain_between(best.buckets, default.buckets),
        free=predictions.of(free),
        free_gain=curve.compute_gain_between(free, best.buckets),
        free_bucket_mb=tuple(float(gradients.bytes[list(bucket)].sum()) / MB for bucket in free),
        free_caps_mb=_caps(free, gradients),
        sizes=tuple(predictions.of_size(size) for size in _select_sizes(curve, best)),
        limits=find_limits(best.buckets, fitted.work, fitted.costs, gain_if_equal_ranks, exposed),
        what_ifs=predict_changes(sizes, in_force, fitted.work, fitted.costs, measured),
        missing=tuple(_find_missing_measurements(best.buckets, fitted)),
        world_size=observations.world_size,
        hosts=hosts,
    )


class _Predictions:
    """Predictions of a curve, by plan."""

    def __init__(self, curve: Curve, default: UniformPlan) -> None:
        self._curve = curve
        self._size_of = {size.buckets: size for size in (default, *reversed(curve.sizes))}
        self._measured = curve.measured_steps_ns()

    def of_size(self, size: UniformPlan) -> Prediction:
        return self._prediction(size.buckets, size)

    def of(self, plan: Buckets) -> Prediction:
        return self._prediction(plan, self._size_of.get(plan))

    def _prediction(self, plan: Buckets, size: UniformPlan | None) -> Prediction:
        index = self._curve.plans.index(plan)
        low, high = _bounds(size)
        return Prediction(
            buckets=plan,
            cap_mb=size.cap_mb if size is not None and not size.is_default else None,
            low_mb=low,
            high_mb=high,
            is_default=size is not None and size.is_default,
            step_ns=self._curve.step_of(index),
            exposed_ns=float(self._curve.predicted.exposed_ns[index]),
            recorded_ns=self._measured.get(index),
        )


def decide(gain: Interval, *, is_same: bool) -> Verdict:
    """Decide whether to change the plan.

    Args:
        gain: Gain of the best size over the present plan.
        is_same: True if the present plan is the best.
    """
    if is_same:
        return "leave it"
    if gain.low > 0:  # surely slower is not worth keeping, by however little
        return "change"
    return "can't tell" if gain.high >= _MIN_GAIN_TO_INVESTIGATE and gain.value > 0 else "leave it"


def _good_range(sizes: PredictedSizes, best: UniformPlan) -> tuple[float | None, float | None]:
    """Find the caps around the best one that are within 1 % of it."""
    if best.is_default:
        return None, None
    first = last = sizes.fastest
    good = sizes.sizes_ns <= sizes.sizes_ns[first] * (1 + _GOOD_SHARE)
    while first > 0 and good[first - 1]:
        first -= 1
    while last < len(good) - 1 and good[last + 1]:
        last += 1
    return _bounds(sizes.sizes[first])[0], _bounds(sizes.sizes[last])[1]


def _bounds(size: UniformPlan | None) -> tuple[float | None, float | None]:
    if size is None or size.is_default:
        return None, None
    return size.low_bytes / MB, float("inf") if size.high_bytes == NO_LIMIT else size.high_bytes / MB


def _select_sizes(curve: Curve, best: UniformPlan) -> list[UniformPlan]:
    """Select sizes that are evenly spread over all of them, and the best one."""
    spread = np.linspace(0, len(curve.sizes) - 1, _SIZES_SHOWN).round().astype(np.int64)
    return [size for index, size in enumerate(curve.sizes) if index in spread or size.buckets == best.buckets]


def _caps(plan: Buckets, gradients: Gradients) -> tuple[float, ...] | None:
    caps = find_caps_mb(plan, gradients)
    return None if caps is None else tuple(caps)


def _find_missing_measurements(best: Buckets, fitted: FittedModel) -> Iterator[MissingMeasurement]:
    if not fitted.costs.collective.is_identifiable:
        yield "sizes"
    if not fitted.compute_slowdown.is_known:
        yield "compute slowdown"
    if not fitted.lane_slowdown.is_known and _lanes_matter(best, fitted):
        yield "lane slowdown"


def _lanes_matter(plan: Buckets, fitted: FittedModel) -> bool:
    step_ns = [
        float(replay([plan], fitted.work, replace(fitted.costs, lane_slowdown=slowdown)).typical_ns[0])
        for slowdown in fitted.lane_slowdown.interval
    ]
    return step_ns[1] > (1 + MIN_GAIN) * step_ns[0]
