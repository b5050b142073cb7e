"""Ideal cycles, in which all ranks are like the median rank, as spans to draw over the recorded ones.

In the ideal all ranks are equal, so a cycle is one sequence of phases and one of collectives. Both begin when the
previous step released the ranks. Local times are known by cause and not by position: phases follow each other in the
order of ``cycles.CAUSES``, and causes that are not phases (``between``, ``gc``) leave a gap where that order has them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import pandas as pd

from overlapscope.breakdown.spans import Int64Array
from overlapscope.stragglers.cycles import CAUSES
from overlapscope.stragglers.replay import Replay

IDEAL_PHASES: Final = ("bucket_copies", "optimizer", "data_wait", "host_loop", "evaluation", "forward", "backward")
"""Causes that are drawn as phases."""

_FORWARD: Final = CAUSES.index("forward")


@dataclass(frozen=True, eq=False, kw_only=True)
class IdealCycles:
    """Some cycles as they would be in the ideal. Times are nanoseconds of the common clock."""

    ranks: Int64Array
    """The ranks that the ideal applies to."""
    cycles: pd.DataFrame
    """step, begin_ns, ideal_ns, recorded_ns: when each cycle begins, and how long it would have lasted and did last."""
    phases: pd.DataFrame
    """step, cause, start_ns, end_ns."""
    collectives: pd.DataFrame
    """step, bucket (-1: none), arrival_ns, start_ns (not before the previous one is over), end_ns."""


def compute_ideal(replay: Replay, from_ns: int, to_ns: int) -> IdealCycles:
    """Return the ideal of the cycles that overlap a time range.

    Args:
        from_ns: Start of the range on the common clock; ``to_ns`` is its end.
    """
    cycles = replay.cycles
    until_ns = cycles.begin_ns + np.maximum(replay.ideal_ns, replay.recorded_ns)
    indices = np.flatnonzero((cycles.begin_ns < to_ns) & (until_ns > from_ns))
    begin_ns, steps = cycles.begin_ns[indices], cycles.steps[indices]
    return IdealCycles(
        ranks=cycles.ranks,
        cycles=pd.DataFrame(
            {
                "step": steps,
                "begin_ns": begin_ns,
                "ideal_ns": replay.ideal_ns[indices],
                "recorded_ns": replay.recorded_ns[indices],
            }
        ),
        phases=_phases(replay, indices),
        collectives=pd.concat([_broadcasts(replay, indices), _all_reduces(replay, indices)], ignore_index=True),
    )


def _phases(replay: Replay, indices: Int64Array) -> pd.DataFrame:
    local_ns = replay.ideal.local_ns[:, indices, 0]
    end_ns = replay.cycles.begin_ns[indices] + local_ns.cumsum(axis=0)
    end_ns[_FORWARD:] += replay.ideal.broadcast_ns[indices, 0]
    shown = [CAUSES.index(cause) for cause in IDEAL_PHASES]
    table = pd.DataFrame(
        {
            "step": np.tile(replay.cycles.steps[indices], len(shown)),
            "cause": np.repeat(IDEAL_PHASES, len(indices)),
            "start_ns": (end_ns - local_ns)[shown].ravel(),
            "end_ns": end_ns[shown].ravel(),
        }
    )
    return table[table["end_ns"] > table["start_ns"]]


def _broadcasts(replay: Replay, indices: Int64Array) -> pd.DataFrame:
    """Return the broadcasts of buffers, which begin when forward is called."""
    indices = indices[replay.ideal.broadcast_ns[indices, 0] > 0]
    start_ns = replay.cycles.begin_ns[indices] + replay.ideal.before_ns[indices, 0]
    return pd.DataFrame(
        {
            "step": replay.cycles.steps[indices],
            "bucket": np.full(len(indices), -1),
            "arrival_ns": start_ns,
            "start_ns": start_ns,
            "end_ns": start_ns + replay.ideal.broadcast_ns[indices, 0],
        }
    )


def _all_reduces(replay: Replay, indices: Int64Array) -> pd.DataFrame:
    cycles = replay.cycles
    begin_ns = cycles.begin_ns[indices, None]
    arrival_ns = begin_ns + replay.ideal.arrivals_ns()[indices, 0]
    start_ns, end_ns = np.empty_like(arrival_ns), np.empty_like(arrival_ns)
    free_ns = begin_ns[:, 0]
    for number in range(len(cycles.buckets)):
        start_ns[:, number] = np.maximum(arrival_ns[:, number], free_ns)
        free_ns = end_ns[:, number] = start_ns[:, number] + replay.transfer_ns[indices, number]
    return pd.DataFrame(
        {
            "step": np.repeat(cycles.steps[indices], len(cycles.buckets)),
            "bucket": np.tile(cycles.buckets, len(indices)),
            "arrival_ns": arrival_ns.ravel(),
            "start_ns": start_ns.ravel(),
            "end_ns": end_ns.ravel(),
        }
    )
