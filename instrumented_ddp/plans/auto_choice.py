"""Choice of the plans to try, and of the fastest one tried. Pure functions of measurements."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from overlapscope.bucket_model.fit import fit_model
from overlapscope.bucket_model.observation import Observations
from overlapscope.bucket_model.partition import Buckets, Float64Array, Int64Array
from overlapscope.bucket_model.plans import UniformPlan, find_caps_mb, format_caps
from overlapscope.bucket_model.schedule import replay
from overlapscope.bucket_model.search import MIN_GAIN, PredictedSizes, find_best_plan, predict_sizes
from overlapscope.text import format_ns, format_share

_RIVAL_MAX_LOSS: Final = 0.03
"""Relative difference below which predictions of two sizes may be in the wrong order."""
_RIVAL_FACTOR: Final = 2.0
"""Minimum ratio of two sizes that are considered different."""

MAX_TRIAL_STEPS: Final = 30
"""Maximum number of steps for trying all candidates."""
STEPS_PER_BLOCK: Final = 3
"""Number of steps per block. The first one is ignored: buffers are new, and copies of the previous plan end in it."""


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A plan that is to be tried."""

    buckets: Buckets
    setting: str
    """The plan as an argument of DistributedDataParallel."""
    predicted_ns: float
    """Predicted step time of the plan."""


def propose_candidates(observations: Observations, active: Buckets, lanes: int) -> list[Candidate]:
    """Return the plans worth trying, the active one first; it alone if the others are predicted to gain too little.

    Args:
        lanes: number of all-reduces that the backend runs at a time.

    Raises:
        OverlapScopeError: the cost of an all-reduce can't be estimated.
    """
    fitted = fit_model(observations, lanes=lanes)
    sizes = predict_sizes(fitted.work, fitted.costs)
    best = sizes.best
    free = find_best_plan(fitted.work, fitted.costs, also=[best.buckets, active])
    active_ns, free_ns = replay([active, free], fitted.work, fitted.costs).typical_ns.tolist()
    found = [
        Candidate(buckets=size.buckets, setting=size.setting, predicted_ns=size_ns)
        for size, size_ns in ((best, sizes.best_ns), *_rivals(sizes))
    ]
    if free_ns < (1 - MIN_GAIN) * sizes.best_ns:  # the best of many predictions is too good by chance
        found.append(Candidate(buckets=free, setting=_setting(free, sizes, observations), predicted_ns=free_ns))
    current = Candidate(buckets=active, setting=_setting(active, sizes, observations), predicted_ns=active_ns)
    if min(each.predicted_ns for each in found) > (1 - MIN_GAIN) * active_ns:
        return [current]
    others = {each.buckets: each for each in found[::-1] if each.buckets != active}
    return [current, *list(others.values())[::-1]]


def trial_blocks(candidates: int) -> Int64Array:
    """Return (steps,) the candidate of each step: blocks of steps, alternately in ascending and descending order.

    This way drift affects all candidates alike. Two candidates get 000111 111000 000111 111000 000111.
    """
    count = MAX_TRIAL_STEPS // (candidates * STEPS_PER_BLOCK)
    rounds = [np.arange(candidates)[:: 1 if number % 2 == 0 else -1] for number in range(count)]
    blocks: Int64Array = np.repeat(np.concatenate(rounds), STEPS_PER_BLOCK)
    return blocks


