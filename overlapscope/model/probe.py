"""Which bucket plans to run for a few steps each, so that a short recording can predict any other.

What an all-reduce costs at a size is known where sizes near it were seen, and latency can't be told from bandwidth at
a single one. So the plans span the sizes that a plan can have. They run in blocks, forwards and then backwards, so
that a machine that gets slower or faster meanwhile affects all plans alike.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from overlapscope.model.partition import NO_LIMIT, Buckets, Gradients, Int64Array, fill
from overlapscope.model.plan import default_plan

STEPS: Final = 24
_PLANS: Final = 5
_FEWEST_STEPS_IN_A_BLOCK: Final = 2
"""Least steps of a plan: in the first one its buffers are new."""
_MOST_BUCKETS: Final = 48
"""Most buckets of a probed plan: a probe should tell much and cost little."""
_SMALLEST_CAP_BYTES: Final = 64 * 1024


@dataclass(frozen=True, eq=False, kw_only=True)
class Probe:
    """Plans and when they run."""

    plans: tuple[Buckets, ...]
    """Distinct ones; the first is DDP's default."""
    plan_of_step: Int64Array
    """(steps,) which plan each step runs with."""


def probe(gradients: Gradients, steps: int = STEPS) -> Probe:
    """Plan a probe. The same on all ranks, as it depends on nothing but its arguments.

    Args:
        steps: how many it may take, 2 or more.
    """
    wanted = max(1, min(_PLANS, (steps // _FEWEST_STEPS_IN_A_BLOCK + 1) // 2))
    plans = _spanning_plans(gradients)[:wanted]
    visits = [*range(len(plans)), *range(len(plans) - 2, -1, -1)]
    lengths = np.full(len(visits), steps // len(visits))
    # What is left over goes to the outer blocks, equally both ways, and to the middle one.
    left = steps - int(lengths.sum())
    for place in range(left // 2):
        lengths[[place, -1 - place]] += 1
    lengths[len(visits) // 2] += left % 2
    return Probe(plans=tuple(plans), plan_of_step=np.repeat(visits, lengths).astype(np.int64))


def _spanning_plans(gradients: Gradients) -> list[Buckets]:
    """DDP's default, one bucket, many small ones, and what lies between, the most telling first."""
    smallest = max(_SMALLEST_CAP_BYTES, gradients.total_bytes // _MOST_BUCKETS)
    caps = np.geomspace(smallest, max(smallest, gradients.total_bytes / 2), _PLANS * 2 - 1).astype(np.int64)
    first = [default_plan(gradients).buckets, fill(gradients, [int(smallest)]), fill(gradients, [NO_LIMIT])]
    middle_first = sorted(range(len(caps)), key=lambda place: (place % 3 != 1, abs(place - len(caps) // 2)))
    plans: list[Buckets] = []
    for plan in [*first, *(fill(gradients, [int(caps[place])]) for place in middle_first)]:
        if plan not in plans:
            plans.append(plan)
    return plans
