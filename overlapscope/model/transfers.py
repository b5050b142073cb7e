"""Transfer times of recorded all-reduces, with the effects of queues, a shared link and concurrent compute removed."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from overlapscope.model.observation import Observations, Spans
from overlapscope.model.partition import Float64Array


@dataclass(frozen=True, eq=False, kw_only=True)
class Transfers:
    """The C recorded all-reduces, each from when a lane was free for it, and what ran concurrently."""

    spans: Spans
    """Bytes and times; times are 0 or less where they are unknown."""
    shared_share: Float64Array
    """(C,) share of the time during which another all-reduce was sending."""
    overlapped_share: Float64Array
    """(C,) share of the time before the end of backward on the last rank that computed."""

    def without_slowdown(self, *, lane_slowdown: float = 1.0, communication_slowdown: float = 1.0) -> Spans:
        """Return the times with the link to themselves and without concurrent compute."""
        undisturbed_share = 1 - self.shared_share * (1 - 1 / lane_slowdown)
        undisturbed_share *= 1 - self.overlapped_share * (1 - 1 / communication_slowdown)
        return replace(self.spans, time_ns=self.spans.time_ns * undisturbed_share)


def extract_transfers(observations: Observations, lanes: int, alpha_ns: float = 0.0) -> Transfers:
    """Compute the transfers of all recorded all-reduces.

    Args:
        lanes: Number of all-reduces that run at a time. With one lane, each begins when the previous one has ended.
        alpha_ns: Latency, during which an all-reduce leaves the link to a concurrent one.
    """
    collectives = observations.collectives
    end_ns = np.median(collectives.end_ns, axis=1)
    arrival_ns = end_ns - collectives.transfer_ns
    computed_ns = (observations.backward_start_ns + observations.backward_end_ns).max(axis=1)[collectives.cycle]
    bounds = np.searchsorted(collectives.cycle, np.arange(len(observations.steps) + 1))
    begin_ns, shared_ns = arrival_ns.copy(), np.zeros(len(end_ns))
    for first, end in pairwise(bounds):
        within = slice(first, end)
        begin_ns[within] = np.maximum(arrival_ns[within], _lane_free_times(end_ns[within], lanes))
        sends_ns = np.minimum(begin_ns[within] + alpha_ns, end_ns[within])
        shared_ns[within] = _overlap_with_others(sends_ns, end_ns[within]) if lanes > 1 else 0.0
    time_ns = end_ns - begin_ns
    elapsed_ns = np.maximum(time_ns, 1.0)
    return Transfers(
        spans=Spans(bytes=collectives.bytes.astype(np.float64), time_ns=time_ns, cycle=collectives.cycle),
        shared_share=np.clip(shared_ns / elapsed_ns, 0.0, 1.0),
        overlapped_share=np.clip((computed_ns - begin_ns) / elapsed_ns, 0.0, 1.0),
    )


def _lane_free_times(end_ns: Float64Array, lanes: int) -> Float64Array:
    """Compute when a lane is free for each: fewer of those launched before it are running than there are lanes.

    Example: for ends 5, 9, 7, 12 and two lanes, the times are -inf, -inf, 5, 7.
    """
    free_ns = np.full(len(end_ns), -np.inf)
    under_way = [-np.inf] * lanes
    for index, end in enumerate(end_ns.tolist()):
        free_ns[index] = under_way[0]
        under_way = sorted([*under_way, end])[1:]
    return free_ns


def _overlap_with_others(sends_ns: Float64Array, end_ns: Float64Array) -> Float64Array:
    """Compute for how long another all-reduce was sending at the same time.

    Example: transfers from 0 to 5 and from 2 to 6 overlap for 3 each.
    """
    together = np.minimum(end_ns[:, None], end_ns) - np.maximum(sends_ns[:, None], sends_ns)
    np.fill_diagonal(together, 0.0)
    shared: Float64Array = np.maximum(together, 0.0).sum(axis=1)
    return shared
