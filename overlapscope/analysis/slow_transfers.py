"""Findings on all-reduces that take long although all ranks have arrived: in some steps, or because of one link."""

from __future__ import annotations

import math
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from overlapscope.account.intervals import Int64Array
from overlapscope.analysis.cycles import Cycles
from overlapscope.analysis.finding import Finding, SlowLink
from overlapscope.analysis.own_doing import get_significance_level
from overlapscope.analysis.patterns import DelayPattern, Mask, find_patterns
from overlapscope.analysis.replay import Replay, median_ns
from overlapscope.analysis.savings import compute_saving, mean_over_cycles

MIN_TRANSFER_SHARE: Final = 0.05
"""Minimum delay of transfers as a share of the step time: links are shared, so that all-reduce times vary by this much
for reasons outside the job."""

_LIMITING_FACTOR: Final = 0.75
"""A link limits all-reduces if the time they take and the time it needs for them differ by no more than this factor."""


def find_slow_transfers(replay: Replay, step_time_ns: float) -> list[Finding]:
    """Find the steps in which all-reduces take longer than usual although all ranks have arrived."""
    cycles, transfer_ns = replay.cycles, replay.transfer_ns
    total_ns = transfer_ns.sum(axis=1)
    usual_ns = float(np.median(total_ns))
    findings = []
    least_ns = MIN_TRANSFER_SHARE * step_time_ns
    for pattern in find_patterns(
        total_ns - usual_ns, cycles.steps, least_ns, significance=get_significance_level(cycles)
    ):
        where = pattern.where
        usual_transfer_ns = median_ns(transfer_ns[~where], axis=0)
        fixed_ns = np.where(where[:, None], np.minimum(transfer_ns, usual_transfer_ns), transfer_ns)
        longer_ns = (transfer_ns - fixed_ns).sum(axis=1)
        findings.append(
            Finding(
                ranks=(),
                host=None,
                link=None,
                cause="transfer",
                parts_ns={},
                compared_with="other steps",
                pattern=pattern,
                steps=cycles.steps[where],
                worst_step=int(cycles.steps[longer_ns.argmax()]),
                delay_ns=float(longer_ns[where].mean()),
                **_costs(replay, fixed_ns, where, step_time_ns),
            )
        )
    return findings


def _bytes_over_each_link(cycles: Cycles) -> npt.NDArray[np.float64]:
    """Return the bytes that a ring all-reduce sends over each link, 2(N-1)/N of its size (K,)."""
    ranks = len(cycles.ranks)
    return cycles.bytes.astype(np.float64) * (2 * (ranks - 1) / ranks)


def is_limiting(replay: Replay, link: SlowLink) -> bool:
    """Return True if all-reduces take as long as a link needs for them.

    If they take less, the link is faster than it seems, and if they take more, something else limits them.
    """
    needed_ns = _bytes_over_each_link(replay.cycles).sum() / link.bytes_per_s * 1e9
    taken_ns = float(np.median(replay.transfer_ns.sum(axis=1)))
    return needed_ns * _LIMITING_FACTOR <= taken_ns <= needed_ns / _LIMITING_FACTOR


def make_link_finding(replay: Replay, link: SlowLink, step_time_ns: float) -> Finding:
    """Return the cost of a slow link: all-reduces would take less time by the factor by which it is slower than others.

    Longer times than usual in some steps are not caused by the link, and are a separate finding.
    """
    cycles = replay.cycles
    usual_ns = np.minimum(replay.transfer_ns, median_ns(replay.transfer_ns, axis=0))
    fixed_ns = replay.transfer_ns - (usual_ns * (1 - link.bytes_per_s / link.usual_bytes_per_s)).astype(np.int64)
    everywhere = np.ones(len(cycles.steps), dtype=bool)
    total_ns = replay.transfer_ns.sum(axis=1)
    times = link.usual_bytes_per_s / link.bytes_per_s
    return Finding(
        ranks=(link.rank, link.peer_rank),
        host=None,
        link=link,
        cause="link",
        parts_ns={},
        compared_with="the other links",
        pattern=DelayPattern(
            kind="persistent",
            where=everywhere,
            usual_ns=0.0,
            statistic=f"the other links' median TCP delivery rate is {times:,.1f} times its own",
            p_value=math.nan,
        ),
        steps=cycles.steps,
        worst_step=int(cycles.steps[total_ns.argmax()]),
        delay_ns=float((replay.transfer_ns - fixed_ns).sum(axis=1).mean()),
        **_costs(replay, fixed_ns, everywhere, step_time_ns),
    )


def _costs(replay: Replay, fixed_ns: Int64Array, delayed: Mask, step_time_ns: float) -> dict[str, Any]:
    """Return cost and saving of replacing transfers by others (S, K) that differ in the delayed cycles."""
    costs_ns = replay.ideal_ns - replay.ideal_with_transfers_ns(fixed_ns)
    return {
        "cost": mean_over_cycles(costs_ns, delayed),
        "saving": compute_saving(replay, replay.recorded, replay.with_transfers_ns(fixed_ns), delayed),
        "cost_share": float(costs_ns.mean()) / step_time_ns,
    }
