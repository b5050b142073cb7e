"""Selection of bucket plans to run for a few steps each, so that a short recording can predict any other plan.

The cost of an all-reduce of some size is known if similar sizes were recorded, and a single size can't distinguish
latency from bandwidth. So the plans span the sizes that a plan can have. They run in blocks, forward and then backward,
so that a machine that becomes slower or faster meanwhile affects all plans alike.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from overlapscope.bucket_model.partition import NO_LIMIT, Buckets, Gradients, Int64Array, fill_plan
from overlapscope.bucket_model.plans import default_plan

DEFAULT_STEPS: Final = 24
_PLANS: Final = 5
_MIN_STEPS_PER_BLOCK: Final = 2
"""Minimum steps of a plan per block: in the first step its buffers are new."""
_MAX_BUCKETS: Final = 48
"""Maximum number of buckets of a probed plan: a probe should be informative and cheap."""
_SMALLEST_CAP_BYTES: Final = 64 * 1024


@dataclass(frozen=True, eq=False, kw_only=True)
class ProbeSchedule:
    """Plans to probe, and when each runs."""

    plans: tuple[Buckets, ...]
    """Distinct plans; the first is DDP's default."""
    plan_of_step: Int64Array
    """(steps,) index of the plan that each step runs with."""


def plan_probe(gradients: Gradients, steps: int = DEFAULT_STEPS) -> ProbeSchedule:
    """Plan a probe. The result is the same on all ranks, as it depends only on the arguments.

    Example: for 5 plans and 24 steps, the plans run in the order 0, 1, 2, 3, 4, 3, 2, 1, 0 for 3, 3, 3, 2, 2, 2, 3, 3,
    3 steps.

    Args:
        steps: Maximum number of steps, 2 or more.
    """
    wanted = max(1, min(_PLANS, (steps // _MIN_STEPS_PER_BLOCK + 1) // 2))
    plans = _spanning_plans(gradients)[:wanted]
    visits = [*range(len(plans)), *range(len(plans) - 2, -1, -1)]
    lengths = np.full(len(visits), steps // len(visits))
    # The remaining steps go to the outer blocks, symmetrically, and to the middle one.
    left = steps - int(lengths.sum())
    for index in range(left // 2):
        lengths[[index, -1 - index]] += 1
    lengths[len(visits) // 2] += left % 2
    return ProbeSchedule(plans=tuple(plans), plan_of_step=np.repeat(visits, lengths).astype(np.int64))


def _spanning_plans(gradients: Gradients) -> list[Buckets]:
    """Return DDP's default, one bucket, many small ones, and plans in between, the most informative first."""
    smallest = max(_SMALLEST_CAP_BYTES, gradients.total_bytes // _MAX_BUCKETS)
    caps = np.geomspace(smallest, max(smallest, gradients.total_bytes / 2), _PLANS * 2 - 1).astype(np.int64)
    first = [default_plan(gradients).buckets, fill_plan(gradients, [int(smallest)]), fill_plan(gradients, [NO_LIMIT])]
    middle_first = sorted(range(len(caps)), key=lambda index: (index % 3 != 1, abs(index - len(caps) // 2)))
    plans: list[Buckets] = []
    for plan in [*first, *(fill_plan(gradients, [int(caps[index])]) for index in middle_first)]:
        if plan not in plans:
            plans.append(plan)
    return plans
