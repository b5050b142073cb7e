"""Predicted step times: of single plans relative to measured ones, and as a curve over all bucket sizes.

The model omits some costs, so it is off where it can be compared: for the plan whose steps were measured. Predictions
for another plan are therefore relative to that one. The measured plan has its measured mean, and the prediction for
another one is a breakdown again: backward and copies change by as much as in the model, and the rest of the change is
more or less exposed communication.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Final, Literal

import numpy as np

from overlapscope.bucket_model.fit import FittedModel
from overlapscope.bucket_model.partition import MB, Buckets, Float64Array, Gradients, PlanTable, build_table
from overlapscope.bucket_model.plans import UniformPlan, default_plan, find_caps_mb, format_caps
from overlapscope.bucket_model.schedule import Costs, ReplayResult, replay
from overlapscope.bucket_model.search import PredictedSizes, find_fastest, predict_sizes, prefers_default
from overlapscope.bucket_model.work import ComputeTimes
from overlapscope.interval import SIGMAS_90, Interval, find_lower_bound

_SIZES: Final = 48
"""Number of sizes that can be distinguished when they are drawn."""
_DRAWS: Final = 100
_INTERVAL: Final = (0.05, 0.95)
_MIN_ERROR: Final = 0.02
"""Minimum error of predictions for unrecorded plans. Like ``_BETWEEN_RUN_SIGMA`` a share of the step, from nine sweeps
of sizes (``benchmarks/bucket_advice.py``): with both, 88 % of the measurements there lie in the 90 % intervals."""
_BETWEEN_RUN_SIGMA: Final = 0.025
"""Share by which the same training is slower or faster in another run."""

Special = Literal["present", "default", "best"]
"""Names of plans that need not be the plan of any size."""
SPECIALS: Final[tuple[Special, ...]] = ("present", "default", "best")


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options that apply to all sizes."""

    first_mb: float | None = None
    """Limit of the first bucket in MB, if it differs from the others'."""
    is_compressed: bool = False
    """True if gradients are sent as fp16."""

    def apply_to(self, costs: Costs) -> Costs:
        """Return the costs of a step under these options."""
        return replace(costs, collective=costs.collective.halve_bytes()) if self.is_compressed else costs


@dataclass(frozen=True, kw_only=True)
class MeasuredSteps:
    """Measured mean step of the job as it is."""

    plan: Buckets
    step_ns: Interval
    exposed_ns: float
    """Exposed communication in that step."""
    others_ns: Mapping[Buckets, Interval] = field(default_factory=dict)
    """Measured mean steps with other plans."""

    def steps_ns(self, plan: Buckets) -> Interval | None:
        """Return the measured mean step with a plan; None if it was not measured."""
        return self.step_ns if plan == self.plan else self.others_ns.get(plan)


@dataclass(frozen=True, eq=False, kw_only=True)
class PredictedSteps:
    """Predicted mean steps of Q plans."""

    step_ns: Float64Array
    """(Q,) step times."""
    exposed_ns: Float64Array
    """(Q,) exposed communication."""
    backward_ns: Float64Array
    """(Q,) how much longer backward takes than with the measured plan; 0 if no plan was measured."""
    copies_ns: Float64Array
    """(Q,) how much longer copies out take than with the measured plan; 0 if no plan was measured."""
    error: float
    """Share of the step by which the model alone is off for the measured plan; NaN if no plan was measured."""


def predict_steps(
    table: PlanTable, work: ComputeTimes, costs: Costs, usual: Costs, measured: MeasuredSteps | None
) -> PredictedSteps:
    """Predict the mean steps of plans, relative to the measured one if there is one.

    Args:
        table: Table of Q plans.
        costs: Costs to predict with.
        usual: Fitted costs, without further assumptions.
    """
    step_ns, exposed_ns, backward_ns = _median_times(replay(table, work, costs))
    if measured is None:
        nothing = np.zeros_like(step_ns)
        return PredictedSteps(
            step_ns=step_ns, exposed_ns=exposed_ns, backward_ns=nothing, copies_ns=nothing, error=float("nan")
        )
    now_ns, exposed_now_ns, backward_now_ns = _median_times(
        replay(build_table([measured.plan], work.gradients), work, usual)
    )
    factor = measured.step_ns.value / now_ns
    change_ns, backward_change_ns = (step_ns - now_ns) * factor, (backward_ns - backward_now_ns) * factor
    copies_ns, copies_now_ns = step_ns - backward_ns - exposed_ns, now_ns - backward_now_ns - exposed_now_ns
    copies_change_ns = (copies_ns - copies_now_ns) * factor
    exposed_ns = measured.exposed_ns + change_ns - backward_change_ns - copies_change_ns
    return PredictedSteps(
        step_ns=measured.step_ns.value + change_ns,
        exposed_ns=np.maximum(exposed_ns, 0.0),
        backward_ns=backward_change_ns + np.minimum(exposed_ns, 0.0),  # exposed time can't be negative
        copies_ns=copies_change_ns,
        error=float(now_ns[0] / measured.step_ns.value - 1),
    )


