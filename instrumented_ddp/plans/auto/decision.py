"""Decisions on bucket plans and their reasons, for the recording and as a sentence."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from instrumented_ddp.plans.auto.choice import Candidate
from overlapscope.model.partition import Float64Array
from overlapscope.model.sizes import MIN_GAIN
from overlapscope.units import format_ns, format_share


@dataclass(frozen=True, kw_only=True)
class Trial:
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
    trials: tuple[Trial, ...]
    """The plans considered; the first was active before."""
    chosen: int
    """Index of the trial that was chosen."""
    why: str


def trials_of(candidates: Sequence[Candidate], measured_ns: Float64Array) -> tuple[Trial, ...]:
    """Return what is known about each plan.

    Args:
        measured_ns: measured step time by candidate; NaN for one that was not tried.
    """
    return tuple(
        Trial(
            setting=each.setting,
            buckets=len(each.buckets),
            predicted_ns=_known(each.predicted_ns),
            measured_ns=_known(time_ns),
        )
        for each, time_ns in zip(candidates, measured_ns.tolist(), strict=True)
    )


def _known(time_ns: float) -> float | None:
    return None if math.isnan(time_ns) else time_ns


def describe_choice(trials: Sequence[Trial], chosen: int) -> str:
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
