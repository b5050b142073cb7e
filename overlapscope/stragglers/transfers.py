"""Findings on all-reduces that take long although all ranks have arrived: in some steps, or because of one link."""

from __future__ import annotations

import math
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pandas as pd

from overlapscope.breakdown.spans import Int64Array
from overlapscope.stragglers.cycles import Cycles
from overlapscope.stragglers.delays import get_significance_level
from overlapscope.stragglers.finding import Finding, SlowLink, compute_saving
from overlapscope.stragglers.patterns import DelayPattern, Mask, find_patterns
from overlapscope.stragglers.replay import Replay, median_ns
from overlapscope.trace.recording import Trace

# Delivery rate of each link between two ranks, and which links are slower than the others.
#
# In a ring every rank's all-reduce takes as long as the slowest link, so durations can't show which link that is. But
# Linux measures for each connection how fast data arrives (``tcpi_delivery_rate``, after "Delivery Rate Estimation",
# draft-cheng-iccrg-delivery-rate-estimation): for data that was handed over at once, without the pauses between. So
# fast links show their capacity although they are idle most of the time, and only the slow link looks slow.

_LINK: Final = ["rank", "peer_rank"]
_CONNECTION: Final = [*_LINK, "local", "peer"]
_COUNTERS: Final = ["time_ns", "bytes_acked", "busy_us", "retransmits"]
_MIN_BUSY_NS: Final = 100_000_000
"""Minimum busy time, at most ten kernel ticks: a link that had less to send is no bottleneck."""
_MIN_SHARE_OF_BUSIEST: Final = 0.1
"""Minimum bytes of a link to be compared, as a share of those of the busiest link."""
_SLOW_SHARE: Final = 0.5
"""A link is slow below this share of the median rate of the others."""
_RATE_QUANTILE: Final = 0.75
"""Quantile of the sampled rates: a machine that stalls makes a fast link seem slow for a while, but hardly anything
makes a slow one seem fast."""


def measure_link_rates(trace: Trace) -> pd.DataFrame:
    """Return the traffic of each directed link between the first sample after the first step and the last sample.

    Returns:
        A row per link over which ranks have sent: rank, peer_rank, within_host (its two ends have one address), bytes
        (acknowledged by the peer), rate_bytes_per_s (upper quartile of the sampled rates), busy_ns (time with data sent
        but not acknowledged), busy_share (of the time between the samples), min_rtt_us, retransmits. Several
        connections of a link are summed.
    """
    first_step_end_ns = trace.steps.groupby("rank")["end_ns"].min()
    samples = trace.links[(trace.links["peer_rank"] >= 0) & (trace.links["peer_rank"] != trace.links["rank"])]
    samples = samples[samples["time_ns"] >= samples["rank"].map(first_step_end_ns).fillna(0)]
    samples = samples.sort_values("time_ns", kind="stable")
    of_connection = samples.groupby(_CONNECTION)
    grown = of_connection[_COUNTERS].last() - of_connection[_COUNTERS].first()
    grown["min_rtt_us"] = of_connection["min_rtt_us"].last()
    grown["rate_bytes_per_s"] = of_connection["delivery_bytes_per_s"].quantile(_RATE_QUANTILE)
    grown = grown[grown["bytes_acked"] > 0].reset_index()
    grown["within_host"] = _address(grown["local"]) == _address(grown["peer"])
    links = grown.groupby(_LINK, as_index=False).agg(
        within_host=("within_host", "all"),
        bytes=("bytes_acked", "sum"),
        rate_bytes_per_s=("rate_bytes_per_s", "sum"),
        busy_ns=("busy_us", "sum"),
        busy_share=("time_ns", "max"),
        min_rtt_us=("min_rtt_us", "min"),
        retransmits=("retransmits", "sum"),
    )
    links["busy_ns"] *= 1000
    links["busy_share"] = links["busy_ns"] / links["busy_share"]
    return links


def find_slow_links(rates: pd.DataFrame) -> pd.DataFrame:
    """Return the links that deliver less than half as fast as the others usually do, slowest first.

    Only links that carried at least a tenth as much as the busiest one are compared; links within a host and links
    between hosts are compared separately. A link is not reported if the rank that it leads to has an even slower one:
    what that rank acknowledges queues behind what it sends. Of two links, as between two ranks, the slower one is
    reported.

    Args:
        rates: From ``measure_link_rates``.

    Returns:
        The rows of ``rates``, with usual_bytes_per_s: the median rate of the other links.
    """
    compared = rates[rates["bytes"] >= _MIN_SHARE_OF_BUSIEST * rates["bytes"].max()].copy()
    compared["usual_bytes_per_s"] = np.nan
    for _, similar in compared.groupby("within_host"):
        compared.loc[similar.index, "usual_bytes_per_s"] = _median_of_others(similar["rate_bytes_per_s"].to_numpy())
    is_slow = compared["rate_bytes_per_s"] < _SLOW_SHARE * compared["usual_bytes_per_s"]
    slow = compared[is_slow & (compared["busy_ns"] >= _MIN_BUSY_NS)]
    slowest_of_peer = slow["peer_rank"].map(slow.groupby("rank")["rate_bytes_per_s"].min())
    slow = slow[~(slowest_of_peer < slow["rate_bytes_per_s"])]
    return slow.sort_values("rate_bytes_per_s", ignore_index=True)


def _address(endpoints: pd.Series[str]) -> pd.Series[str]:
    return endpoints.str.rsplit(":", n=1).str[0]


def _median_of_others(values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Return for each value the median of all other values; NaN if there are none.

    Example: the values [1, 2, 9] give [5.5, 5, 1.5].
    """
    if len(values) < 2:
        return np.full(len(values), np.nan)
    position = np.argsort(np.argsort(values))
    ordered = np.sort(values)
    # Without one value, each value after it moves up by one position.
    low, high = (len(values) - 2) // 2, (len(values) - 1) // 2
    return (ordered[low + (position <= low)] + ordered[high + (position <= high)]) / 2


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
                **_compute_savings(replay, fixed_ns, where),
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


def make_link_finding(replay: Replay, link: SlowLink) -> Finding:
    """Return what a slow link costs: all-reduces would take less time by the factor by which it is slower than others.

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
        **_compute_savings(replay, fixed_ns, everywhere),
    )


def _compute_savings(replay: Replay, fixed_ns: Int64Array, delayed: Mask) -> dict[str, Any]:
    """Return what is gained if transfers are replaced by others (S, K) that differ in the delayed cycles."""
    return {
        "added_ns": float((replay.ideal_ns - replay.ideal_with_transfers_ns(fixed_ns)).mean()),
        "saving": compute_saving(replay, replay.recorded, replay.with_transfers_ns(fixed_ns), delayed),
        "step_ns": float(replay.recorded_ns.mean()),
    }
