"""Stragglers: which ranks make the others wait, why, in which steps, and at what cost.

A significant pattern that adds enough to a step is a ``Finding``. What it costs is said in one way everywhere: as a
*saving*, by which steps would be shorter, in a replay of the recording, if that rank, host, cause or bucket were like
the others.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Final

import numpy as np
import pandas as pd
from scipy.special import ndtri

from overlapscope.breakdown.critical_path import JobBreakdown
from overlapscope.breakdown.means import MeanStep
from overlapscope.breakdown.spans import Float64Array
from overlapscope.breakdown.summary import Summary, summarize_only
from overlapscope.interval import Interval
from overlapscope.machine.of_steps import collect_readings, contrast_late_ranks
from overlapscope.stragglers.cycles import CAUSES, Cycles
from overlapscope.stragglers.delays import (
    MIN_COST_SHARE,
    MIN_DELAY_SHARE,
    MIN_PAUSE_STEPS,
    compute_overall_excess,
    find_delays,
    get_overall_level,
    run_overall_test,
)
from overlapscope.stragglers.finding import Finding, SlowLink, compute_saving
from overlapscope.stragglers.replay import Replay
from overlapscope.stragglers.transfers import (
    find_slow_links,
    find_slow_transfers,
    is_limiting,
    make_link_finding,
    measure_link_rates,
)
from overlapscope.trace.recording import Trace

# Tables of the saving of each rank, host, cause and bucket, by replay, also of those too small to report.


def by_rank(replay: Replay, hosts: dict[int, str], job: JobBreakdown | None) -> pd.DataFrame:
    """Return a table with one row per rank.

    Args:
        hosts: Host of each rank.
        job: The critical path, if it is known.

    Returns:
        rank, host, lateness_ns (of its last arrival, against the median rank), saving_ns (if this rank alone were like
        the median rank), critical_share (share of these cycles' step time for which the critical path is on it; NaN if
        unknown).
    """
    cycles = replay.cycles
    return pd.DataFrame(
        {
            "rank": cycles.ranks,
            "host": [hosts.get(rank, "unknown") for rank in cycles.ranks.tolist()],
            "lateness_ns": cycles.lateness_ns.mean(axis=0),
            "saving_ns": replay.savings_by_rank_ns().mean(axis=0),
            "critical_share": _critical_shares(cycles, job),
        }
    )


def by_host(replay: Replay, hosts: dict[int, str]) -> pd.DataFrame:
    """Return a table with one row per host: host, ranks (number), and saving_ns of all of them together."""
    ranks = replay.cycles.ranks
    names = np.array([hosts.get(rank, "unknown") for rank in ranks.tolist()])
    rows = []
    for name in pd.unique(names):
        indices = np.flatnonzero(names == name)
        rows.append((str(name), len(indices), float(replay.saving_of_ranks_ns(indices.tolist()).mean())))
    return pd.DataFrame(rows, columns=["host", "ranks", "saving_ns"])


def by_cause(replay: Replay) -> pd.DataFrame:
    """Return a table with one row per cause: cause, and saving_ns if all ranks were alike in it."""
    savings_ns = [float(replay.saving_of_cause_ns(cause).mean()) for cause in range(len(CAUSES))]
    return pd.DataFrame({"cause": CAUSES, "saving_ns": savings_ns})


def by_bucket(replay: Replay) -> pd.DataFrame:
    """Return a table with one row per all-reduce; none if parameters are sharded.

    Returns:
        bucket, bytes, transfer_ns, best_ns (NaN if unknown), saving_ns (if its transfers alone were as short as the
        best one), busbw_bytes_per_s.
    """
    cycles, best_ns = replay.cycles, replay.best_transfer_ns
    savings_ns = np.zeros(len(cycles.buckets))
    for number in range(len(cycles.buckets)):
        transfer_ns = replay.transfer_ns.copy()
        transfer_ns[:, number] = best_ns[:, number]
        savings_ns[number] = (replay.recorded_ns - replay.with_transfers_ns(transfer_ns)).mean()
    usual_ns = replay.transfer_ns.mean(axis=0)
    ranks = len(cycles.ranks)
    busbw = np.divide(
        cycles.bytes * 2e9 * (ranks - 1) / ranks, usual_ns, out=np.full(len(usual_ns), np.nan), where=usual_ns > 0
    )
    return pd.DataFrame(
        {
            "bucket": cycles.buckets,
            "bytes": cycles.bytes,
            "transfer_ns": usual_ns,
            "best_ns": replay.best_ns,
            "saving_ns": savings_ns,
            "busbw_bytes_per_s": busbw,
        }
    ).iloc[: 0 if cycles.has_inner_waits else None]


def _critical_shares(cycles: Cycles, job: JobBreakdown | None) -> Float64Array:
    """Return the share of the critical path on each rank (R,)."""
    shares = np.full(len(cycles.ranks), np.nan)
    if job is not None:
        counted = np.isin(job.steps, cycles.steps)
        total_ns = (job.end_ns - job.start_ns)[counted].sum()
        shares = job.rank_ns[counted].sum(axis=0)[np.searchsorted(job.ranks, cycles.ranks)] / max(1, total_ns)
    return shares


def join_persistent(findings: Sequence[Finding], usual: Replay, step_time_ns: float) -> tuple[Finding, ...]:
    """Make one finding of all the causes for which the same ranks are late in every step.

    Its lateness and its saving are those of these ranks in the tables: what they have of all causes together.

    Args:
        findings: What is found in all cycles.
        usual: Cycles of steady steps, of the tables.
        step_time_ns: Mean step time.
    """
    of_ranks: dict[tuple[int, ...], list[Finding]] = {}
    for finding in findings:
        if finding.pattern.kind == "persistent" and finding.ranks and finding.link is None:
            of_ranks.setdefault(finding.ranks, []).append(finding)
    joined: list[Finding] = []
    apart = [finding for finding in findings if not any(finding in parts for parts in of_ranks.values())]
    for late_ranks, parts in of_ranks.items():
        indices = np.searchsorted(usual.cycles.ranks, late_ranks).tolist()
        lateness_ns = float(usual.cycles.lateness_ns[:, indices].mean(axis=0).mean())
        if lateness_ns < MIN_DELAY_SHARE * step_time_ns:  # late for one cause, and early for another
            apart += parts
            continue
        excess = usual.excess_of(indices)
        without = usual.without(indices, excess)
        saving = compute_saving(usual, without, usual.length_ns(without))
        joined.append(
            replace(
                max(parts, key=lambda part: part.delay_ns),
                parts_ns={name: ns for part in parts for name, ns in part.parts_ns.items()},
                delay_ns=sum(part.delay_ns for part in parts),
                added_ns=sum(part.added_ns for part in parts),
                saving=saving,
                step_ns=step_time_ns,
                lateness_ns=lateness_ns,
            )
        )
    return tuple(sorted((*joined, *apart), key=lambda finding: -finding.added_ns))


LONG_PAUSE_STEPS: Final = 5.0
"""A delay that takes as long as this many steps is a finding however long the run is."""


SUSPICION_LEVEL: Final = 0.05
"""Maximum probability that noise would make any rank as late as one that is suspected."""


@dataclass(frozen=True, kw_only=True)
class Suspect:
    """A rank that looks late, on too little evidence for a finding, which needs a cause."""

    rank: int
    lateness_ns: float
    """Mean lateness, as in the table of ranks."""
    saving_ns: float
    """Mean saving, as in the table of ranks."""
    late_steps: int
    """Steps in which it is later than its peers."""
    steps: int
    p_value: float
    """Probability that noise would make any rank as late."""
    needed_steps: int | None
    """Number of such steps that would exclude chance; None if these do, and only a single cause can't be named, and if
    chance explains them as well."""
    is_chance: bool
    """True if chance explains as much."""


def find_costliest(
    replay: Replay, findings: Sequence[Finding], ranks: pd.DataFrame, step_time_ns: float
) -> Suspect | None:
    """Return the rank that costs most; None if that is little, or it is in a finding.

    Args:
        replay: Cycles of steady steps.
        findings: What is found.
        ranks: Table of ``by_rank``.
        step_time_ns: Mean step time.
    """
    count = len(ranks)
    index = int(ranks["saving_ns"].to_numpy().argmax())
    rank = int(ranks["rank"].to_numpy()[index])
    lateness_ns, saving_ns = (float(ranks[name].to_numpy()[index]) for name in ("lateness_ns", "saving_ns"))
    is_small = saving_ns < MIN_COST_SHARE * step_time_ns or lateness_ns < MIN_DELAY_SHARE * step_time_ns
    if is_small or any(rank in finding.ranks for finding in findings):
        return None
    test = run_overall_test(compute_overall_excess(replay.recorded.local_ns), index)
    p_value = min(1.0, test.p_value * count)
    is_chance = p_value > SUSPICION_LEVEL
    ratio = 0.0 if is_chance else (ndtri(get_overall_level(count)) / ndtri(test.p_value)) ** 2
    return Suspect(
        rank=rank,
        lateness_ns=lateness_ns,
        saving_ns=saving_ns,
        late_steps=test.late,
        steps=test.values,
        p_value=p_value,
        is_chance=is_chance,
        needed_steps=10 * (math.floor(test.values * ratio / 10) + 1) if ratio > 1 else None,
    )


@dataclass(frozen=True, eq=False, kw_only=True)
class Stragglers:
    """Result of the straggler analysis. The tables, of the steady steps, are computed when they are first asked for."""

    cycles: Cycles
    usual: Replay
    """Replay of the cycles of steady steps; of all cycles if there are none."""
    findings: tuple[Finding, ...]
    """Findings, the one that adds most first."""
    step_time_ns: float
    """Mean step time."""
    summary: Summary
    """Summary of the recording, or of the steps compared, whose mean step limits what can be saved."""
    hosts: dict[int, str]
    """Host of each rank."""

    @property
    def waiting(self) -> Interval:
        """Return the part of the mean step for which ranks wait for a straggler."""
        return self.summary.exposed_for["straggler"]

    @cached_property
    def costliest(self) -> Suspect | None:
        """Find the rank that costs most, if it is in no finding."""
        return find_costliest(self.usual, self.findings, self.by_rank, self.step_time_ns)

    @property
    def suspect(self) -> Suspect | None:
        """Return the rank that is probably late, if it is in no finding."""
        return self.costliest if self.costliest is not None and not self.costliest.is_chance else None

    @cached_property
    def saved_if_ranks_equal(self) -> MeanStep:
        """Compute the saving if all ranks were like the median rank."""
        return _cap_saving(compute_saving(self.usual, self.usual.ideal, self.usual.ideal_ns), self.summary)

    @cached_property
    def saved_by_best_transfers(self) -> MeanStep:
        """Compute the saving if every all-reduce had the best transfer observed for its bucket."""
        length_ns = self.usual.with_transfers_ns(self.usual.best_transfer_ns)
        return _cap_saving(compute_saving(self.usual, self.usual.recorded, length_ns), self.summary)

    @cached_property
    def by_rank(self) -> pd.DataFrame:
        """Tabulate the ranks."""
        return self._cap_savings(by_rank(self.usual, self.hosts, self.summary.job_breakdown))

    @cached_property
    def by_host(self) -> pd.DataFrame:
        """Tabulate the hosts."""
        return self._cap_savings(by_host(self.usual, self.hosts))

    @cached_property
    def by_cause(self) -> pd.DataFrame:
        """Tabulate the causes."""
        return self._cap_savings(by_cause(self.usual))

    @cached_property
    def by_bucket(self) -> pd.DataFrame:
        """Tabulate the all-reduces."""
        return self._cap_savings(by_bucket(self.usual))

    def _cap_savings(self, table: pd.DataFrame) -> pd.DataFrame:
        """Limit savings to the mean step: the replay's cycles may be of other steps, and longer."""
        return table.assign(saving_ns=table["saving_ns"].clip(upper=self.step_time_ns))


