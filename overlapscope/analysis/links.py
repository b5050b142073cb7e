"""How fast each link between two ranks is while it has something to send, and which are slower than the others.

In a ring every rank's all-reduce takes as long as the slowest link, so durations can't tell which one that is. But
fast links have sent their share long before the next one arrives, and only the slow one is busy all the time. What a
peer has acknowledged per busy time is therefore the rate of one link, as far as TCP can tell: the link ends in the
peer's process, and one that does not get the processor acknowledges late.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt
import pandas as pd

from overlapscope.trace.reader import Trace

_LINK: Final = ["rank", "peer_rank"]
_CONNECTION: Final = [*_LINK, "local", "peer"]
_COUNTERS: Final = ["time_ns", "bytes_acked", "busy_us", "rwnd_limited_us", "retransmits"]
_TICK_NS: Final = 10_000_000
"""The kernel counts busy time in ticks of 1 to 10 ms; what is busy for less may be counted as 0."""
_LEAST_BUSY_NS: Final = 10 * _TICK_NS
"""A link that was busy for less may seem slow by chance."""
_LEAST_SHARE_OF_BUSIEST: Final = 0.1
_SLOW: Final = 0.5


def link_rates(trace: Trace) -> pd.DataFrame:
    """What each directed link did between the first sample after the first step and the last one.

    Returns:
        A row per link over which ranks have sent: rank, peer_rank, within_host (its two ends have one address),
        bytes (acknowledged by the peer), busy_ns (something was to be sent, and the peer had room for it),
        rate_bytes_per_s (of the busy time), busy_share (of the time between the samples), min_rtt_us, retransmits.
        Several connections of a link are added up.
    """
    first_step_end_ns = trace.steps.groupby("rank")["end_ns"].min()
    samples = trace.links[(trace.links["peer_rank"] >= 0) & (trace.links["peer_rank"] != trace.links["rank"])]
    samples = samples[samples["time_ns"] >= samples["rank"].map(first_step_end_ns).fillna(0)]
    samples = samples.sort_values("time_ns", kind="stable")
    of_connection = samples.groupby(_CONNECTION)
    grown = of_connection[_COUNTERS].last() - of_connection[_COUNTERS].first()
    grown["min_rtt_us"] = of_connection["min_rtt_us"].last()
    grown = grown[grown["bytes_acked"] > 0].reset_index()
    grown["within_host"] = _address(grown["local"]) == _address(grown["peer"])
    links = grown.groupby(_LINK, as_index=False).agg(
        within_host=("within_host", "all"),
        bytes=("bytes_acked", "sum"),
        busy_us=("busy_us", "sum"),
        rwnd_limited_us=("rwnd_limited_us", "sum"),
        sampled_ns=("time_ns", "max"),
        min_rtt_us=("min_rtt_us", "min"),
        retransmits=("retransmits", "sum"),
    )
    busy_ns = (links.pop("busy_us") - links.pop("rwnd_limited_us")) * 1000
    links.insert(4, "busy_ns", busy_ns)
    links.insert(5, "rate_bytes_per_s", links["bytes"] * 1e9 / busy_ns.clip(lower=_TICK_NS))
    links.insert(6, "busy_share", busy_ns / links.pop("sampled_ns"))
    return links


def slow_links(rates: pd.DataFrame) -> pd.DataFrame:
    """The links that are less than half as fast as the others usually are, slowest first.

    Compared are links that carried at least a tenth as much as the busiest one, those that leave a host and those
    that don't each among themselves. Where a rank can hardly send, the acknowledgements of what it receives queue
    behind what it sends, and the time until they arrive counts as busy: so links that lead to such a rank are neither
    named, unless they are slower still, nor what it is compared with. With two links, as between two ranks, the slower
    one is named if the other is more than twice as fast.

    Args:
        rates: from ``link_rates``.

    Returns:
        The rows of ``rates``, with usual_bytes_per_s: the median rate of the other links.
    """
    compared = rates[rates["bytes"] >= _LEAST_SHARE_OF_BUSIEST * rates["bytes"].max()].copy()
    compared["usual_bytes_per_s"] = np.nan
    for _, alike in compared.groupby("within_host"):
        compared.loc[alike.index, "usual_bytes_per_s"] = _usual_of_others(alike)
    is_slow = compared["rate_bytes_per_s"] < _SLOW * compared["usual_bytes_per_s"]
    slow = compared[is_slow & (compared["busy_ns"] >= _LEAST_BUSY_NS)].sort_values("rate_bytes_per_s")
    slowest_of_peer = slow["peer_rank"].map(slow.groupby("rank")["rate_bytes_per_s"].min())
    return slow[~(slowest_of_peer < slow["rate_bytes_per_s"])].reset_index(drop=True)


def _usual_of_others(links: pd.DataFrame) -> npt.NDArray[np.float64]:
    """For each link the median rate of those that don't lead to its sender; of all others if there are none such."""
    rate, rank, peer_rank = (links[name].to_numpy() for name in ("rate_bytes_per_s", "rank", "peer_rank"))
    usual = np.full(len(links), np.nan)
    for place in np.flatnonzero(rate <= np.median(rate)):  # the others are not slow
        others = np.delete(rate, place)
        unaffected = others[np.delete(peer_rank, place) != rank[place]]
        if len(others):
            usual[place] = np.median(unaffected if len(unaffected) else others)
    return usual


def _address(endpoints: pd.Series[str]) -> pd.Series[str]:
    return endpoints.str.rsplit(":", n=1).str[0]
