"""Stragglers: which ranks make the others wait, why, in which steps, and at what cost.

A significant pattern that costs enough is a ``Finding``; its cost comes from a replay of the recording with that
finding as the only problem. What all findings together leave over is the same kind of difference of two breakdowns.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import pandas as pd

from overlapscope.account.mean_step import MeanStep
from overlapscope.analysis import slowdowns
from overlapscope.analysis.cycles import Cycles
from overlapscope.analysis.delays import MIN_COST_SHARE, find_delays
from overlapscope.analysis.finding import Finding, SlowLink
from overlapscope.analysis.links import find_slow_links, measure_link_rates
from overlapscope.analysis.own_doing import MIN_PAUSE_STEPS
from overlapscope.analysis.replay import Replay
from overlapscope.analysis.savings import compute_saving
from overlapscope.analysis.slow_transfers import find_slow_transfers, is_limiting, make_link_finding
from overlapscope.analysis.summary import Summary
from overlapscope.interval import Interval
from overlapscope.trace.reader import Trace

LONG_PAUSE_STEPS: Final = 5.0
"""A delay that takes as long as this many steps is a finding however long the run is."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Stragglers:
    """Result of the straggler analysis. The tables are those of ``slowdowns``, of the steady steps."""

    cycles: Cycles
    usual: Replay
    """Replay of the cycles of steady steps; of all cycles if there are none."""
    findings: tuple[Finding, ...]
    """Findings, the most expensive first."""
    step_time_ns: float
    """Mean step time."""
    waiting: Interval
    """Part of the mean step for which ranks wait for a straggler."""
    saved_if_ranks_equal: MeanStep
    """Saving if all ranks were like the median rank."""
    saved_by_best_transfers: MeanStep
    """Saving if every all-reduce had the best transfer observed for its bucket."""
    by_rank: pd.DataFrame
    by_host: pd.DataFrame
    by_cause: pd.DataFrame
    by_bucket: pd.DataFrame


def find_stragglers(trace: Trace, cycles: Cycles, summary: Summary) -> Stragglers:
    """Find the stragglers in the cycles of a recording."""
    hosts = get_hosts(trace)
    is_steady = np.isin(cycles.steps, summary.alike.steps)
    usual = Replay(cycles.of(is_steady) if is_steady.any() else cycles)
    step_time_ns = summary.mean.step.value if summary.steps else float(usual.recorded_ns.mean())
    return Stragglers(
        cycles=cycles,
        usual=usual,
        findings=find_all_findings(cycles, hosts, _read_slow_links(trace), step_time_ns),
        step_time_ns=step_time_ns,
        waiting=summary.exposed_for["straggler"],
        saved_if_ranks_equal=_cap_saving(compute_saving(usual, usual.ideal, usual.ideal_ns), summary),
        saved_by_best_transfers=_cap_saving(
            compute_saving(usual, usual.recorded, usual.with_transfers_ns(usual.best_transfer_ns)), summary
        ),
        by_rank=slowdowns.by_rank(usual, hosts, summary.job_breakdown),
        by_host=slowdowns.by_host(usual, hosts),
        by_cause=slowdowns.by_cause(usual),
        by_bucket=slowdowns.by_bucket(usual),
    )


def _cap_saving(saving: MeanStep, summary: Summary) -> MeanStep:
    """Limit a saving to the recorded times of a step.

    A replay ends cycles with their last all-reduce, also where backward continues after it: no more can be saved than
    was exposed.
    """
    return saving.capped_at(summary.mean) if summary.steps else saving


def get_hosts(trace: Trace) -> dict[int, str]:
    """Return the host of each rank."""
    return dict(zip(trace.ranks["rank"].tolist(), trace.ranks["host"].tolist(), strict=True))


def find_all_findings(
    cycles: Cycles, hosts: dict[int, str], links: Sequence[SlowLink], step_time_ns: float
) -> tuple[Finding, ...]:
    """Return the findings that are worth reporting, the most expensive first.

    Args:
        hosts: Host of each rank.
        links: Links that are slower than the others.
        step_time_ns: Mean step time.
    """
    replay = Replay(cycles)
    findings = find_delays(replay, hosts, step_time_ns)
    if not cycles.missing_ranks:
        findings += find_slow_transfers(replay, step_time_ns)
    findings += [make_link_finding(replay, link, step_time_ns) for link in links if is_limiting(replay, link)]
    worth_it = [finding for finding in findings if _is_worth_reporting(finding, step_time_ns)]
    if any(finding.link for finding in worth_it):
        # A ring ends rank by rank behind its slow link: that is the same finding again.
        worth_it = [finding for finding in worth_it if finding.cause != "release_skew"]
    return tuple(sorted(worth_it, key=lambda finding: -finding.cost.value))


def _read_slow_links(trace: Trace) -> list[SlowLink]:
    slow = find_slow_links(measure_link_rates(trace))[["rank", "peer_rank", "rate_bytes_per_s", "usual_bytes_per_s"]]
    return [
        SlowLink(rank=rank, peer_rank=peer_rank, bytes_per_s=rate, usual_bytes_per_s=usual)
        for rank, peer_rank, rate, usual in slow.itertuples(index=False, name=None)
    ]


def _is_worth_reporting(finding: Finding, step_time_ns: float) -> bool:
    is_costly = finding.cost_share >= MIN_COST_SHARE
    if finding.pattern.kind != "transient":
        return is_costly
    if finding.delay_ns >= MIN_PAUSE_STEPS * step_time_ns:
        return is_costly or finding.delay_ns >= LONG_PAUSE_STEPS * step_time_ns
    return is_costly and bool(finding.ranks) and not math.isnan(finding.pattern.p_value)
