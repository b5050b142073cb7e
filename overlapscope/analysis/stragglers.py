"""Which ranks make the others wait, why, in which steps, and what it costs.

Every rank's own time is compared with the median rank's, cause by cause and cycle by cycle. What stands out as a
pattern, and costs enough, becomes a ``Finding``; its cost comes from a replay of the recording with that finding as
the only thing that is wrong.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import numpy.typing as npt
import pandas as pd

from overlapscope.account.alike import first_step_after_warm_up
from overlapscope.account.intervals import Int64Array
from overlapscope.analysis import slowdowns
from overlapscope.analysis.cycles import CAUSES, GROUPS, Cycles, causes_of, cycles_of
from overlapscope.analysis.links import link_rates, slow_links
from overlapscope.analysis.own_doing import LEAST_PAUSE_STEPS, against_others, own_doing, significance_of
from overlapscope.analysis.patterns import DelayPattern, Mask, find_patterns
from overlapscope.analysis.replay import Replay, Times
from overlapscope.trace.reader import Trace

LEAST_COST_SHARE: Final = 0.01
"""Costs below this share of the step time are not worth a finding."""

LEAST_DELAY_SHARE: Final = 0.02
"""Delays below this share of the step time are within what healthy ranks differ by."""

LEAST_TRANSFER_SHARE: Final = 0.05
"""Links are shared with others: all-reduce times vary by this share of the step time for reasons outside the job."""

LONG_PAUSE_STEPS: Final = 5.0
"""A delay that takes as long as this many steps is a finding however long the run is."""

_LIMITING: Final = 0.75
"""All-reduces are limited by a link if the time they take and the time it needs for them differ by no more than this
factor."""
_BATCHES: Final = 16
_95_PERCENT: Final = 1.96


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
    """A key of ``cycles.GROUPS``; ``link``; or ``transfer``: all have arrived, and all-reduces take long."""
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
    cost_ns: float
    """What it adds to the step time on average over all steps, if nothing else is wrong."""
    cost_error_ns: float
    """Half the width of the 95 % interval of ``cost_ns``; infinite if only one step is delayed."""
    saving_ns: float
    """What fixing this alone would take off the recorded step time; less than the cost if another rank is as late."""
    cost_share: float
    """``cost_ns`` over the recorded step time."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Stragglers:
    """The answer for a recording."""

    cycles: Cycles
    findings: tuple[Finding, ...]
    """The most expensive first."""
    step_time_ns: float
    """Mean over the cycles, as are the others."""
    ideal_ns: float
    """Step time if all ranks were like the median rank."""
    best_links_ns: float
    """Step time if every all-reduce had the best transfer observed for its bucket."""
    by_step: pd.DataFrame
    by_rank: pd.DataFrame
    by_host: pd.DataFrame
    by_cause: pd.DataFrame
    by_bucket: pd.DataFrame
    """The tables of ``slowdowns``, like the four above."""


def stragglers_of(trace: Trace) -> Stragglers | None:
    """Judge a recording; None if its ranks can't be compared, and ``sentences.why_none`` says why."""
    cycles = cycles_of(trace, first_step_after_warm_up(trace.steps))
    return None if cycles is None else stragglers_in(trace, cycles)


def stragglers_in(trace: Trace, cycles: Cycles) -> Stragglers:
    """Judge a recording whose cycles are known."""
    slow = slow_links(link_rates(trace))[["rank", "peer_rank", "rate_bytes_per_s", "usual_bytes_per_s"]]
    links = [
        SlowLink(rank=rank, peer_rank=peer_rank, bytes_per_s=rate, usual_bytes_per_s=usual)
        for rank, peer_rank, rate, usual in slow.itertuples(index=False, name=None)
    ]
    return find_stragglers(cycles, hosts_of(trace), links)


def hosts_of(trace: Trace) -> dict[int, str]:
    """The host of each rank."""
    return dict(zip(trace.ranks["rank"].tolist(), trace.ranks["host"].tolist(), strict=True))


