"""What each cycle was waiting for all along: one rank's own time, and then transfers one after the other.

Backwards from the end: the last all-reduce began either when the one before it was over, or when its last rank had
arrived. As long as it is the former, the path goes through transfers; at the latter it turns to that rank and follows
it to the start of the cycle. Where buffers are broadcast and that rank waited for them, it goes on with the rank that
sends them.
"""

from __future__ import annotations

import numpy as np
import pandas as pd

from overlapscope.analysis.cycles import CAUSES, Cycles, shifted


def critical_paths(cycles: Cycles) -> pd.DataFrame:
    """One row per cycle.

    Returns:
        step, rank (whose arrival the cycle waited for), bucket (at which), rank_before_forward (another one if the rank
        waited for its buffers), own_ns (until that arrival), transfer_ns (from there to the end; with own_ns it is the
        time of the cycle).
    """
    last_arrival_ns = cycles.arrival_ns.max(axis=1)
    waits_for_rank = last_arrival_ns >= shifted(cycles.end_ns)
    all_reduces = last_arrival_ns.shape[1]
    turn = all_reduces - 1 - waits_for_rank[:, ::-1].argmax(axis=1)
    every = np.arange(len(turn))
    rank = cycles.arrival_ns[every, :, turn].argmax(axis=1)
    before_ns = cycles.own_ns[: CAUSES.index("forward")].sum(axis=0)
    waits_for_root = (cycles.broadcast_ns[every, rank] > 0) & (before_ns[:, 0] > before_ns[every, rank])
    own_ns = last_arrival_ns[every, turn]
    return pd.DataFrame(
        {
            "step": cycles.steps,
            "rank": cycles.ranks[rank],
            "bucket": cycles.buckets[turn],
            "rank_before_forward": cycles.ranks[np.where(waits_for_root, 0, rank)],
            "own_ns": own_ns,
            "transfer_ns": cycles.cycle_time_ns - own_ns,
        }
    )
