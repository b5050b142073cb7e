"""Advice on bucket sizes, and predictions for other numbers of ranks, from a recording."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import numpy as np

from overlapscope.advice.observations import extract_observations, find_reduced_models, get_backend_lanes
from overlapscope.analysis import Analysis
from overlapscope.breakdown.breakdown import Breakdown
from overlapscope.breakdown.drift import Drift
from overlapscope.breakdown.means import mean_with_ci
from overlapscope.breakdown.steady_steps import outlier_sign
from overlapscope.breakdown.summary import Summary
from overlapscope.bucket_model.calibration import Calibration, collect_spans, read_calibration
from overlapscope.bucket_model.fit import FittedModel, fit_model
from overlapscope.bucket_model.observation import Observations
from overlapscope.bucket_model.partition import build_table
from overlapscope.bucket_model.plan_file import PlanFile, PlannedParameter
from overlapscope.bucket_model.prediction import MeasuredSteps, predict_steps
from overlapscope.bucket_model.recommend import Recommendation, recommend
from overlapscope.bucket_model.what_if import list_algorithms
from overlapscope.errors import OverlapScopeError
from overlapscope.text import count_of
from overlapscope.trace.ddp_trial import SIZE_ARGUMENTS
from overlapscope.trace.description import BY_HAND, FULLY_SHARD, describe_strategies
from overlapscope.trace.folders import read_import_source
from overlapscope.trace.recording import Trace
from overlapscope.trace.schema import CALIBRATION_FILE

_PREDICTABLE_STRATEGIES: Final = ("", "per_parameter")
"""Strategies for which other bucket sizes can be predicted: they differ from the usual one in the buckets only."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Advice:
    """Advice on bucket sizes, and what it is based on."""

    fitted: FittedModel
    recommendation: Recommendation
    parameters: tuple[PlannedParameter, ...]
    """Parameters by number, as in bucket plans."""
    is_calibrated: bool
    """True if a calibration was used."""
    other_models: int
    """Number of models of the run that were left out because they reduce fewer bytes."""
    recorded_steps: int
    """Number of steps of the recording, of which the model learns from some."""
    missing_ranks: int
    """Number of ranks that left no log. Time spent waiting for them looks like transfer."""
    drift: Drift | None
    """Drift of the step time over the recording, whose means the predictions are."""

    def plan_file(self) -> PlanFile:
        """Return the best plan of all as a file for ``DistributedDataParallel(bucket_plan=...)``."""
        advice, names = self.recommendation, [parameter.name for parameter in self.parameters]
        return PlanFile(
            parameters=self.parameters,
            buckets=tuple(tuple(names[number] for number in bucket) for bucket in advice.free.buckets),
            bucket_cap_mb_list=advice.free_caps_mb,
            predicted={
                "step_ns": advice.free.step_ns.value,
                "step_low_ns": advice.free.step_ns.low,
                "step_high_ns": advice.free.step_ns.high,
                "step_now_ns": advice.now.step_ns.value,
            },
        )


def advise(analysis: Analysis, calibration: Path | None = None) -> Advice:
    """Fit the model to a recording and derive the advice.

    Args:
        calibration: File written by ``overlapscope calibrate``; by default the one in the folder of the recording, if
            any.

    Raises:
        OverlapScopeError: The recording doesn't hold enough, or the calibration is of another job.
    """
    trace, stragglers = analysis.trace, analysis.stragglers
    if (strategy := describe_strategies(trace.run)) == FULLY_SHARD:
        raise OverlapScopeError(
            f"{trace.path}: the buckets of {FULLY_SHARD} are the modules that it was called on, so there is no size to "
            "choose; overlapscope recommend predicts other settings of it"
        )
    if strategy == BY_HAND:
        raise OverlapScopeError(
            f"{trace.path}: the training loop reduces gradients itself, in the buckets that its code makes of them, so "
            "there is no bucket_cap_mb to choose"
        )
    if strategy not in _PREDICTABLE_STRATEGIES:
        raise OverlapScopeError(
            f"{trace.path}: gradients were reduced by strategy {strategy}, and what other bucket sizes would take is "
            "only known of the usual one, the backend's own all-reduce; record a few steps without it"
        )
    if source := read_import_source(trace.run):
        raise OverlapScopeError(
            f"{trace.path}: imported from {source}, whose traces don't say when each gradient was ready and how large "
            "it is: record 20 steps or more with overlapscope record, best with --probe-buckets"
        )
    observations = extract_observations(trace)
    found = _calibration(trace, calibration, observations.world_size)
    alone, pairs = (collect_spans(found.samples), collect_spans(found.pairs)) if found is not None else (None, None)
    fitted = fit_model(observations, lanes=get_backend_lanes(trace), calibration=alone, pairs=pairs)
    return Advice(
        fitted=fitted,
        recommendation=recommend(
            fitted,
            hosts=trace.ranks["host"].nunique(),
            measured=summarize_measured_plans(observations, analysis.breakdown, analysis.summary),
            gain_if_equal_ranks=math.nan
            if stragglers is None
            else stragglers.saved_if_ranks_equal.step.value / stragglers.step_time_ns,
            size_arguments=_describe_size_arguments(trace),
        ),
        parameters=_parameters(trace),
        is_calibrated=found is not None,
        other_models=len(find_reduced_models(trace)) - 1,
        recorded_steps=trace.steps["step"].nunique(),
        missing_ranks=max(0, observations.world_size - len(trace.ranks)),
        drift=analysis.summary.drift,
    )