def _median_times(replayed: ReplayResult) -> tuple[Float64Array, Float64Array, Float64Array]:
    """Return (Q,) step times, exposed communication, and the end of backward."""
    exposed_ns = np.median(replayed.exposed_ns, axis=1)
    return replayed.typical_ns, exposed_ns, np.median(replayed.backward_end_ns, axis=1)


def draw_step_times_ns(
    fitted: FittedModel,
    plans: Sequence[Buckets],
    options: Options,
    measured: MeasuredSteps | None = None,
    count: int = _DRAWS,
) -> Float64Array:
    """Draw step times of plans from many equally likely models.

    All plans of a draw share its model, so that the difference of two plans is more certain than either; the error
    of the model (``FittedModel.estimate_model_errors``) is independent for each plan. Variation between runs shifts all
    plans alike.

    Args:
        plans: Q plans.
        measured: Measurement that predictions are relative to, if there is one.
        count: Number of draws, D.

    Returns:
        (D, Q)
    """
    table = build_table(plans, fitted.work.gradients)
    # Separate generators, so that curves of different plans share the variation between runs.
    day, own, mean = (np.random.default_rng([0, number]) for number in range(3))
    step_ns, least_ns = np.empty((count, len(table))), np.empty((count, 1))
    for drawn, (work, costs) in enumerate(fitted.draws(count)):
        alone = replace(costs, collective=costs.collective.scale(latency=0.0, byte_time=0.0))
        step_ns[drawn] = replay(table, work, options.apply_to(costs)).typical_ns
        least_ns[drawn] = replay(plans[:1], work, alone).typical_ns
        if measured is not None:
            now_ns = replay([measured.plan], work, costs).typical_ns[0]
            scale = _draw_from_interval(measured.step_ns, float(mean.standard_normal())) / now_ns
            step_ns[drawn] *= scale
            least_ns[drawn] *= scale
    errors = np.maximum(fitted.estimate_model_errors(table.is_bucket.sum(axis=1)), _MIN_ERROR)
    if measured is not None and not options.is_compressed:
        errors[[plan == measured.plan for plan in plans]] = 0.0
    off = errors * own.standard_normal((count, len(table)))
    # No buckets make a step shorter than it is without communication, whatever the model's error.
    drawn_ns: Float64Array = np.maximum(step_ns * np.exp(off), np.minimum(least_ns, step_ns))
    drawn_ns *= np.exp(_BETWEEN_RUN_SIGMA * day.standard_normal((count, 1)))
    return drawn_ns


def _draw_from_interval(interval: Interval, chance: float) -> float:
    """Return a plausible true value of an interval.

    Args:
        chance: Drawn from the standard normal distribution.
    """
    edge = interval.high if chance > 0 else interval.low
    if math.isnan(edge):
        return interval.value
    away = abs(chance * (edge - interval.value)) / SIGMAS_90
    return interval.value + away if chance > 0 else float(find_lower_bound(interval.value, away))


