"""What-ifs as accounts: what a change takes off each block of a step.

A replay says how long a cycle would be and what each rank would do in it. What the cycle is shorter by more than ranks
do less is communication that is exposed for less: so the blocks of a saving sum to it.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from overlapscope.account.blocks import BLOCKS
from overlapscope.account.intervals import Float64Array, Int64Array
from overlapscope.account.mean_step import MeanStep, mean_step_of
from overlapscope.account.means import mean_of
from overlapscope.analysis.cycles import CAUSES
from overlapscope.analysis.replay import Replay, Times
from overlapscope.interval import Interval

_BLOCKS: Final = {place: BLOCKS.index(cause) for place, cause in enumerate(CAUSES) if cause in BLOCKS}
"""The others are waits."""


def saving_of(
    replay: Replay, times: Times, cycle_ns: Int64Array, changed: npt.NDArray[np.bool_] | None = None
) -> MeanStep:
    """What all ranks save a step, on average over all cycles.

    Args:
        times: what ranks do instead; if of one rank, then all do that.
        cycle_ns: (S,) how long cycles last then.
        changed: (S,) the cycles in which anything changes, if not in all: how much varies, and the interval says how
            sure its mean is. Which they are is known.
    """
    changed = np.ones(len(cycle_ns), dtype=bool) if changed is None else changed
    return mean_step_of(_saved_ns(replay, times, cycle_ns)[changed]).times(float(changed.mean()))


def mean_over_cycles(values_ns: Int64Array, changed: npt.NDArray[np.bool_]) -> Interval:
    """The mean of values (S,) that are 0 in all cycles but those ``changed``, with an interval like ``saving_of``."""
    (mean,) = mean_of(values_ns[changed, None].astype(np.float64))
    return mean.times(float(changed.mean()))


def _saved_ns(replay: Replay, times: Times, cycle_ns: Int64Array) -> Float64Array:
    """(S, len(BLOCKS)) by cycle."""
    recorded = replay.recorded
    saved_ns = np.zeros((len(cycle_ns), len(BLOCKS)))
    for place, block in _BLOCKS.items():
        saved_ns[:, block] = recorded.own_ns[place].mean(axis=1) - times.own_ns[place].mean(axis=1)
    saved_ns[:, BLOCKS.index("buffers")] = recorded.buffers_ns.mean(axis=1) - times.buffers_ns.mean(axis=1)
    saved_ns[:, BLOCKS.index("exposed")] = replay.recorded_ns - cycle_ns - saved_ns.sum(axis=1)
    return saved_ns