_FEW_LEFT_OUT: Final = 2
"""Number of steady steps, and share of them, that may be left out of a comparison whose mean step is still that of all:
the first one always is."""
_SMALL_SHARE_LEFT_OUT: Final = 0.1


def find_stragglers(trace: Trace, cycles: Cycles, summary: Summary) -> Stragglers:
    """Find the stragglers in the cycles of a recording.

    Args:
        summary: Summary of the recording. If the cycles are of far fewer steps, as where others have more backwards,
            the mean step is that of the steps compared.
    """
    hosts = get_hosts(trace)
    is_compared = np.isin(summary.steady.steps, cycles.steps)
    left_out = int((~is_compared).sum())
    if is_compared.any() and left_out > max(_FEW_LEFT_OUT, _SMALL_SHARE_LEFT_OUT * len(is_compared)):
        summary = summarize_only(summary, cycles.steps)
    is_steady = np.isin(cycles.steps, summary.steady.steps)
    usual = Replay(cycles.of(is_steady) if is_steady.any() else cycles)
    step_time_ns = summary.mean.step.value if summary.steps else float(usual.recorded_ns.mean())
    found = find_all_findings(cycles, hosts, _read_slow_links(trace), step_time_ns)
    return Stragglers(
        cycles=cycles,
        usual=usual,
        findings=_add_machine(trace, join_persistent(found, usual, step_time_ns)),
        step_time_ns=step_time_ns,
        summary=summary,
        hosts=hosts,
    )


