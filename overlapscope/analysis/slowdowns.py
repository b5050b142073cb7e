"""Tables of the cost and slowdown of each rank, host, cause and bucket, by replay, also of those too small to report.

A cost is what something adds to the ideal step time with everything else ideal; a slowdown is that over the ideal.
"""

from __future__ import annotations

import numpy as np
import pandas as pd

from overlapscope.account.critical_path import JobBreakdown
from overlapscope.account.intervals import Float64Array
from overlapscope.analysis.cycles import CAUSES, Cycles, lower_median
from overlapscope.analysis.replay import Replay


def by_rank(replay: Replay, hosts: dict[int, str], job: JobBreakdown | None) -> pd.DataFrame:
    """Return a table with one row per rank.

    Args:
        hosts: Host of each rank.
        job: The critical path, if it is known.

    Returns:
        rank, host, cost_ns, saving_ns (if only this rank were like the median rank), slowdown, lateness_ns (of its last
        arrival, against the median rank), critical_share (share of these cycles' step time for which the critical path
        is on it; NaN if unknown).
    """
    cycles = replay.cycles
    last_ns = cycles.arrival_ns[:, :, -1]
    lateness_ns = last_ns - lower_median(last_ns, axis=1)[:, None]
    cost_ns = replay.costs_by_rank_ns().mean(axis=0)
    return pd.DataFrame(
        {
            "rank": cycles.ranks,
            "host": [hosts.get(rank, "unknown") for rank in cycles.ranks.tolist()],
            "cost_ns": cost_ns,
            "saving_ns": replay.savings_by_rank_ns().mean(axis=0),
            "slowdown": cost_ns / replay.ideal_ns.mean(),
            "lateness_ns": lateness_ns.mean(axis=0),
            "critical_share": _critical_shares(cycles, job),
        }
    )


def by_host(replay: Replay, hosts: dict[int, str]) -> pd.DataFrame:
    """Return a table with one row per host: host, ranks (number), and cost_ns and slowdown of all of them together."""
    ranks = replay.cycles.ranks
    names = np.array([hosts.get(rank, "unknown") for rank in ranks.tolist()])
    rows = []
    for name in pd.unique(names):
        indices = np.flatnonzero(names == name)
        cost_ns = float((replay.ideal_except_ns(indices, replay.excess_of(indices)) - replay.ideal_ns).mean())
        rows.append((str(name), len(indices), cost_ns, cost_ns / float(replay.ideal_ns.mean())))
    return pd.DataFrame(rows, columns=["host", "ranks", "cost_ns", "slowdown"])


def by_cause(replay: Replay) -> pd.DataFrame:
    """Return a table with one row per cause: cause, cost_ns and slowdown, on all ranks together."""
    cost_ns = np.array([replay.cost_of_cause_ns(cause).mean() for cause in range(len(CAUSES))])
    return pd.DataFrame({"cause": CAUSES, "cost_ns": cost_ns, "slowdown": cost_ns / replay.ideal_ns.mean()})


def by_bucket(replay: Replay) -> pd.DataFrame:
    """Return a table with one row per all-reduce.

    Here the ideal also has the best observed transfers.

    Returns:
        bucket, bytes, transfer_ns, best_ns, cost_ns, slowdown, busbw_bytes_per_s.
    """
    cycles, best_ns = replay.cycles, replay.best_transfer_ns
    ideal_ns = replay.ideal_with_transfers_ns(best_ns)
    cost_ns = np.zeros(len(cycles.buckets))
    for number in range(len(cycles.buckets)):
        transfer_ns = best_ns.copy()
        transfer_ns[:, number] = replay.transfer_ns[:, number]
        cost_ns[number] = (replay.ideal_with_transfers_ns(transfer_ns) - ideal_ns).mean()
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
            "best_ns": best_ns.min(axis=0),
            "cost_ns": cost_ns,
            "slowdown": cost_ns / ideal_ns.mean(),
            "busbw_bytes_per_s": busbw,
        }
    )


def _critical_shares(cycles: Cycles, job: JobBreakdown | None) -> Float64Array:
    """Return the share of the critical path on each rank (R,)."""
    shares = np.full(len(cycles.ranks), np.nan)
    if job is not None:
        counted = np.isin(job.steps, cycles.steps)
        total_ns = (job.end_ns - job.start_ns)[counted].sum()
        shares = job.rank_ns[counted].sum(axis=0)[np.searchsorted(job.ranks, cycles.ranks)] / max(1, total_ns)
    return shares