@dataclass(frozen=True, eq=False, kw_only=True)
class Curve:
    """Predicted step times of Q distinct plans under some options, including every partition that a cap gives."""

    options: Options
    gradients: Gradients
    sizes: tuple[UniformPlan, ...]
    """Plans of the caps, small caps first; also the first entries of ``plans``."""
    special: dict[Special, int]
    """Indices of the special plans in ``plans``."""
    plans: tuple[Buckets, ...]
    draws_ns: Float64Array
    """(D, Q) step times drawn from equally likely models."""
    predicted: PredictedSteps
    measured: MeasuredSteps | None
    """Measurement that predictions are relative to."""

    @cached_property
    def interval_ns(self) -> Float64Array:
        """Return (2, Q) the ends of the 90 % intervals of the step times."""
        low, high = np.quantile(self.draws_ns, _INTERVAL, axis=0)
        interval_ns = np.array([np.minimum(low, self.predicted_ns), np.maximum(high, self.predicted_ns)])
        if self.measured is not None and not self.options.is_compressed and self.measured.plan in self.plans:
            known = self.measured.step_ns  # NaN bounds if there were too few steps
            interval_ns[:, self.plans.index(self.measured.plan)] = np.nan_to_num(
                (known.low, known.high), nan=known.value
            )
        return interval_ns

    @property
    def predicted_ns(self) -> Float64Array:
        """Return (Q,) mean step times."""
        return self.predicted.step_ns

    def step_of(self, index: int) -> Interval:
        """Return the mean step time of a plan with its interval."""
        low, high = self.interval_ns[:, index].tolist()
        return Interval(value=float(self.predicted_ns[index]), low=low, high=high)

    def measured_steps_ns(self) -> dict[int, Interval]:
        """Return the mean steps of the plans that were measured under these options, by index."""
        if self.measured is None or self.options.is_compressed:
            return {}
        known = {index: self.measured.steps_ns(plan) for index, plan in enumerate(self.plans)}
        return {index: step for index, step in known.items() if step is not None}

    @property
    def fastest(self) -> int:
        """Return the index of the best size."""
        return find_fastest(self.sizes, self.predicted_ns[: len(self.sizes)])

    @property
    def is_default_best(self) -> bool:
        """Return True if no size is better than DDP's default by enough."""
        default, present = self.special["default"], self.special["present"]
        return prefers_default(*self.predicted_ns[[default, self.fastest, present]].tolist())

    def index_of_cap(self, cap_mb: float) -> int:
        """Return the index of the size that a cap gives."""
        highs = [size.high_bytes for size in self.sizes]
        return min(int(np.searchsorted(highs, int(cap_mb * MB))), len(highs) - 1)

    def compute_gain(self, index: int, over: Curve) -> Interval:
        """Return the share of another curve's present step that a plan saves, compared draw by draw."""
        present = over.special["present"]
        value = float(1 - self.predicted_ns[index] / over.predicted_ns[present])
        return _interval(value, 1 - self.draws_ns[:, index] / over.draws_ns[:, present])

    def compute_gain_between(self, plan: Buckets, over: Buckets) -> Interval:
        """Return the share of the step with one plan that another plan saves, compared draw by draw."""
        to, before = self.plans.index(plan), self.plans.index(over)
        value = float(1 - self.predicted_ns[to] / self.predicted_ns[before])
        return _interval(value, 1 - self.draws_ns[:, to] / self.draws_ns[:, before])

    def format_setting(self, index: int, special: Special | None = None) -> str:
        """Return the arguments of DistributedDataParallel that give a plan.

        Args:
            special: Name of the special plan that is meant, if it is one.
        """
        plan, gradients = self.plans[index], self.gradients
        if special == "default" or (special == "present" and plan == default_plan(gradients).buckets):
            return "bucket_cap_mb=None"
        if special is not None:
            caps_mb = find_caps_mb(plan, gradients)
            return 'bucket_plan="plan.json"' if caps_mb is None else format_caps(caps_mb)
        cap_mb, first_mb = self.sizes[index].cap_mb, self.options.first_mb
        return format_caps([cap_mb] if first_mb is None else [first_mb, cap_mb])


def predict_curve(
    fitted: FittedModel,
    options: Options,
    specials: dict[Special, Buckets],
    measured: MeasuredSteps | None = None,
    sizes: PredictedSizes | None = None,
) -> Curve:
    """Predict all sizes, and the special plans.

    Args:
        fitted: The model of the job.
        specials: Special plans by name.
        measured: Measurement that predictions are relative to, if there is one.
        sizes: All sizes under these options, if they have already been predicted.
    """
    gradients, costs = fitted.work.gradients, options.apply_to(fitted.costs)
    first_bytes = None if options.first_mb is None else int(options.first_mb * MB)
    selected = _select_sizes(sizes or predict_sizes(fitted.work, costs, first_bytes))
    plans = list(dict.fromkeys([*(size.buckets for size in selected), *specials.values()]))
    table = build_table(plans, gradients)
    return Curve(
        options=options,
        gradients=gradients,
        sizes=selected,
        special={name: plans.index(buckets) for name, buckets in specials.items()},
        plans=tuple(plans),
        draws_ns=draw_step_times_ns(fitted, plans, options, measured),
        predicted=predict_steps(table, fitted.work, costs, fitted.costs, measured),
        measured=measured,
    )


def _interval(value: float, draws: Float64Array) -> Interval:
    low, high = np.quantile(draws, _INTERVAL)
    return Interval(value=value, low=min(value, float(low)), high=max(value, float(high)))


def _select_sizes(predicted: PredictedSizes) -> tuple[UniformPlan, ...]:
    """Select the best of the sizes, and others spaced as widely as possible."""
    sizes = predicted.sizes
    last = len(sizes) - 1
    able = [at for at, size in enumerate(sizes) if size.has_round_cap or at == last]
    spread = np.linspace(0, len(able) - 1, min(_SIZES, len(able))).round().astype(np.int64)
    return tuple(sizes[index] for index in sorted({predicted.fastest, *(able[at] for at in spread.tolist())}))
