"""Fit of the model to a recording: everything that a replay needs, with its uncertainty."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Final

import numpy as np
import numpy.typing as npt

from overlapscope.bucket_model.contention import (
    Slowdown,
    Transfers,
    compute_lane_slowdown_from_pairs,
    estimate_communication_slowdown,
    estimate_compute_slowdown,
    estimate_lane_slowdown,
    extract_transfers,
)
from overlapscope.bucket_model.cost import ERROR_OF_MEDIAN, draw_cost, fit_cost, fit_line
from overlapscope.bucket_model.observation import Observations, Spans
from overlapscope.bucket_model.partition import Float64Array
from overlapscope.bucket_model.schedule import Costs, replay
from overlapscope.bucket_model.work import ComputeTimes, RecordedBackward, extract_backward

_MIN_CYCLES: Final = 8
_BUCKET_COUNT_SIGMA: Final = 2.0
"""Ratio at which numbers of buckets still inform each other: one standard deviation, as a factor."""
_ROUNDS: Final = 6
"""Rounds of estimation: two lanes hide latency from each other, so each round improves the estimate of the latency."""

_ONE_LANE: Final = Slowdown(value=1.0, is_known=True, draws=np.ones(1))


@dataclass(frozen=True, kw_only=True)
class PlanCheck:
    """Recorded step times of a recorded plan, compared with those predicted for the same cycles."""

    plan: int
    """Index in the plans of the observations."""
    off: float
    """Median logarithm of recorded by predicted step time."""
    noise: float
    """Standard error of that; NaN with a single cycle."""


@dataclass(frozen=True, eq=False, kw_only=True)
class FittedModel:
    """The fitted model of one job."""

    observations: Observations
    calibration: Spans | None
    transfers: Transfers
    backward: RecordedBackward
    """Backward in the cycles that predictions are based on."""
    copy_overhead_ns: Float64Array
    """(R,) time of copies out beyond the spans that were recorded."""
    work: ComputeTimes
    """Work of the ranks, delayed by ``copy_overhead_ns``."""
    costs: Costs
    compute_slowdown: Slowdown
    communication_slowdown: Slowdown
    lane_slowdown: Slowdown
    """Slowdown of two concurrent all-reduces; 1 with a single lane."""

    def draws(self, count: int) -> Iterator[tuple[ComputeTimes, Costs]]:
        """Draw equally likely models, from resampled cycles and with equally likely slowdowns.

        Args:
            count: Number of models.
        """
        random = np.random.default_rng(0)
        for _ in range(count):
            compute = float(random.choice(self.compute_slowdown.draws))
            communication = float(random.choice(self.communication_slowdown.draws))
            lane = float(random.choice(self.lane_slowdown.draws))
            samples = self.transfers.without_slowdown(lane_slowdown=lane, communication_slowdown=communication)
            costs = replace(
                self.costs,
                collective=draw_cost(samples, self.observations.world_size, self.calibration, random),
                compute_slowdown=compute,
                communication_slowdown=communication,
                lane_slowdown=lane,
            )
            work = self.backward.without_slowdown(compute).delayed_by(self.copy_overhead_ns)
            yield work.select_cycles(random.integers(len(work.end_ns), size=len(work.end_ns))), costs

    @cached_property
    def checks(self) -> tuple[PlanCheck, ...]:
        """Compare recorded and predicted step times of the plans that were active for two consecutive steps or more.

        Cycle by cycle, because another plan may have been active while all steps took longer.
        """
        observations = _without_first_steps(self.observations)
        settled = observations.plan == observations.previous_plan
        recorded_ns = np.median(observations.cycle_ns, axis=1)
        checks = []
        for plan in np.unique(observations.plan[settled]).tolist():
            cycles = settled & (observations.plan == plan)
            replayed = replay([observations.plans[plan]], self.work.select_cycles(cycles), self.costs)
            off = np.log(recorded_ns[cycles] / replayed.cycle_ns[0])
            spread = float(np.std(off, ddof=1)) if len(off) > 1 else float("nan")
            noise = ERROR_OF_MEDIAN * spread / len(off) ** 0.5
            checks.append(PlanCheck(plan=plan, off=float(np.median(off)), noise=noise))
        return tuple(checks)

    def estimate_model_errors(self, buckets: npt.ArrayLike) -> Float64Array:
        """Estimate by which share of the step predictions are off, beyond the noise of the recorded steps.

        Costs that the model omits, such as the processor time of a launch, grow with the number of buckets. So a plan
        is assumed to be off like the recorded plans with a similar number.

        Args:
            buckets: (Q,) number of buckets of each plan.

        Returns:
            (Q,) errors as shares of the step.
        """
        wanted = np.asarray(buckets, dtype=np.float64)
        checks = [check for check in self.checks if np.isfinite(check.noise)]
        if not checks:
            return np.zeros(len(wanted))
        recorded = np.array([len(self.observations.plans[check.plan]) for check in checks])
        beyond = np.array([check.off**2 - check.noise**2 for check in checks])
        far = 0.5 * (np.log(wanted[:, None] / recorded) / np.log(_BUCKET_COUNT_SIGMA)) ** 2
        near = np.exp(far.min(axis=1, keepdims=True) - far)
        errors: Float64Array = np.sqrt(np.maximum(0.0, near @ beyond / near.sum(axis=1)))
        return errors


def fit_model(
    observations: Observations, *, lanes: int, calibration: Spans | None = None, pairs: Spans | None = None
) -> FittedModel:
    """Fit the model to a recording.

    Args:
        lanes: Number of all-reduces that the backend runs at a time: 1 with NCCL, 2 with gloo.
        calibration: Times of all-reduces of the same ranks with nothing else running.
        pairs: Times of two all-reduces launched together, of this many bytes each.

    Raises:
        OverlapScopeError: There is no data on the cost of an all-reduce.
    """
    copy_in = fit_line(observations.copies_in.bytes, observations.copies_in.time_ns)
    copy_out = fit_line(observations.copies_out.bytes, observations.copies_out.time_ns)
    settled = _without_first_steps(observations)
    backward = extract_backward(settled, copy_in)
    compute = estimate_compute_slowdown(backward)
    measured = fit_cost(calibration, observations.world_size) if calibration is not None else None
    line = measured.line if measured is not None else None
    cost, lane, communication = measured, _ONE_LANE, _ONE_LANE
    if lanes > 1 and measured is not None and pairs is not None:
        lane = compute_lane_slowdown_from_pairs(pairs, measured)
    for _ in range(_ROUNDS if lanes > 1 else 1):
        transfers = extract_transfers(observations, lanes, cost.alpha_ns if cost is not None else 0.0)
        if lanes > 1 and pairs is None:
            lane = estimate_lane_slowdown(transfers, communication.value, line)
        communication = estimate_communication_slowdown(transfers, lane.value, line)
        samples = transfers.without_slowdown(lane_slowdown=lane.value, communication_slowdown=communication.value)
        cost = fit_cost(samples, observations.world_size, calibration)
    assert cost is not None
    costs = Costs(
        collective=cost,
        copy_in=copy_in,
        copy_out=copy_out,
        compute_slowdown=compute.value,
        communication_slowdown=communication.value,
        lanes=lanes,
        lane_slowdown=lane.value,
    )
    work = backward.without_slowdown(compute.value)
    copy_overhead_ns = _copy_overhead_ns(settled, work, costs)
    return FittedModel(
        observations=observations,
        calibration=calibration,
        transfers=transfers,
        backward=backward,
        copy_overhead_ns=copy_overhead_ns,
        work=work.delayed_by(copy_overhead_ns),
        costs=costs,
        compute_slowdown=compute,
        communication_slowdown=communication,
        lane_slowdown=lane,
    )


def _without_first_steps(observations: Observations) -> Observations:
    """Drop the first step of each plan, whose buffers are new, if enough cycles remain."""
    settled = observations.plan == observations.previous_plan
    return observations.select_cycles(settled) if settled.sum() >= _MIN_CYCLES else observations


def _copy_overhead_ns(observations: Observations, work: ComputeTimes, costs: Costs) -> Float64Array:
    """Compute (R,) the excess of recorded copies out over those in the replay of the recorded plans."""
    known = observations.previous_plan >= 0
    if not known.any():
        return np.zeros(len(observations.ranks))
    replayed = replay(observations.plans, work, costs)
    copying_ns = np.median(replayed.cycle_ns - replayed.backward_end_ns - replayed.exposed_ns, axis=1)
    predicted_ns = copying_ns[observations.previous_plan[known]]
    overhead_ns: Float64Array = np.median(observations.copies_out_ns[known] - predicted_ns[:, None], axis=0)
    return overhead_ns
