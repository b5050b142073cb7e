"""Prediction of the step time of a recorded job with another number of ranks, on the same links."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from overlapscope.analysis.advice import measured_of
from overlapscope.analysis.analysis import Analysis
from overlapscope.analysis.observations import lanes_of, observations_of
from overlapscope.errors import OverlapScopeError
from overlapscope.model.fit import fit
from overlapscope.model.measured import predict
from overlapscope.model.plan_table import table_of
from overlapscope.model.what_if import algorithms_of


def steps_with_other_ranks(analysis: Analysis, ranks: Sequence[int]) -> list[float]:
    """Predict the mean step in nanoseconds for each number of ranks, with the same buckets and the same work per rank.

    Args:
        ranks: Numbers of ranks, 2 or more each.

    Raises:
        OverlapScopeError: The recording doesn't hold enough.
    """
    observations = observations_of(analysis.trace)
    measured = measured_of(observations, analysis.account, analysis.summary)
    if measured is None:
        raise OverlapScopeError(f"{analysis.trace.path}: no step to predict others from")
    fitted = fit(observations, lanes=lanes_of(analysis.trace))
    table = table_of([measured.plan], fitted.work.gradients)
    cost = fitted.costs.collective
    return [
        min(
            float(predict(table, fitted.work, costs, fitted.costs, measured).step_ns[0])
            for algorithm in algorithms_of(fitted.costs)
            for costs in [replace(fitted.costs, collective=cost.extrapolated(count, algorithm))]
        )
        for count in ranks
    ]
