"""Rank-specific delays: in which causes and steps single ranks are late, and what that costs.

The local time of every rank is compared with that of the other ranks, cause by cause and cycle by cycle. A significant
pattern is a delay; similar delays of all ranks of a host are merged into one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from overlapscope.account.intervals import Int64Array
from overlapscope.analysis.cycles import BLAMABLE_GROUPS, CAUSE_GROUPS, CAUSES, Cycles, get_cause_indices
from overlapscope.analysis.finding import Finding
from overlapscope.analysis.own_doing import (
    MIN_PAUSE_STEPS,
    excess_over_peers,
    get_significance_level,
    keep_rank_specific,
)
from overlapscope.analysis.patterns import DelayPattern, find_patterns
from overlapscope.analysis.replay import Replay, Times, median_ns
from overlapscope.analysis.savings import compute_saving, mean_over_cycles

MIN_COST_SHARE: Final = 0.01
"""Minimum cost of a finding, as a share of the step time."""

MIN_DELAY_SHARE: Final = 0.02
"""Minimum delay, as a share of the step time: healthy ranks differ by less."""


def find_delays(replay: Replay, hosts: dict[int, str], step_time_ns: float) -> list[Finding]:
    """Return all delays, including those that are not worth reporting.

    Args:
        hosts: Host of each rank.
    """
    delays = []
    for group in BLAMABLE_GROUPS:
        series_ns = excess_over_peers(replay.recorded.own_ns[get_cause_indices(group)].sum(axis=0))
        for index in _find_candidate_ranks(series_ns, step_time_ns):
            delays += _find_delays_of_rank(replay.cycles, group, series_ns, index, step_time_ns)
    return [_make_finding(replay, delay, hosts, step_time_ns) for delay in _merge_by_host(replay.cycles, delays, hosts)]


@dataclass(frozen=True, eq=False, kw_only=True)
class _Delay:
    """A delay pattern in one group of causes of some ranks, from which a finding is made."""

    indices: tuple[int, ...]
    """Indices of the ranks."""
    group: str
    pattern: DelayPattern

    def excess(self, replay: Replay) -> Times:
        """Return the delay alone: the excess in delayed cycles over the usual excess of these ranks in other cycles."""
        causes = get_cause_indices(self.group)
        excess = replay.excess_of(self.indices).restricted(causes)
        if self.pattern.kind == "persistent":
            return excess
        where, others = self.pattern.where, ~self.pattern.where
        usual = Times(
            own_ns=median_ns(excess.own_ns[:, others], axis=1),
            lead_ns=median_ns(excess.lead_ns[others], axis=0),
            broadcast_ns=np.zeros_like(excess.broadcast_ns[:1]),
        )
        return excess.minus(usual).restricted(causes, where)


def _find_candidate_ranks(series_ns: Int64Array, step_time_ns: float) -> list[int]:
    """Return the indices of ranks that are late often enough, or once by enough, to matter.

    The other ranks need no statistics.
    """
    late_ns = np.maximum(series_ns, 0)
    is_costly = late_ns.mean(axis=0) >= MIN_COST_SHARE * step_time_ns / 2
    has_paused = late_ns.max(axis=0) >= MIN_PAUSE_STEPS * step_time_ns
    indices: list[int] = np.flatnonzero(is_costly | has_paused).tolist()
    return indices


def _find_delays_of_rank(
    cycles: Cycles, group: str, series_ns: Int64Array, index: int, step_time_ns: float
) -> list[_Delay]:
    """Find the delays of one rank in one group of causes.

    Args:
        series_ns: (S, R) From ``excess_over_peers``.
    """
    least_ns = MIN_DELAY_SHARE * step_time_ns
    if group == "release_skew":  # the only cause that compares clocks of two ranks
        least_ns = max(least_ns, 2 * cycles.clock_error_ns)
    patterns = find_patterns(
        series_ns[:, index],
        cycles.steps,
        least_ns,
        significance=get_significance_level(cycles),
        others=_name_reference(cycles, [index]),
    )
    own = (keep_rank_specific(pattern, series_ns, index, cycles, step_time_ns) for pattern in patterns)
    return [_Delay(indices=(index,), group=group, pattern=pattern) for pattern in own if pattern is not None]


def _name_reference(cycles: Cycles, indices: Sequence[int]) -> str:
    """Name the reference that ranks are compared with; two ranks have no median."""
    return f"rank {cycles.ranks[1 - indices[0]]}" if len(cycles.ranks) == 2 else "the median rank"


def _merge_by_host(cycles: Cycles, delays: list[_Delay], hosts: dict[int, str]) -> list[_Delay]:
    """Merge the delays of a host into one if all its ranks are late in the same way.

    Only a host with several ranks is merged, and only if there are other hosts.
    """
    places_of_host: dict[str, list[int]] = {}
    for index, rank in enumerate(cycles.ranks.tolist()):
        places_of_host.setdefault(hosts.get(rank, "unknown"), []).append(index)
    alike: dict[tuple[str, str, str, int | None], list[_Delay]] = {}
    for delay in delays:
        host = hosts.get(int(cycles.ranks[delay.indices[0]]), "unknown")
        alike.setdefault((host, delay.group, delay.pattern.kind, delay.pattern.period), []).append(delay)
    merged: list[_Delay] = []
    for (host, *_), parts in alike.items():
        where = np.mean([part.pattern.where for part in parts], axis=0) > 0.5
        in_the_same_steps = all((where & part.pattern.where).sum() * 2 > part.pattern.where.sum() for part in parts)
        if in_the_same_steps and 1 < len(parts) == len(places_of_host[host]) < len(cycles.ranks):
            middle = sorted(parts, key=lambda part: part.pattern.p_value)[len(parts) // 2]
            indices = tuple(index for part in parts for index in part.indices)
            merged.append(_Delay(indices=indices, group=parts[0].group, pattern=replace(middle.pattern, where=where)))
        else:
            merged += parts
    return merged


def _make_finding(replay: Replay, delay: _Delay, hosts: dict[int, str], step_time_ns: float) -> Finding:
    """Compute the cost and the saving of a delay by replay."""
    excess = delay.excess(replay)
    costs_ns = replay.ideal_except_ns(delay.indices, excess) - replay.ideal_ns
    without, where = replay.without(delay.indices, excess), delay.pattern.where
    by_cause_ns = excess.own_ns[:, where].mean(axis=(1, 2))
    late_ns = excess.own_ns.sum(axis=0).mean(axis=1)
    ranks = tuple(int(rank) for rank in replay.cycles.ranks[list(delay.indices)])
    return Finding(
        ranks=ranks,
        host=hosts.get(ranks[0]) if len(ranks) > 1 else None,
        link=None,
        cause=delay.group,
        parts_ns={name: float(by_cause_ns[CAUSES.index(name)]) for name in CAUSE_GROUPS[delay.group]},
        compared_with=_name_reference(replay.cycles, delay.indices),
        pattern=delay.pattern,
        steps=replay.cycles.steps[where],
        worst_step=int(replay.cycles.steps[np.where(where, late_ns, -np.inf).argmax()]),
        delay_ns=float(late_ns[where].mean()),
        cost=mean_over_cycles(costs_ns, where),
        saving=compute_saving(replay, without, replay.length_ns(without), where),
        cost_share=float(costs_ns.mean()) / step_time_ns,
    )