def _describe_size_arguments(trace: Trace) -> str:
    """Return the arguments by which the script sets bucket sizes, as code; empty if it leaves them at the default."""
    model = find_reduced_models(trace)[0]
    found = (each.get("ddp_arguments") for each in trace.run.get("models", []) if each.get("model") == model)
    arguments = next(found, None) or {}
    given = {name: arguments[name] for name in (*SIZE_ARGUMENTS, "bucket_plan") if arguments.get(name) is not None}
    return ", ".join(f"{name}={_format_argument(value)}" for name, value in given.items())


def _format_argument(value: object) -> str:
    """Return a value as code: 25 for 25.0, as scripts have it; recordings hold all sizes as floats."""
    return f"{value:g}" if isinstance(value, float) else repr(value)


def summarize_measured_plans(
    observations: Observations, breakdown: Breakdown, summary: Summary
) -> MeasuredSteps | None:
    """Return the mean step with the plan that most steady steps were reduced with, and mean step times of other plans.

    None if no steady step has observations.
    """
    plan_of = dict(zip(observations.steps.tolist(), observations.plan.tolist(), strict=True))
    steady = summary.steady
    votes = Counter(plan_of[step] for step in steady.steps.tolist() if step in plan_of)
    if not votes:
        return None
    usual = votes.most_common(1)[0][0]
    step_ns = (breakdown.end_ns - breakdown.start_ns)[steady.finished_rows].mean(axis=1)
    unusual = [step for excluded in steady.excluded if excluded.why != "other buckets" for step in excluded.steps]
    others_ns = {}
    for plan, buckets in enumerate(observations.plans):
        settled = (observations.plan == plan) & (observations.previous_plan == plan)
        counted = np.isin(steady.finished, observations.steps[settled])
        counted &= ~np.isin(steady.finished, unusual)
        counted &= outlier_sign(step_ns, counted) == 0
        if plan != usual and counted.any():
            (others_ns[buckets],) = mean_with_ci(step_ns[counted, None])
    return MeasuredSteps(
        plan=observations.plans[usual],
        step_ns=summary.mean.step,
        exposed_ns=summary.mean.blocks["exposed"].value,
        others_ns=others_ns,
    )


def predict_step_times(analysis: Analysis, ranks: Sequence[int]) -> list[float]:
    """Predict the mean step in nanoseconds for each number of ranks, with the same buckets and the same work per rank.

    Args:
        ranks: Numbers of ranks, 2 or more each.

    Raises:
        OverlapScopeError: The recording doesn't hold enough.
    """
    observations = extract_observations(analysis.trace)
    measured = summarize_measured_plans(observations, analysis.breakdown, analysis.summary)
    if measured is None:
        raise OverlapScopeError(f"{analysis.trace.path}: no step to predict others from")
    fitted = fit_model(observations, lanes=get_backend_lanes(analysis.trace))
    table = build_table([measured.plan], fitted.work.gradients)
    cost = fitted.costs.collective
    return [
        min(
            float(predict_steps(table, fitted.work, costs, fitted.costs, measured).step_ns[0])
            for algorithm in list_algorithms(fitted.costs)
            for costs in [replace(fitted.costs, collective=cost.extrapolate(count, algorithm))]
        )
        for count in ranks
    ]


def _calibration(trace: Trace, path: Path | None, world_size: int) -> Calibration | None:
    beside = trace.path / CALIBRATION_FILE
    if path is None and not beside.exists():
        return None
    path = path or beside
    found = read_calibration(path)
    if found.world_size != world_size:
        raise OverlapScopeError(
            f"{path}: was measured with {found.world_size} ranks, but the recording has {world_size}: calibrate with "
            f"as many, or move the file away"
        )
    hosts = trace.ranks["host"]
    is_known = len(hosts) == world_size and "unknown" not in set(hosts)
    if is_known and hosts.nunique() != len(set(found.hosts)):
        raise OverlapScopeError(
            f"{path}: was measured on {count_of(len(set(found.hosts)), 'host')}, but the recording is from "
            f"{count_of(len(set(hosts)), 'host')}: "
            f"links within a host and between hosts differ, so calibrate where the training runs"
        )
    return found


def _parameters(trace: Trace) -> tuple[PlannedParameter, ...]:
    plans = trace.plans[trace.plans["model"] == find_reduced_models(trace)[0]]
    rows = plans.drop_duplicates("parameter").sort_values("parameter")
    columns = (rows[name].tolist() for name in ("name", "shape", "dtype", "bytes"))
    return tuple(
        PlannedParameter(name=str(name), shape=_shape(str(shape)), dtype=str(dtype), bytes=int(bytes_))
        for name, shape, dtype, bytes_ in zip(*columns, strict=True)
    )


def _shape(text: str) -> tuple[int, ...]:
    return () if text == "scalar" else tuple(int(length) for length in text.split("×"))
