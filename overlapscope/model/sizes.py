"""Bucket sizes that are worth predicting, and the predicted step time of each.

Everything that chooses among plans begins here: the recommendation for a recording, the page of bucket sizes, and
``bucket_cap_mb="auto"``. The best plan of all, which need not be that of a single size, is ``search.best_plan``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from overlapscope.model.partition import Float64Array
from overlapscope.model.plan import UniformPlan, default_plan, uniform_plans
from overlapscope.model.schedule import Costs, replay
from overlapscope.model.work import ComputeTimes

MIN_GAIN: Final = 0.01
"""Smallest share of the step that is worth a change."""

_MAX_SIZES: Final = 250
_MAX_BUCKETS: Final = 100
"""Number of buckets above which sizes are not considered: latency alone makes them slow."""


@dataclass(frozen=True, eq=False, kw_only=True)
class PredictedSizes:
    """Predicted step times of DDP's default and of Q sizes with different buckets."""

    default: UniformPlan
    default_ns: float
    sizes: tuple[UniformPlan, ...]
    """Plans of the sizes, small caps first."""
    sizes_ns: Float64Array
    """(Q,) step times of the sizes."""

    @property
    def fastest(self) -> int:
        """Return the index of the best size."""
        return int(np.argmin(self.sizes_ns))

    @property
    def best(self) -> UniformPlan:
        """Return the plan of the best size, or the default if no size is better."""
        return self.sizes[self.fastest] if self.sizes_ns[self.fastest] < self.default_ns else self.default

    @property
    def best_ns(self) -> float:
        """Return the step time of ``best``."""
        return min(float(self.sizes_ns[self.fastest]), self.default_ns)


def predict_sizes(work: ComputeTimes, costs: Costs, first_bucket_bytes: int | None = None) -> PredictedSizes:
    """Replay every size that makes a difference.

    Args:
        first_bucket_bytes: Separate limit for the first bucket of each size; DDP's default always has one.
    """
    gradients = work.gradients
    smallest = max(1, gradients.total_bytes // _MAX_BUCKETS)
    default = default_plan(gradients)
    sizes = uniform_plans(gradients, first_bucket_bytes, max_plans=_MAX_SIZES, smallest_cap_bytes=smallest)
    step_ns = replay([plan.buckets for plan in (default, *sizes)], work, costs).typical_ns
    return PredictedSizes(default=default, default_ns=float(step_ns[0]), sizes=sizes, sizes_ns=step_ns[1:])