def step_times_ns(length_ns: Float64Array, candidate: Int64Array, candidates: int) -> Float64Array:
    """Return the median step time of each candidate, without the first step of each block. NaN if it was never seen.

    Lengths of [9, 5, 6, 7, 3, 4] for candidates [0, 0, 0, 1, 1, 1] have the medians [5.5, 3.5].

    Args:
        length_ns: (steps,) step times; NaN for a step that was not seen.
        candidate: (steps,) candidates as returned by ``trial_blocks``.
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
    """Return the candidate to keep: the first, which was active before, unless another one is significantly faster."""
    if np.isnan(measured_ns[0]) or np.isnan(measured_ns).all():
        return 0
    best = int(np.nanargmin(measured_ns))
    return best if measured_ns[best] < (1 - MIN_GAIN) * measured_ns[0] else 0


def _rivals(sizes: PredictedSizes) -> list[tuple[UniformPlan, float]]:
    """Return the next best of the sizes that differ much from the best, if it is nearly as good."""
    plans, step_ns = (sizes.default, *sizes.sizes), np.array([sizes.default_ns, *sizes.sizes_ns])
    caps_mb = np.array([size.cap_mb for size in plans])
    is_other = np.abs(np.log(caps_mb / sizes.best.cap_mb)) > np.log(_RIVAL_FACTOR)
    others = np.flatnonzero(is_other & (step_ns < (1 + _RIVAL_MAX_LOSS) * sizes.best_ns))
    return [(plans[index], float(step_ns[index])) for index in others[np.argsort(step_ns[others], kind="stable")][:1]]


def _setting(buckets: Buckets, sizes: PredictedSizes, observations: Observations) -> str:
    for size in (sizes.default, *sizes.sizes):
        if size.buckets == buckets:
            return size.setting
    caps_mb = find_caps_mb(buckets, observations.gradients)
    return "bucket_plan=..." if caps_mb is None else format_caps(caps_mb)


# Decisions on bucket plans and their reasons, for the recording and as a sentence.


@dataclass(frozen=True, kw_only=True)
class PlanTrial:
    """A plan that was considered."""

    setting: str
    """The plan as an argument of DistributedDataParallel."""
    buckets: int
    """Number of buckets."""
    predicted_ns: float | None
    """Predicted step time, if it could be predicted."""
    measured_ns: float | None
    """Median time of some steps, if the plan was tried."""


@dataclass(frozen=True, kw_only=True)
class Decision:
    """One decision of rank 0."""

    after_reductions: int
    """Number of backward passes reduced so far."""
    step: int | None
    """Step of the recording."""
    measured_steps: int
    """Number of steps from which predictions were made."""
    trials: tuple[PlanTrial, ...]
    """The plans considered; the first was active before."""
    chosen: int
    """Index of the trial that was chosen."""
    why: str


def trials_of(candidates: Sequence[Candidate], measured_ns: Float64Array) -> tuple[PlanTrial, ...]:
    """Return what is known about each plan.

    Args:
        measured_ns: measured step time by candidate; NaN for one that was not tried.
    """
    return tuple(
        PlanTrial(
            setting=each.setting,
            buckets=len(each.buckets),
            predicted_ns=_known(each.predicted_ns),
            measured_ns=_known(time_ns),
        )
        for each, time_ns in zip(candidates, measured_ns.tolist(), strict=True)
    )


def _known(time_ns: float) -> float | None:
    return None if math.isnan(time_ns) else time_ns


def describe_choice(trials: Sequence[PlanTrial], chosen: int) -> str:
    """Return the reason for a choice as a sentence."""
    before, best = trials[0], trials[chosen]
    if len(trials) == 1:
        return f"{before.setting} stays: no other plan was predicted to gain {format_share(MIN_GAIN)} of a step"
    tried = [trial for trial in trials[1:] if trial.measured_ns is not None]
    if before.measured_ns is None or not tried:
        return f"{before.setting} stays: too few steps could be measured to compare it with others"
    if chosen:
        assert best.measured_ns is not None
        gain = format_share(1 - best.measured_ns / before.measured_ns)
        return (
            f"{best.setting} is {gain} faster than {before.setting}: steps of {format_ns(best.measured_ns)} instead of "
            f"{format_ns(before.measured_ns)}, predicted {format_ns(best.predicted_ns)}"
        )
    rival = min(tried, key=lambda trial: trial.measured_ns or 0)
    return (
        f"{before.setting} stays, with steps of {format_ns(before.measured_ns)}: {rival.setting} was predicted to take "
        f"{format_ns(rival.predicted_ns)}, and took {format_ns(rival.measured_ns)}"
    )
