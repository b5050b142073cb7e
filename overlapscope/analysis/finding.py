"""What a straggler analysis finds: one thing that is wrong, its evidence, and what it costs."""

from __future__ import annotations

from dataclasses import dataclass

from overlapscope.account.intervals import Int64Array
from overlapscope.account.mean_step import MeanStep
from overlapscope.analysis.patterns import DelayPattern
from overlapscope.interval import Interval


@dataclass(frozen=True, kw_only=True)
class SlowLink:
    """One direction of a link that is slower than the others, as the kernel counted it."""

    rank: int
    """Sends."""
    peer_rank: int
    """Receives."""
    bytes_per_s: float
    """While it had something to send."""
    usual_bytes_per_s: float
    """The median rate of the other links."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Finding:
    """One thing that is wrong. Times are nanoseconds, per step unless stated otherwise."""

    ranks: tuple[int, ...]
    """The late ranks; empty if no rank is to blame."""
    host: str | None
    """The host, if all its ranks are late in the same way."""
    link: SlowLink | None
    """The link, if it is one."""
    cause: str
    """One of ``cycles.BLAMED``; ``link``; or ``transfer``: all have arrived, and all-reduces take long."""
    parts_ns: dict[str, float]
    """By cause of ``cycles.CAUSES``: the mean delay in the delayed steps."""
    compared_with: str
    """Whom the late ranks are compared with, in words."""
    pattern: DelayPattern
    steps: Int64Array
    """The delayed ones."""
    worst_step: int
    """The one with the longest delay."""
    delay_ns: float
    """Mean in the delayed steps."""
    cost: Interval
    """What it adds to a step on average over all that were compared, if nothing else is wrong; of fewer than three
    delayed steps the interval is unknown."""
    saving: MeanStep
    """What fixing this alone would take off; less than the cost if another rank is as late."""
    cost_share: float
    """Of the mean step."""
