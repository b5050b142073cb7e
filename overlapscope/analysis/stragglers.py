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
from overlapscope.analysis.delays import LEAST_COST_SHARE, delay_findings
from overlapscope.analysis.finding import Finding, SlowLink
from overlapscope.analysis.links import link_rates, slow_links
from overlapscope.analysis.own_doing import LEAST_PAUSE_STEPS
from overlapscope.analysis.replay import Replay
from overlapscope.analysis.savings import saving_of
from overlapscope.analysis.slow_transfers import limits, link_finding, transfer_findings
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
    saved_if_alike: MeanStep
    """Saving if all ranks were like the median rank."""
    saved_by_best_transfers: MeanStep
    """Saving if every all-reduce had the best transfer observed for its bucket."""
    by_rank: pd.DataFrame
    by_host: pd.DataFrame
    by_cause: pd.DataFrame
    by_bucket: pd.DataFrame


def stragglers_in(trace: Trace, cycles: Cycles, summary: Summary) -> Stragglers:
    """Find the stragglers in the cycles of a recording."""
    hosts = hosts_of(trace)
    is_alike = np.isin(cycles.steps, summary.alike.steps)
    usual = Replay(cycles.of(is_alike) if is_alike.any() else cycles)
    step_time_ns = summary.mean.step.value if summary.steps else float(usual.recorded_ns.mean())
    return Stragglers(
        cycles=cycles,
        usual=usual,
        findings=findings_of(cycles, hosts, _slow_links(trace), step_time_ns),
        step_time_ns=step_time_ns,
        waiting=summary.exposed_for["later_rank"],
        saved_if_alike=_possible(saving_of(usual, usual.ideal, usual.ideal_ns), summary),
        saved_by_best_transfers=_possible(
            saving_of(usual, usual.recorded, usual.with_transfers_ns(usual.best_transfer_ns)), summary
        ),
        by_rank=slowdowns.by_rank(usual, hosts, summary.job_account),
        by_host=slowdowns.by_host(usual, hosts),
        by_cause=slowdowns.by_cause(usual),
        by_bucket=slowdowns.by_bucket(usual),
    )


def _possible(saving: MeanStep, summary: Summary) -> MeanStep:
    """Limit a saving to the recorded times of a step.

    A replay ends cycles with their last all-reduce, also where backward continues after it: no more can be saved than
    was exposed.
    """
    return saving.at_most(summary.mean) if summary.steps else saving


def hosts_of(trace: Trace) -> dict[int, str]:
    """Return the host of each rank."""
    return dict(zip(trace.ranks["rank"].tolist(), trace.ranks["host"].tolist(), strict=True))


def findings_of(
    cycles: Cycles, hosts: dict[int, str], links: Sequence[SlowLink], step_time_ns: float
) -> tuple[Finding, ...]:
    """Return the findings that are worth reporting, the most expensive first.

    Args:
        hosts: Host of each rank.
        links: Links that are slower than the others.
        step_time_ns: Mean step time.
    """
    replay = Replay(cycles)
    findings = delay_findings(replay, hosts, step_time_ns)
    if not cycles.missing_ranks:
        findings += transfer_findings(replay, step_time_ns)
    findings += [link_finding(replay, link, step_time_ns) for link in links if limits(replay, link)]
    worth_it = [finding for finding in findings if _is_worth_naming(finding, step_time_ns)]
    if any(finding.link for finding in worth_it):
        # A ring ends rank by rank behind its slow link: that is the same finding again.
        worth_it = [finding for finding in worth_it if finding.cause != "carried_over"]
    return tuple(sorted(worth_it, key=lambda finding: -finding.cost.value))


def _slow_links(trace: Trace) -> list[SlowLink]:
    slow = slow_links(link_rates(trace))[["rank", "peer_rank", "rate_bytes_per_s", "usual_bytes_per_s"]]
    return [
        SlowLink(rank=rank, peer_rank=peer_rank, bytes_per_s=rate, usual_bytes_per_s=usual)
        for rank, peer_rank, rate, usual in slow.itertuples(index=False, name=None)
    ]


def _is_worth_naming(finding: Finding, step_time_ns: float) -> bool:
    is_costly = finding.cost_share >= LEAST_COST_SHARE
    if finding.pattern.kind != "transient":
        return is_costly
    if finding.delay_ns >= LEAST_PAUSE_STEPS * step_time_ns:
        return is_costly or finding.delay_ns >= LONG_PAUSE_STEPS * step_time_ns
    return is_costly and bool(finding.ranks) and not math.isnan(finding.pattern.p_value)
