"""Which plans to try, and which of those tried to keep. Pure functions of what was measured."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from overlapscope.model.fit import fit
from overlapscope.model.observation import Observations
from overlapscope.model.partition import Buckets, Float64Array, Int64Array
from overlapscope.model.plan import UniformPlan, caps_mb_of, caps_setting
from overlapscope.model.schedule import replay
from overlapscope.model.search import best_plan
from overlapscope.model.sizes import LEAST_GAIN, PredictedSizes, predict_sizes

_RIVAL_WITHIN: Final = 0.03
"""Difference below which predictions of two sizes may be in the wrong order."""
_RIVAL_FACTOR: Final = 2.0
"""A size that is not so many times as large or small is much the same."""

MOST_STEPS: Final = 30
"""For trying all of them."""
STEPS_IN_A_BLOCK: Final = 3
"""The first does not count: the buffers of the plan are new, and the copies of the one before end in it."""


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A plan that is to be tried."""

    buckets: Buckets
    setting: str
    """The plan as an argument of DistributedDataParallel."""
    predicted_ns: float
    """Predicted step time of the plan."""


def candidates_of(observations: Observations, in_force: Buckets, lanes: int) -> list[Candidate]:
    """The plans worth trying, the current one first; it alone if the others promise nothing.

    Args:
        lanes: how many all-reduces the backend runs at a time.

    Raises:
        OverlapScopeError: nothing tells what an all-reduce costs.
    """
    fitted = fit(observations, lanes=lanes)
    sizes = predict_sizes(fitted.work, fitted.costs)
    best = sizes.best
    free = best_plan(fitted.work, fitted.costs, also=[best.buckets, in_force])
    in_force_ns, free_ns = replay([in_force, free], fitted.work, fitted.costs).typical_ns.tolist()
    found = [
        Candidate(buckets=size.buckets, setting=size.setting, predicted_ns=size_ns)
        for size, size_ns in ((best, sizes.best_ns), *_rivals(sizes))
    ]
    if free_ns < (1 - LEAST_GAIN) * sizes.best_ns:  # the best of many predictions is too good by chance
        found.append(Candidate(buckets=free, setting=_setting(free, sizes, observations), predicted_ns=free_ns))
    current = Candidate(buckets=in_force, setting=_setting(in_force, sizes, observations), predicted_ns=in_force_ns)
    if min(each.predicted_ns for each in found) > (1 - LEAST_GAIN) * in_force_ns:
        return [current]
    others = {each.buckets: each for each in found[::-1] if each.buckets != in_force}
    return [current, *list(others.values())[::-1]]


def trial_blocks(candidates: int) -> Int64Array:
    """(steps,) which candidate each step runs with: blocks of some steps, forwards and backwards in turn.

    Drift affects all alike.
    """
    count = MOST_STEPS // (candidates * STEPS_IN_A_BLOCK)
    rounds = [np.arange(candidates)[:: 1 if number % 2 == 0 else -1] for number in range(count)]
    blocks: Int64Array = np.repeat(np.concatenate(rounds), STEPS_IN_A_BLOCK)
    return blocks


def step_times_ns(length_ns: Float64Array, candidate: Int64Array, candidates: int) -> Float64Array:
    """The median step time of each candidate, without the first step of each block. NaN if it was never seen.

    Args:
        length_ns: (steps,) NaN for one that was not seen.
        candidate: (steps,) as ``trial_blocks`` gives it.
    """
    is_first = np.diff(candidate, prepend=-1) != 0
    counted = ~is_first & ~np.isnan(length_ns)
    return np.array(
        [
            np.median(chosen) if len(chosen := length_ns[counted & (candidate == each)]) else np.nan
            for each in range(candidates)
        ]
    )


def fastest(measured_ns: Float64Array) -> int:
    """The candidate to keep: the first, which was used before, unless another one is really faster."""
    if np.isnan(measured_ns[0]) or np.isnan(measured_ns).all():
        return 0
    best = int(np.nanargmin(measured_ns))
    return best if measured_ns[best] < (1 - LEAST_GAIN) * measured_ns[0] else 0


def _rivals(sizes: PredictedSizes) -> list[tuple[UniformPlan, float]]:
    """Of the sizes that are quite another than the best, the next best, if it is nearly as good."""
    plans, step_ns = (sizes.default, *sizes.sizes), np.array([sizes.default_ns, *sizes.sizes_ns])
    caps_mb = np.array([size.cap_mb for size in plans])
    is_other = np.abs(np.log(caps_mb / sizes.best.cap_mb)) > np.log(_RIVAL_FACTOR)
    others = np.flatnonzero(is_other & (step_ns < (1 + _RIVAL_WITHIN) * sizes.best_ns))
    return [(plans[place], float(step_ns[place])) for place in others[np.argsort(step_ns[others], kind="stable")][:1]]


def _setting(buckets: Buckets, sizes: PredictedSizes, observations: Observations) -> str:
    for size in (sizes.default, *sizes.sizes):
        if size.buckets == buckets:
            return size.setting
    caps_mb = caps_mb_of(buckets, observations.gradients)
    return "bucket_plan=..." if caps_mb is None else caps_setting(caps_mb)