def find_stragglers(cycles: Cycles, hosts: dict[int, str], links: Sequence[SlowLink] = ()) -> Stragglers:
    """Judge cycles.

    Args:
        hosts: by rank.
        links: those that are slower than the others.
    """
    replay = Replay(cycles)
    step_time_ns, ideal_ns = float(replay.recorded_ns.mean()), float(replay.ideal_ns.mean())
    delays = [
        delay
        for group in GROUPS
        for place in _places_worth_a_look(replay, group, step_time_ns)
        for delay in _delays_of(replay, group, place, step_time_ns)
    ]
    delays = _merge_by_host(cycles, delays, hosts)
    findings = [_judge(replay, delay, hosts, step_time_ns) for delay in delays]
    if not cycles.missing_ranks:
        findings += _transfer_findings(replay, step_time_ns)
    findings += [_judge_link(replay, link, step_time_ns) for link in links if _limits(replay, link)]
    worth_it = [finding for finding in findings if _is_worth_naming(finding, step_time_ns)]
    if any(finding.link for finding in worth_it):
        # A ring ends rank by rank behind its slow link: that is the same finding again.
        worth_it = [finding for finding in worth_it if finding.cause != "carried_over"]
    by_step = slowdowns.by_step(replay)
    return Stragglers(
        cycles=cycles,
        findings=tuple(sorted(worth_it, key=lambda finding: -finding.cost_ns)),
        step_time_ns=step_time_ns,
        ideal_ns=ideal_ns,
        best_links_ns=float(replay.with_transfers_ns(replay.best_transfer_ns).mean()),
        by_step=by_step,
        by_rank=slowdowns.by_rank(replay, hosts, by_step),
        by_host=slowdowns.by_host(replay, hosts),
        by_cause=slowdowns.by_cause(replay),
        by_bucket=slowdowns.by_bucket(replay),
    )


@dataclass(frozen=True, eq=False, kw_only=True)
class _Delay:
    """What a finding is made of: a pattern in one group of causes of some ranks."""

    places: tuple[int, ...]
    group: str
    pattern: DelayPattern

    def excess(self, replay: Replay) -> Times:
        """The delay alone: the excess in the delayed cycles, over what is usual for these ranks otherwise."""
        causes = causes_of(self.group)
        excess = replay.excess.of_ranks(self.places).restricted(causes)
        if self.pattern.kind == "persistent":
            return excess
        where, others = self.pattern.where, ~self.pattern.where
        usual = Times(
            own_ns=_median(excess.own_ns[:, others], axis=1),
            lead_ns=_median(excess.lead_ns[others], axis=0),
            broadcast_ns=np.zeros_like(excess.broadcast_ns[:1]),
        )
        return excess.minus(usual).restricted(causes, where)


def _places_worth_a_look(replay: Replay, group: str, step_time_ns: float) -> Int64Array:
    """The ranks that are late often enough, or once by enough, to matter: the rest needs no statistics."""
    late_ns = np.maximum(against_others(replay.recorded.own_ns[causes_of(group)].sum(axis=0)), 0)
    is_costly = late_ns.mean(axis=0) >= LEAST_COST_SHARE * step_time_ns / 2
    has_paused = late_ns.max(axis=0) >= LEAST_PAUSE_STEPS * step_time_ns
    return np.flatnonzero(is_costly | has_paused)


def _delays_of(replay: Replay, group: str, place: int, step_time_ns: float) -> list[_Delay]:
    least_ns = LEAST_DELAY_SHARE * step_time_ns
    if group == "carried_over":  # the only cause that compares the clocks of two ranks
        least_ns = max(least_ns, 2 * replay.cycles.clock_error_ns)
    series_ns = against_others(replay.recorded.own_ns[causes_of(group)].sum(axis=0))
    patterns = find_patterns(
        series_ns[:, place],
        replay.cycles.steps,
        least_ns,
        significance=significance_of(replay.cycles),
        others=_compared_with(replay.cycles, [place]),
    )
    own = (own_doing(pattern, series_ns, place, replay.cycles, step_time_ns) for pattern in patterns)
    return [_Delay(places=(int(place),), group=group, pattern=pattern) for pattern in own if pattern is not None]


