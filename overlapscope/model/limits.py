"""What limits a step with the best bucket plan, found by removing each cost in turn."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Final, Literal

import numpy as np

from overlapscope.model.cost import CollectiveCost
from overlapscope.model.line import CostLine
from overlapscope.model.partition import Buckets
from overlapscope.model.schedule import Costs, replay, replay_step
from overlapscope.model.work import ComputeTimes

Limit = Literal["compute", "differences", "latency", "bandwidth", "last bucket"]

_MIN_SHARE: Final = 0.02
"""Smallest share of the step for something to be called its limit."""
_MAX_IDLE_WAIT_SHARE: Final = 0.1
"""The last all-reduce found the link idle if it waited for less than this share of its duration."""
_NEARLY_ZERO: Final = 1e-9


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Shares of the step time of one plan, by cause. They overlap, and need not add up to 1."""

    limit: Limit
    """Most promising thing to change. ``compute``: everything else together is below 2 % of the step. ``last bucket``:
    bandwidth, but only for the gradients that become ready last, when no backward is left to hide them."""
    exposed: float
    """Share of the step in which backward's compute is finished but an all-reduce is not."""
    communication: float
    """Share by which the step would be shorter without any all-reduce, including their slowdown of compute."""
    latency: float
    """Share by which the step would be shorter if the latency of all-reduces were zero."""
    bandwidth: float
    """Share by which the step would be shorter if bandwidth were unlimited."""
    differences: float
    """Share by which the step would be shorter if all ranks were equally fast; NaN if unknown."""


def find_limits(
    plan: Buckets, work: ComputeTimes, costs: Costs, gain_if_equal_ranks: float = math.nan, exposed: float | None = None
) -> Limits:
    """Compute the limits of one plan in the typical cycle.

    Args:
        if_alike: Share by which the recorded step would be shorter if all ranks were equally fast; NaN if unknown.
        exposed: Share of the step in which communication is exposed, if a better value than the replay's is known.
    """
    typical = work.typical()
    table = [plan]
    replayed = replay(table, typical, costs)
    step_ns = float(replayed.cycle_ns[0, 0])

    def gained(work: ComputeTimes, costs: Costs) -> float:
        return 1 - float(replay(table, work, costs).cycle_ns[0, 0]) / step_ns

    collective = costs.collective
    shares = {
        "latency": gained(typical, replace(costs, collective=_without_latency(collective))),
        "bandwidth": gained(typical, replace(costs, collective=_only_latency(collective))),
        "differences": gain_if_equal_ranks,
    }
    exposed = float(replayed.exposed_ns[0, 0]) / step_ns if exposed is None else exposed
    worst = max(shares, key=lambda name: -math.inf if math.isnan(shares[name]) else shares[name])
    limit: Limit
    if shares[worst] < _MIN_SHARE and exposed < _MIN_SHARE:
        limit = "compute"
    elif worst == "bandwidth" and _is_last_bucket_alone(plan, typical, costs):
        limit = "last bucket"
    else:
        limit = worst  # type: ignore[assignment]
    return Limits(
        limit=limit,
        exposed=exposed,
        communication=gained(typical, replace(costs, collective=with_zero_time(collective))),
        **shares,
    )


def with_zero_time(cost: CollectiveCost) -> CollectiveCost:
    """Return the cost of all-reduces that take no time."""
    return _with_times(cost, latencies=0.0, bytes_=0.0)


def _without_latency(cost: CollectiveCost) -> CollectiveCost:
    return _with_times(cost, latencies=0.0, bytes_=1.0)


def _only_latency(cost: CollectiveCost) -> CollectiveCost:
    return _with_times(cost, latencies=1.0, bytes_=0.0)


def _with_times(cost: CollectiveCost, latencies: float, bytes_: float) -> CollectiveCost:
    alpha_ns = cost.alpha_ns
    times_ns = latencies * alpha_ns + bytes_ * (cost.times_ns - alpha_ns)
    return replace(
        cost,
        # Not zero, because the logarithms of the times are interpolated and the line is a divisor.
        times_ns=np.maximum(times_ns, _NEARLY_ZERO),
        line=CostLine(alpha_ns=max(latencies * cost.line.alpha_ns, _NEARLY_ZERO), beta_ns=bytes_ * cost.line.beta_ns),
    )


def _is_last_bucket_alone(plan: Buckets, work: ComputeTimes, costs: Costs) -> bool:
    drawn = replay_step(plan, work, costs)
    waited_ns = drawn.start_ns[-1] - drawn.launch_ns[:, -1].max()
    under_way_ns = max(0.0, float(drawn.end_ns[:-1].max(initial=0.0) - drawn.launch_ns[:, -1].max()))
    return bool(max(waited_ns, under_way_ns) <= _MAX_IDLE_WAIT_SHARE * (drawn.end_ns[-1] - drawn.start_ns[-1]))
