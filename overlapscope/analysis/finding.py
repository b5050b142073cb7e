"""Findings of the straggler analysis: one problem each, with its evidence and its cost."""

from __future__ import annotations

from dataclasses import dataclass

from overlapscope.account.intervals import Int64Array
from overlapscope.account.mean_step import MeanStep
from overlapscope.analysis.patterns import DelayPattern
from overlapscope.interval import Interval


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
    cost: Interval
    """Time added to a step on average over all compared steps, if there is no other problem; the interval is unknown
    with fewer than three delayed steps."""
    saving: MeanStep
    """Time that fixing only this problem would save; less than the cost if another rank is as late."""
    cost_share: float
    """Cost as a share of the mean step."""
