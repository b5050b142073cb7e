"""One sentence on where the step time goes, and the figures behind it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import numpy as np
import pandas as pd

from overlapscope.units import format_ns

WARM_UP_STEPS: Final = 3
"""The first step allocates, the second runs with rebuilt buckets, the third is the first that finds all caches warm."""

LITTLE_EXPOSED_SHARE: Final = 0.02
"""Share of the step below which hiding all communication would gain less than steps vary by themselves."""

LONG_DATA_WAIT_SHARE: Final = 0.2
"""Share of the step from which the data loader is worth fixing before communication."""


@dataclass(frozen=True, kw_only=True)
class OverlapSummary:
    """The sentence, and medians over all ranks' steps after the warm-up; all 0 or NaN without a finished step."""

    sentence: str
    ranks: int
    steps_counted: int
    warm_up_steps_left_out: int
    step_time_ns: int
    compute_ns: int
    communication_ns: int
    exposed_ns: int
    data_wait_ns: int
    overlap_ratio: float
    """Median over the steps that communicate; NaN if none does."""
    exposed_share: float
    """``exposed_ns`` over ``step_time_ns``."""
    data_wait_share: float
    """``data_wait_ns`` over ``step_time_ns``."""


def summarise(per_step: pd.DataFrame) -> OverlapSummary:
    """Judge a recording.

    Args:
        per_step: from ``overlap.overlap_by_step``; any selection of ranks and steps will do.
    """
    counted, left_out = after_warm_up(per_step)
    medians = counted.drop(columns=["rank", "step"]).median()
    step_time_ns, compute_ns, communication_ns, exposed_ns, data_wait_ns = (
        _whole(medians[name])
        for name in ("step_time_ns", "compute_ns", "communication_ns", "exposed_ns", "data_wait_ns")
    )
    overlap_ratio = float(medians["overlap_ratio"])
    exposed_share, data_wait_share = (
        part_ns / step_time_ns if step_time_ns else math.nan for part_ns in (exposed_ns, data_wait_ns)
    )
    step = f"each {format_ns(step_time_ns)} step"
    hidden = f"{_percent(overlap_ratio)} of communication hides under compute"
    exposed = f"{format_ns(exposed_ns)} of {step} ({_percent(exposed_share)})"
    if counted.empty:
        sentence = "No step has finished, so there is nothing to measure yet."
    elif math.isnan(overlap_ratio):
        steps = f"steps of {format_ns(step_time_ns)}"
        sentence = f"No communication was recorded in {steps}, so there is no overlap to measure."
    elif data_wait_share >= LONG_DATA_WAIT_SHARE and data_wait_ns > exposed_ns:
        sentence = (
            f"{format_ns(data_wait_ns)} of {step} ({_percent(data_wait_share)}) is spent waiting for data, "
            f"{format_ns(exposed_ns)} ({_percent(exposed_share)}) for communication; {hidden}."
        )
    elif exposed_share < LITTLE_EXPOSED_SHARE:
        sentence = f"{hidden}; only {exposed} is spent waiting for it, so there is little left to gain."
    elif communication_ns > compute_ns:
        sentence = (
            f"Communication takes {format_ns(communication_ns)} and compute {format_ns(compute_ns)}, so it can't all "
            f"hide: {hidden}, and {exposed} is spent waiting for it."
        )
    else:
        sentence = f"{hidden}; {exposed} is spent waiting for it."
    return OverlapSummary(
        sentence=sentence,
        ranks=counted["rank"].nunique(),
        steps_counted=counted["step"].nunique(),
        warm_up_steps_left_out=left_out,
        step_time_ns=step_time_ns,
        compute_ns=compute_ns,
        communication_ns=communication_ns,
        exposed_ns=exposed_ns,
        data_wait_ns=data_wait_ns,
        overlap_ratio=overlap_ratio,
        exposed_share=exposed_share,
        data_wait_share=data_wait_share,
    )


def after_warm_up(per_step: pd.DataFrame) -> tuple[pd.DataFrame, int]:
    """Leave out the first steps, on all ranks the same ones, as long as more than half of them remain.

    Returns:
        The rows that remain, and how many steps were left out.
    """
    numbers = np.unique(per_step["step"])
    left_out = _warm_up_steps(len(numbers))
    return per_step[~per_step["step"].isin(numbers[:left_out])], left_out


def first_step_after_warm_up(steps: pd.DataFrame) -> int:
    """The number of the first step that counts; 0 if there are no steps."""
    numbers = np.unique(steps["step"])
    return int(numbers[_warm_up_steps(len(numbers))]) if len(numbers) else 0


def _warm_up_steps(steps: int) -> int:
    return min(WARM_UP_STEPS, max(0, steps - 1) // 2)


def _percent(share: float) -> str:
    """A share for a sentence. 100 % and 0 % only if exact."""
    if 0 < share < 0.01:
        return "<1 %"
    if 0.99 < share < 1:
        return "99 %"
    return f"{100 * share:.0f} %"


def _whole(nanoseconds: float) -> int:
    return 0 if math.isnan(nanoseconds) else round(nanoseconds)
