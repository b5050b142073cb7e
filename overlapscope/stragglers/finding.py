"""Findings of the straggler analysis: one problem each, with its evidence and its cost."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from overlapscope.breakdown.breakdown import BLOCKS
from overlapscope.breakdown.means import MeanStep, compute_mean_step
from overlapscope.breakdown.spans import Float64Array, Int64Array
from overlapscope.interval import Interval
from overlapscope.machine.evidence import MachineEvidence
from overlapscope.stragglers.cycles import CAUSES
from overlapscope.stragglers.patterns import DelayPattern
from overlapscope.stragglers.replay import Replay, Times

# What-if savings as breakdowns: the time that a change saves in each block of a step.
#
# A replay gives the length of a cycle and the times of each rank in it. What the cycle gets shorter by, beyond the
# time that ranks save, is communication that is exposed for less: so the blocks of a saving sum to it.

_BLOCKS: Final = {index: BLOCKS.index(cause) for index, cause in enumerate(CAUSES) if cause in BLOCKS}
"""Index in ``BLOCKS`` of each cause that is a block. The other blocks are waits."""


def compute_saving(
    replay: Replay, times: Times, cycle_ns: Int64Array, changed: npt.NDArray[np.bool_] | None = None
) -> MeanStep:
    """Return what all ranks save per step, on average over all cycles.

    Args:
        times: Times of the ranks after the change; if of one rank, then all have these.
        cycle_ns: (S,) Length of cycles after the change.
        changed: (S,) The cycles in which anything changes, by default all. The interval covers how much changes in
            these; which cycles they are is known.
    """
    changed = np.ones(len(cycle_ns), dtype=bool) if changed is None else changed
    saving = compute_mean_step(_compute_saved_ns(replay, times, cycle_ns)[changed])
    recorded_ns = float(replay.recorded_ns[changed].mean()) if changed.any() else math.nan
    return saving.bounded_by(recorded_ns).times(float(changed.mean()))


def _compute_saved_ns(replay: Replay, times: Times, cycle_ns: Int64Array) -> Float64Array:
    """Return the saving of each cycle by block (S, len(BLOCKS))."""
    recorded = replay.recorded
    saved_ns = np.zeros((len(cycle_ns), len(BLOCKS)))
    for index, block in _BLOCKS.items():
        saved_ns[:, block] = recorded.local_ns[index].mean(axis=1) - times.local_ns[index].mean(axis=1)
    saved_ns[:, BLOCKS.index("buffers")] = recorded.buffers_ns.mean(axis=1) - times.buffers_ns.mean(axis=1)
    saved_ns[:, BLOCKS.index("exposed")] = replay.recorded_ns - cycle_ns - saved_ns.sum(axis=1)
    return saved_ns


@dataclass(frozen=True, kw_only=True)
class SlowLink:
    """One direction of a link that is slower than the others, by counters of the kernel."""

    rank: int
    """Rank that sends."""
    peer_rank: int
    """Rank that receives."""
    bytes_per_s: float
    """Rate while there was something to send."""
    usual_bytes_per_s: float
    """Median rate of the other links."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Finding:
    """One problem of a job. Times are nanoseconds, per step unless stated otherwise."""

    ranks: tuple[int, ...]
    """The late ranks; empty if no rank is to blame."""
    host: str | None
    """The host, if all its ranks are late in the same way."""
    link: SlowLink | None
    """The link, if one is to blame."""
    cause: str
    """One of ``cycles.BLAMED``; ``link``; or ``transfer``: all ranks have arrived, and all-reduces still take long."""
    parts_ns: dict[str, float]
    """Mean delay in the delayed steps by cause of ``cycles.CAUSES``."""
    compared_with: str
    """Reference that the late ranks are compared with, in words."""
    pattern: DelayPattern
    steps: Int64Array
    """The delayed steps."""
    worst_step: int
    """The step with the longest delay."""
    delay_ns: float
    """Mean delay in the delayed steps."""
    added_ns: float
    """Time that it would add to a step if nothing else were wrong, on average over all compared steps. What is worth
    reporting, and in which order, depends on it: two ranks that are equally late add the same, and neither has a
    saving."""
    saving: MeanStep
    """Saving per step, on average over the compared steps; of ranks that are late in every step, over the steady ones.
    The interval is unknown with fewer than three delayed steps."""
    step_ns: float
    """Mean time of the steps that the saving is a mean over."""
    lateness_ns: float | None = None
    """Mean lateness of ranks that are late in every step, whatever its causes; None of anything else."""
    machine: tuple[MachineEvidence, ...] = ()
    """What the machine said of the late ranks in the delayed steps, the most telling first."""

    @property
    def saving_share(self) -> float:
        """Return the saving as a share of the time of the steps that it is a mean over."""
        return self.saving.step.value / self.step_ns

    @property
    def saving_in_delayed_steps(self) -> Interval:
        """Return the saving in each of the delayed steps."""
        return self.saving.step.times(1 / float(self.pattern.where.mean()))

    @property
    def is_actionable(self) -> bool:
        """Return False for some slow transfers of unknown cause, about which there is nothing to do."""
        return self.pattern.kind != "transient" or bool(self.ranks)
