"""Predicted gains of changes other than bucket sizes, each with the best bucket size for it."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Final, Literal

import numpy as np

from overlapscope.bucket_model.cost import ZERO_COST, Algorithm
from overlapscope.bucket_model.partition import Buckets, Float64Array, build_table
from overlapscope.bucket_model.prediction import MeasuredSteps, predict_steps
from overlapscope.bucket_model.schedule import Costs, replay, replay_step
from overlapscope.bucket_model.search import PredictedSizes, find_fastest, prefers_default
from overlapscope.bucket_model.work import ComputeTimes

# What limits a step with the best bucket plan, found by removing each cost in turn.

Limit = Literal["compute", "differences", "latency", "bandwidth", "last bucket"]

_MIN_SHARE: Final = 0.02
"""Smallest share of the step for something to be called its limit."""
_MAX_IDLE_WAIT_SHARE: Final = 0.1
"""The last all-reduce found the link idle if it waited for less than this share of its duration."""


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
        gain_if_equal_ranks: share by which the step would be shorter if all ranks were equally fast; NaN if unknown.
        exposed: Share of the step in which communication is exposed, if a better value than the replay's is known.
    """
    typical = work.typical()
    table = [plan]
    replayed = replay(table, typical, costs)
    step_ns = float(replayed.cycle_ns[0, 0])

    def gained(work: ComputeTimes, costs: Costs) -> float:
        # Without a cost no step is longer, whatever rounding makes of it.
        return max(0.0, 1 - float(replay(table, work, costs).cycle_ns[0, 0]) / step_ns)

    collective = costs.collective
    shares = {
        "latency": gained(typical, replace(costs, collective=collective.scale(latency=0.0))),
        "bandwidth": gained(typical, replace(costs, collective=collective.scale(byte_time=0.0))),
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
        communication=gained(typical, replace(costs, collective=collective.scale(latency=0.0, byte_time=0.0))),
        **shares,
    )


def _is_last_bucket_alone(plan: Buckets, work: ComputeTimes, costs: Costs) -> bool:
    drawn = replay_step(plan, work, costs)
    start_ns, end_ns = drawn.start_ns[0], drawn.end_ns[0]  # equal on all ranks
    launched_ns = drawn.launch_ns[:, -1].max()
    waited_ns = start_ns[-1] - launched_ns
    under_way_ns = max(0.0, float(end_ns[:-1].max(initial=0.0) - launched_ns))
    return bool(max(waited_ns, under_way_ns) <= _MAX_IDLE_WAIT_SHARE * (end_ns[-1] - start_ns[-1]))


ChangeKind = Literal["compression", "fewer reductions", "bucket views", "twice the bandwidth", "more ranks"]
"""Kinds of changes. ``compression``: a hook that sends gradients as fp16 or bf16. ``fewer reductions``: ``no_sync``."""

_LESS_WORK: Final[tuple[ChangeKind, ...]] = ("compression", "bucket views", "twice the bandwidth")
"""Kinds that only take work away: no job is slower for that, though a schedule with several lanes may be (Graham,
Bounds on multiprocessing timing anomalies, 1969)."""

_NCCL: Final[tuple[Algorithm, ...]] = ("ring", "tree")
"""Algorithms of NCCL, which uses the faster one."""
_GLOO: Final[tuple[Algorithm, ...]] = ("ring",)


@dataclass(frozen=True, kw_only=True)
class WhatIf:
    """Predicted effect of one change."""

    kind: ChangeKind
    number: int | None
    """Micro-steps per reduction, or the number of ranks; None for other changes."""
    algorithm: Algorithm | None
    """Algorithm of all-reduces of that many ranks; None for other changes."""
    step_ns: float
    """Mean step with the best size for the change; mean micro-step if some steps are not reduced."""
    gain: float
    """Gain over the best size without the change, as a share; negative for a loss."""
    cap_mb: float | None
    """Best size for the change; None for DDP's default."""


