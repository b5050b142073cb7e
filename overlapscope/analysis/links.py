"""Delivery rate of each link between two ranks, and which links are slower than the others.

In a ring every rank's all-reduce takes as long as the slowest link, so durations can't show which link that is. But
Linux measures for each connection how fast data arrives (``tcpi_delivery_rate``, after "Delivery Rate Estimation",
draft-cheng-iccrg-delivery-rate-estimation): for data that was handed over at once, without the pauses between. So fast
links show their capacity although they are idle most of the time, and only the slow link looks slow.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt
import pandas as pd

from overlapscope.trace.reader import Trace

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
    for _, alike in compared.groupby("within_host"):
        compared.loc[alike.index, "usual_bytes_per_s"] = _median_of_others(alike["rate_bytes_per_s"].to_numpy())
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
