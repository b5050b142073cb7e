"""Recorded all-reduces without foreign influences: queues, a shared wire, concurrent compute."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from overlapscope.model.observation import Observations, Spans
from overlapscope.model.partition import Float64Array


@dataclass(frozen=True, eq=False, kw_only=True)
class Transfers:
    """The C recorded all-reduces, each from when a lane was free for it, and what went on meanwhile."""

    spans: Spans
    """Bytes and times; the times are 0 or less where nothing can be told."""
    shared_share: Float64Array
    """(C,) of the time, during how much of it another one was sending too."""
    hidden_share: Float64Array
    """(C,) of the time, how much lay under the backward of the last rank that computed."""

    def freed_of(self, *, lane_slowdown: float = 1.0, communication_slowdown: float = 1.0) -> Spans:
        """Their times with the wire to themselves, and with no concurrent compute."""
        kept = 1 - self.shared_share * (1 - 1 / lane_slowdown)
        kept *= 1 - self.hidden_share * (1 - 1 / communication_slowdown)
        return replace(self.spans, time_ns=self.spans.time_ns * kept)


def transfers_of(observations: Observations, lanes: int, alpha_ns: float = 0.0) -> Transfers:
    """What can be told about each all-reduce.

    Args:
        lanes: how many run at a time. With one, each begins when the one before is over.
        alpha_ns: the latency, in which one of two that run together leaves the wire to the other.
    """
    collectives = observations.collectives
    end_ns = np.median(collectives.end_ns, axis=1)
    arrival_ns = end_ns - collectives.transfer_ns
    computed_ns = (observations.backward_start_ns + observations.backward_end_ns).max(axis=1)[collectives.cycle]
    bounds = np.searchsorted(collectives.cycle, np.arange(len(observations.steps) + 1))
    begin_ns, shared_ns = arrival_ns.copy(), np.zeros(len(end_ns))
    for first, end in pairwise(bounds):
        within = slice(first, end)
        begin_ns[within] = np.maximum(arrival_ns[within], _lane_free(end_ns[within], lanes))
        sends_ns = np.minimum(begin_ns[within] + alpha_ns, end_ns[within])
        shared_ns[within] = _together(sends_ns, end_ns[within]) if lanes > 1 else 0.0
    time_ns = end_ns - begin_ns
    elapsed_ns = np.maximum(time_ns, 1.0)
    return Transfers(
        spans=Spans(bytes=collectives.bytes.astype(np.float64), time_ns=time_ns, cycle=collectives.cycle),
        shared_share=np.clip(shared_ns / elapsed_ns, 0.0, 1.0),
        hidden_share=np.clip((computed_ns - begin_ns) / elapsed_ns, 0.0, 1.0),
    )


def _lane_free(end_ns: Float64Array, lanes: int) -> Float64Array:
    """When, for each of them, fewer of those launched before it are under way than there are lanes."""
    free_ns = np.full(len(end_ns), -np.inf)
    under_way = [-np.inf] * lanes
    for place, end in enumerate(end_ns.tolist()):
        free_ns[place] = under_way[0]
        under_way = sorted([*under_way, end])[1:]
    return free_ns


def _together(sends_ns: Float64Array, end_ns: Float64Array) -> Float64Array:
    """How long another one was sending at the same time."""
    together = np.minimum(end_ns[:, None], end_ns) - np.maximum(sends_ns[:, None], sends_ns)
    np.fill_diagonal(together, 0.0)
    shared: Float64Array = np.maximum(together, 0.0).sum(axis=1)
    return shared
