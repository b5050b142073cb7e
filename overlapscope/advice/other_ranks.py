"""Prediction of the step time of a recorded job with another number of ranks, on the same links."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from overlapscope.advice.advice import summarize_measured_plans
from overlapscope.advice.observations import extract_observations, get_backend_lanes
from overlapscope.analysis import Analysis
from overlapscope.bucket_model.fit import fit_model
from overlapscope.bucket_model.partition import build_table
from overlapscope.bucket_model.prediction import predict_steps
from overlapscope.bucket_model.what_if import list_algorithms
from overlapscope.errors import OverlapScopeError


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