def _compared_with(cycles: Cycles, places: Sequence[int]) -> str:
    """Whom ranks are compared with: two ranks have no middle."""
    return f"rank {cycles.ranks[1 - places[0]]}" if len(cycles.ranks) == 2 else "the median rank"


def _merge_by_host(cycles: Cycles, delays: list[_Delay], hosts: dict[int, str]) -> list[_Delay]:
    """One delay for all ranks of a host that are late in the same way, if there are several, and other hosts."""
    places_of_host: dict[str, list[int]] = {}
    for place, rank in enumerate(cycles.ranks.tolist()):
        places_of_host.setdefault(hosts.get(rank, "unknown"), []).append(place)
    alike: dict[tuple[str, str, str, int | None], list[_Delay]] = {}
    for delay in delays:
        host = hosts.get(int(cycles.ranks[delay.places[0]]), "unknown")
        alike.setdefault((host, delay.group, delay.pattern.kind, delay.pattern.period), []).append(delay)
    merged: list[_Delay] = []
    for (host, *_), parts in alike.items():
        where = np.mean([part.pattern.where for part in parts], axis=0) > 0.5
        in_the_same_steps = all((where & part.pattern.where).sum() * 2 > part.pattern.where.sum() for part in parts)
        if in_the_same_steps and 1 < len(parts) == len(places_of_host[host]) < len(cycles.ranks):
            middle = sorted(parts, key=lambda part: part.pattern.p_value)[len(parts) // 2]
            places = tuple(place for part in parts for place in part.places)
            merged.append(_Delay(places=places, group=parts[0].group, pattern=replace(middle.pattern, where=where)))
        else:
            merged += parts
    return merged


def _judge(replay: Replay, delay: _Delay, hosts: dict[int, str], step_time_ns: float) -> Finding:
    excess = delay.excess(replay)
    costs_ns = replay.ideal_but_ns(delay.places, excess) - replay.ideal_ns
    saving_ns = float((replay.recorded_ns - replay.without_ns(delay.places, excess)).mean())
    where = delay.pattern.where
    by_cause_ns = excess.own_ns[:, where].mean(axis=(1, 2))
    late_ns = excess.own_ns.sum(axis=0).mean(axis=1)
    ranks = tuple(int(rank) for rank in replay.cycles.ranks[list(delay.places)])
    return Finding(
        ranks=ranks,
        host=hosts.get(ranks[0]) if len(ranks) > 1 else None,
        link=None,
        cause=delay.group,
        parts_ns={name: float(by_cause_ns[CAUSES.index(name)]) for name in GROUPS[delay.group]},
        compared_with=_compared_with(replay.cycles, delay.places),
        pattern=delay.pattern,
        steps=replay.cycles.steps[where],
        worst_step=int(replay.cycles.steps[np.where(where, late_ns, -np.inf).argmax()]),
        delay_ns=float(late_ns[where].mean()),
        saving_ns=saving_ns,
        **_costs(costs_ns, where, step_time_ns),
    )


def _transfer_findings(replay: Replay, step_time_ns: float) -> list[Finding]:
    """Steps in which the all-reduces take longer than usual although all ranks have arrived."""
    cycles, transfer_ns = replay.cycles, replay.transfer_ns
    total_ns = transfer_ns.sum(axis=1)
    usual_ns = float(np.median(total_ns))
    findings = []
    least_ns = LEAST_TRANSFER_SHARE * step_time_ns
    for pattern in find_patterns(total_ns - usual_ns, cycles.steps, least_ns, significance=significance_of(cycles)):
        where = pattern.where
        usual_transfer_ns = _median(transfer_ns[~where], axis=0)
        mended_ns = np.where(where[:, None], np.minimum(transfer_ns, usual_transfer_ns), transfer_ns)
        longer_ns = (transfer_ns - mended_ns).sum(axis=1)
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
                saving_ns=float((replay.recorded_ns - replay.with_transfers_ns(mended_ns)).mean()),
                **_costs(replay.ideal_ns - replay.ideal_with_transfers_ns(mended_ns), where, step_time_ns),
            )
        )
    return findings


