"""Which plans to try, and which of those that were tried to keep. Pure functions of what was measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from overlapscope.model.fit import fit
from overlapscope.model.observation import Observations
from overlapscope.model.partition import Buckets, Float64Array, Int64Array
from overlapscope.model.plan import UniformPlan, caps_mb_of, caps_setting, default_plan, uniform_plans
from overlapscope.model.schedule import replay
from overlapscope.model.search import best_plan

LEAST_GAIN: Final = 0.01
"""A plan that is not faster by this share of the step is not worth a change."""
_RIVAL_WITHIN: Final = 0.03
"""Predictions of two sizes this close may be in the wrong order."""
_RIVAL_FACTOR: Final = 2.0
"""A size that is not so many times as large or small is much the same."""
_MOST_BUCKETS: Final = 100
_SIZES_TRIED: Final = 250

MOST_STEPS: Final = 30
"""For trying all of them."""
STEPS_IN_A_TURN: Final = 3
"""The first does not count: the buffers of the plan are new, and the copies of the one before end in it."""


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A plan that is to be tried."""

    buckets: Buckets
    setting: str
    """As an argument of DistributedDataParallel."""
    predicted_ns: float
    """Its step time."""


def candidates_of(observations: Observations, in_force: Buckets, lanes: int) -> list[Candidate]:
    """The plans that are worth a try, the one in force first; it alone if the others promise nothing.

    Args:
        lanes: how many all-reduces the backend runs at a time.

    Raises:
        OverlapScopeError: there is nothing that tells what an all-reduce costs.
    """
    fitted = fit(observations, lanes=lanes)
    gradients = fitted.work.gradients
    smallest = max(1, gradients.total_bytes // _MOST_BUCKETS)
    sizes = [
        default_plan(gradients),
        *uniform_plans(gradients, at_most=_SIZES_TRIED, smallest_cap_bytes=smallest),
    ]
    sizes_ns = replay([size.buckets for size in sizes], fitted.work, fitted.costs).typical_ns
    best = int(np.argmin(sizes_ns))
    free = best_plan(fitted.work, fitted.costs, also=[sizes[best].buckets, in_force])
    in_force_ns, free_ns = replay([in_force, free], fitted.work, fitted.costs).typical_ns.tolist()
    current = Candidate(buckets=in_force, setting=_setting(in_force, sizes, observations), predicted_ns=in_force_ns)
    found = [_of_size(sizes[place], sizes_ns[place]) for place in (best, *_rivals(sizes, sizes_ns, best))]
    if free_ns < (1 - LEAST_GAIN) * sizes_ns[best]:  # the best of many predictions is too good by chance
        found.append(Candidate(buckets=free, setting=_setting(free, sizes, observations), predicted_ns=free_ns))
    if min(each.predicted_ns for each in found) > (1 - LEAST_GAIN) * in_force_ns:
        return [current]
    others = {each.buckets: each for each in found[::-1] if each.buckets != in_force}
    return [current, *list(others.values())[::-1]]


def turns_of(candidates: int) -> Int64Array:
    """(steps,) which candidate each step runs with: turns of some steps, forwards and backwards in turn.

    What drifts meets all alike.
    """
    count = MOST_STEPS // (candidates * STEPS_IN_A_TURN)
    rounds = [np.arange(candidates)[:: 1 if number % 2 == 0 else -1] for number in range(count)]
    turns: Int64Array = np.repeat(np.concatenate(rounds), STEPS_IN_A_TURN)
    return turns


def step_times_ns(length_ns: Float64Array, candidate: Int64Array, candidates: int) -> Float64Array:
    """The median step time of each candidate, without the first step of each turn. NaN if it was never seen.

    Args:
        length_ns: (steps,) NaN for one that was not seen.
        candidate: (steps,) as ``turns_of`` gives it.
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
    """The candidate to keep: the first, which was in force before, unless another one is really faster."""
    if np.isnan(measured_ns[0]) or np.isnan(measured_ns).all():
        return 0
    best = int(np.nanargmin(measured_ns))
    return best if measured_ns[best] < (1 - LEAST_GAIN) * measured_ns[0] else 0


def _rivals(sizes: Sequence[UniformPlan], sizes_ns: Float64Array, best: int) -> list[int]:
    """Of the sizes that are quite another than the best, the next best, if it is nearly as good."""
    caps_mb = np.array([size.cap_mb for size in sizes])
    is_other = np.abs(np.log(caps_mb / caps_mb[best])) > np.log(_RIVAL_FACTOR)
    is_close = sizes_ns < (1 + _RIVAL_WITHIN) * sizes_ns[best]
    others = np.flatnonzero(is_other & is_close)
    return [int(others[np.argmin(sizes_ns[others])])] if len(others) else []


def _of_size(size: UniformPlan, step_ns: float) -> Candidate:
    setting = "bucket_cap_mb=None" if size.is_default else caps_setting([size.cap_mb])
    return Candidate(buckets=size.buckets, setting=setting, predicted_ns=float(step_ns))


def _setting(buckets: Buckets, sizes: Sequence[UniformPlan], observations: Observations) -> str:
    for size in sizes:
        if size.buckets == buckets:
            return _of_size(size, np.nan).setting
    caps_mb = caps_mb_of(buckets, observations.gradients)
    return "bucket_plan=..." if caps_mb is None else caps_setting(caps_mb)
