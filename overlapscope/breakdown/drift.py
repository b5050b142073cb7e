"""Drift of the step time: whether steps get longer or shorter over a recording, and which of the last are steady.

A mean over such steps is a mean of different things, and no interval makes it a statement about the next step.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import numpy as np

from overlapscope.breakdown.spans import Float64Array, Int64Array

MIN_DRIFT_SHARE: Final = 0.1
"""Minimum change of the step time from the first to the last third, as a share of its median."""
_MIN_DRIFT_SIGMAS: Final = 3.0
"""Minimum change, in standard deviations of single steps without the drift."""
_MIN_STEPS: Final = 12
"""Minimum number of steps in which a drift can be told from noise."""
_ENDS: Final = 8
"""The step time at either end is the median of that part of the steps."""
_FIRST: Final = 3
"""Number of steps at the beginning of the steady ones that have to be like them already."""
_TRIES: Final = 16
"""Number of places at which the steady steps may begin."""
_MAD_TO_SIGMA: Final = 1.4826


@dataclass(frozen=True, kw_only=True)
class Drift:
    """A step time that rises or falls over a recording."""

    first_ns: float
    """Step time of the first steps."""
    last_ns: float
    """Step time of the last steps."""
    steady: tuple[int, int] | None
    """First and last of the steps at the end that do not drift; None if there are too few."""


def find_drift(steps: Int64Array, step_time_ns: Float64Array) -> Drift | None:
    """Find whether the step time drifts.

    Example: of 40 steps that fall from 600 ms to 180 ms until step 15 and stay there, the steady ones are 15 to 39.

    Args:
        steps: (S,) Numbers of the steps, ascending.
        step_time_ns: (S,) Their times.
    """
    count = len(steps)
    if count < _MIN_STEPS or not _is_drift(*(whole := _measure(step_time_ns)), step_time_ns):
        return None
    steady = None
    for begin in np.unique(np.linspace(0, count - _MIN_STEPS, _TRIES + 1).astype(np.int64)[1:]).tolist():
        rest = step_time_ns[begin:]
        change_ns, noise_ns = _measure(rest)
        # A tenth of steps that rise all the way rises by a tenth as much, which is little, and not steady.
        in_proportion_ns = whole[0] * len(rest) / count
        is_level = not _is_drift(change_ns, noise_ns, rest) and change_ns <= max(noise_ns, in_proportion_ns / 3)
        first_ns = abs(float(np.median(rest[:_FIRST]) - np.median(rest)))
        if is_level and not _is_drift(first_ns, noise_ns, rest):
            steady = (int(steps[begin]), int(steps[-1]))
            break
    end = max(1, count // _ENDS)
    return Drift(
        first_ns=float(np.median(step_time_ns[:end])), last_ns=float(np.median(step_time_ns[-end:])), steady=steady
    )


def _measure(step_time_ns: Float64Array) -> tuple[float, float]:
    """Return the change from the first third to the last, and the noise of single steps."""
    third = len(step_time_ns) // 3
    change_ns = abs(float(np.median(step_time_ns[-third:]) - np.median(step_time_ns[:third])))
    # Differences of neighbors hardly contain the drift.
    noise_ns = _MAD_TO_SIGMA * float(np.median(np.abs(np.diff(step_time_ns)))) / math.sqrt(2)
    return change_ns, noise_ns


def _is_drift(change_ns: float, noise_ns: float, step_time_ns: Float64Array) -> bool:
    return change_ns > max(MIN_DRIFT_SHARE * float(np.median(step_time_ns)), _MIN_DRIFT_SIGMAS * noise_ns)