def _bytes_over_each_link(cycles: Cycles) -> npt.NDArray[np.float64]:
    """(K,) An all-reduce over a ring sends 2(N-1)/N of its bytes over each link."""
    ranks = len(cycles.ranks)
    return cycles.bytes.astype(np.float64) * (2 * (ranks - 1) / ranks)


def _limits(replay: Replay, link: SlowLink) -> bool:
    """Whether all-reduces take as long as a link needs for them.

    If they are over sooner, the link is quicker than it seems, and if they take longer, something else limits them.
    """
    needed_ns = _bytes_over_each_link(replay.cycles).sum() / link.bytes_per_s * 1e9
    taken_ns = float(np.median(replay.transfer_ns.sum(axis=1)))
    return needed_ns * _LIMITING <= taken_ns <= needed_ns / _LIMITING


def _judge_link(replay: Replay, link: SlowLink, step_time_ns: float) -> Finding:
    """What a link costs: it limits all-reduces, so if it were like the others they would take that much less time.

    What they take longer than usual in some steps is not the link's doing, and a finding of its own.
    """
    cycles = replay.cycles
    usual_ns = np.minimum(replay.transfer_ns, _median(replay.transfer_ns, axis=0))
    mended_ns = replay.transfer_ns - (usual_ns * (1 - link.bytes_per_s / link.usual_bytes_per_s)).astype(np.int64)
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
        delay_ns=float((replay.transfer_ns - mended_ns).sum(axis=1).mean()),
        saving_ns=float((replay.recorded_ns - replay.with_transfers_ns(mended_ns)).mean()),
        **_costs(replay.ideal_ns - replay.ideal_with_transfers_ns(mended_ns), everywhere, step_time_ns),
    )


def _costs(costs_ns: Int64Array, delayed: Mask, step_time_ns: float) -> dict[str, float]:
    """The mean and interval of a cost by cycle (S,).

    How much a delayed cycle costs varies, and the interval says how sure its mean is; which ones are delayed is known.
    Means of batches are independent also where neighbours are not.
    """
    of_delayed_ns = costs_ns[delayed]
    batches = np.array_split(of_delayed_ns, min(_BATCHES, len(of_delayed_ns)))
    means = np.array([batch.mean() for batch in batches])
    error_ns = _95_PERCENT * float(means.std(ddof=1)) / math.sqrt(len(means)) if len(means) > 1 else math.inf
    cost_ns = float(costs_ns.mean())
    return {
        "cost_ns": cost_ns,
        "cost_error_ns": error_ns * float(delayed.mean()),
        "cost_share": cost_ns / step_time_ns,
    }


def _is_worth_naming(finding: Finding, step_time_ns: float) -> bool:
    is_costly = finding.cost_share >= LEAST_COST_SHARE
    if finding.pattern.kind != "transient":
        return is_costly
    if finding.delay_ns >= LEAST_PAUSE_STEPS * step_time_ns:
        return is_costly or finding.delay_ns >= LONG_PAUSE_STEPS * step_time_ns
    return is_costly and bool(finding.ranks) and not math.isnan(finding.pattern.p_value)


def _median(values: Int64Array, axis: int) -> Int64Array:
    """The median, in whole nanoseconds, with the axis kept; 0 of nothing."""
    if not values.shape[axis]:
        return np.zeros_like(values.sum(axis=axis, keepdims=True))
    return np.median(values, axis=axis, keepdims=True).round().astype(np.int64)