def predict_changes(
    sizes: PredictedSizes, present: Buckets, work: ComputeTimes, costs: Costs, measured: MeasuredSteps | None = None
) -> tuple[WhatIf, ...]:
    """Predict all changes that make sense for this job.

    Args:
        sizes: Sizes to choose from, and DDP's default.
        present: Plan of the job.
        measured: Measurement that predictions are relative to, if there is one.
    """
    best = _BestSize(sizes, present, work, costs, measured)
    cost = costs.collective
    found = [best.changed("compression", replace(costs, collective=cost.halve_bytes()))]
    alone_ns = best.steps_ns(replace(costs, collective=cost.scale(latency=0.0, byte_time=0.0))).min()
    for every in (2, 4):
        step_ns = float(best.step_ns + (every - 1) * alone_ns) / every
        found.append(
            WhatIf(
                kind="fewer reductions",
                number=every,
                algorithm=None,
                step_ns=step_ns,
                gain=1 - step_ns / best.step_ns,
                cap_mb=best.cap_mb,
            )
        )
    if ZERO_COST not in (costs.copy_in, costs.copy_out):
        found.append(best.changed("bucket views", replace(costs, copy_in=ZERO_COST, copy_out=ZERO_COST)))
    found.append(best.changed("twice the bandwidth", replace(costs, collective=cost.scale(byte_time=0.5))))
    for times in (2, 4):
        ranks = times * cost.world_size
        ways = [
            best.changed("more ranks", replace(costs, collective=cost.extrapolate(ranks, algorithm)), ranks, algorithm)
            for algorithm in list_algorithms(costs)
        ]
        found.append(min(ways, key=lambda way: way.step_ns))
    return tuple(found)


def list_algorithms(costs: Costs) -> tuple[Algorithm, ...]:
    """Return the algorithms that the backend may use for an all-reduce; it uses the fastest."""
    return _GLOO if costs.lanes > 1 else _NCCL


class _BestSize:
    """Selection of the best size under changed costs."""

    def __init__(
        self,
        sizes: PredictedSizes,
        present: Buckets,
        work: ComputeTimes,
        costs: Costs,
        measured: MeasuredSteps | None,
    ) -> None:
        self._sizes, self._work, self._costs, self._measured = sizes.sizes, work, costs, measured
        plans = [present, sizes.default.buckets, *(size.buckets for size in sizes.sizes)]
        self._table = build_table(plans, work.gradients)
        steps_ns = self.steps_ns(costs)
        self._row = self._find_best(steps_ns)
        self.step_ns, self.cap_mb = float(steps_ns[self._row]), self._cap_mb(self._row)

    def steps_ns(self, costs: Costs) -> Float64Array:
        """Return the mean steps with the present plan, DDP's default and each size (2 + Q,)."""
        return predict_steps(self._table, self._work, costs, self._costs, self._measured).step_ns

    def changed(
        self, kind: ChangeKind, costs: Costs, number: int | None = None, algorithm: Algorithm | None = None
    ) -> WhatIf:
        steps_ns = self.steps_ns(costs)
        # Not another plan that is slower than today's, because DDP's default is preferred to gains of less than 1 %.
        row = min(self._find_best(steps_ns), self._row, key=lambda row: float(steps_ns[row]))
        step_ns = float(steps_ns[row])
        if kind in _LESS_WORK:
            step_ns = min(step_ns, self.step_ns)
        gain = 1 - step_ns / self.step_ns
        cap_mb = self._cap_mb(row)
        return WhatIf(kind=kind, number=number, algorithm=algorithm, step_ns=step_ns, gain=gain, cap_mb=cap_mb)

    def _find_best(self, steps_ns: Float64Array) -> int:
        """Return the row of the best size or of DDP's default."""
        present_ns, default_ns, *sizes_ns = steps_ns.tolist()
        fastest = find_fastest(self._sizes, np.array(sizes_ns))
        return 1 if prefers_default(default_ns, sizes_ns[fastest], present_ns) else 2 + fastest

    def _cap_mb(self, row: int) -> float | None:
        return None if row == 1 else self._sizes[row - 2].cap_mb
