"""Recorded all-reduces freed of what isn't their own: queues, a shared wire, compute beside them."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from overlapscope.model.observation import Observations, Spans
from overlapscope.model.partition import Float64Array


@dataclass(frozen=True, eq=False, kw_only=True)
class Transfers:
    """The C recorded all-reduces, as if each had had the wire for itself."""

    spans: Spans
    """Bytes and times; the times are 0 or less where nothing can be told."""
    hidden_share: Float64Array
    """(C,) of the time, how much lay under the backward of the last rank that computed."""

    def freed_of(self, communication_slowdown: float) -> Spans:
        """Their times with no compute beside them."""
        saved = self.hidden_share * (1 - 1 / communication_slowdown)
        return Spans(bytes=self.spans.bytes, time_ns=self.spans.time_ns * (1 - saved), cycle=self.spans.cycle)


def transfers_of(observations: Observations, lanes: int, alpha_ns: float = 0.0) -> Transfers:
    """Free the all-reduces of each other.

    Args:
        lanes: how many run at a time. With one, each begins when the one before is over. Two that run together have
            half of the wire each, but for their latency, which they wait for on their own.
        alpha_ns: that latency, where there are two lanes.
    """
    collectives = observations.collectives
    end_ns = np.median(collectives.end_ns, axis=1)
    arrival_ns = end_ns - collectives.transfer_ns
    computed_ns = (observations.backward_start_ns + observations.backward_end_ns).max(axis=1)[collectives.cycle]
    bounds = np.searchsorted(collectives.cycle, np.arange(len(observations.steps) + 1))
    begin_ns, time_ns = arrival_ns.copy(), np.zeros(len(end_ns))
    for first, end in pairwise(bounds):
        within = slice(first, end)
        begin_ns[within] = np.maximum(arrival_ns[within], _lane_free(end_ns[within], lanes))
        sends_ns = np.minimum(begin_ns[within] + alpha_ns, end_ns[within])
        time_ns[within] = end_ns[within] - begin_ns[within] - _halved(sends_ns, end_ns[within], lanes)
    elapsed_ns = np.maximum(end_ns - begin_ns, 1.0)
    return Transfers(
        spans=Spans(bytes=collectives.bytes.astype(np.float64), time_ns=time_ns, cycle=collectives.cycle),
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


def _halved(sends_ns: Float64Array, end_ns: Float64Array, lanes: int) -> Float64Array:
    """How much longer each took because another one was sending too."""
    if lanes == 1:
        return np.zeros(len(end_ns))
    together = np.minimum(end_ns[:, None], end_ns) - np.maximum(sends_ns[:, None], sends_ns)
    np.fill_diagonal(together, 0.0)
    lost: Float64Array = np.maximum(together, 0.0).sum(axis=1) / 2
    return lost