def _add_machine(trace: Trace, findings: tuple[Finding, ...]) -> tuple[Finding, ...]:
    """Add what the machine said of the ranks of each finding, or of both ends of its link."""
    readings = collect_readings(trace)
    return tuple(
        replace(
            finding,
            machine=contrast_late_ranks(
                trace,
                readings,
                finding.ranks if finding.link is None else (finding.link.rank, finding.link.peer_rank),
                finding.steps,
            ),
        )
        for finding in findings
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
    """Return the findings that are worth reporting, the one that adds most to a step first.

    Args:
        hosts: Host of each rank.
        links: Links that are slower than the others.
        step_time_ns: Mean step time.
    """
    replay = Replay(cycles)
    findings = find_delays(replay, hosts, step_time_ns)
    if not cycles.missing_ranks and not cycles.has_inner_waits:
        findings += find_slow_transfers(replay, step_time_ns)
    findings += [make_link_finding(replay, link) for link in links if is_limiting(replay, link)]
    worth_it = [finding for finding in findings if _is_worth_reporting(finding, step_time_ns)]
    if any(finding.link for finding in worth_it):
        # A ring ends rank by rank behind its slow link: that is the same finding again.
        worth_it = [finding for finding in worth_it if finding.cause != "release_skew"]
    return tuple(sorted(worth_it, key=lambda finding: -finding.added_ns))


def _read_slow_links(trace: Trace) -> list[SlowLink]:
    if trace.links.empty:
        return []
    slow = find_slow_links(measure_link_rates(trace))[["rank", "peer_rank", "rate_bytes_per_s", "usual_bytes_per_s"]]
    return [
        SlowLink(rank=rank, peer_rank=peer_rank, bytes_per_s=rate, usual_bytes_per_s=usual)
        for rank, peer_rank, rate, usual in slow.itertuples(index=False, name=None)
    ]


def _is_worth_reporting(finding: Finding, step_time_ns: float) -> bool:
    is_costly = finding.added_ns >= MIN_COST_SHARE * step_time_ns
    if finding.pattern.kind != "transient":
        return is_costly
    if finding.delay_ns >= MIN_PAUSE_STEPS * step_time_ns:
        return is_costly or finding.delay_ns >= LONG_PAUSE_STEPS * step_time_ns
    return is_costly and bool(finding.ranks) and not math.isnan(finding.pattern.p_value)
