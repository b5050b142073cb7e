"""Estimates of how much compute and communication slow each other down, from plans in which they overlap differently.

The right slowdown explains the difference away: once it is removed, the same gradients take the same time to compute,
and messages of the same size the same time to transfer, whether or not the other ran concurrently. The same holds for
two concurrent all-reduces, unless pairs of them were measured directly.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Final, NamedTuple

import numpy as np

from overlapscope.bucket_model.cost import CollectiveCost, CostLine, fit_line
from overlapscope.bucket_model.observation import Observations, Spans
from overlapscope.bucket_model.partition import Float64Array, Int64Array
from overlapscope.bucket_model.work import RecordedBackward

# Transfer times of recorded all-reduces, with the effects of queues, a shared link and concurrent compute removed.


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


_SLOWDOWNS: Final = np.round(np.arange(1.0, 3.0001, 0.02), 2)
"""Slowdown factors that are tried."""
_INTERVALS: Final = 12
"""Number of intervals of backward compared across cycles. Between two single gradients there may be almost no time."""
_MIN_CONTRAST: Final = 0.1
"""Smallest standard deviation, between cycles, of the share of an interval in which something was in flight."""
_MAX_LANE_SLOWDOWN: Final = 2.0
"""Largest slowdown of two all-reduces that share a link: together they never take longer than one after the other."""
_MIN_CYCLES: Final = 4
_DRAWS: Final = 40
_ABOUT_THE_SAME_SIZE: Final = 1.5
_MIN_TRANSFERS: Final = 6


class _Assumption(NamedTuple):
    """Assumption for a slowdown that the recording does not show."""

    value: float
    low: float
    high: float


ASSUMED_COMPUTE_SLOWDOWN: Final = _Assumption(1.25, 1.0, 1.5)
_ASSUMPTIONS: Final = {
    "compute": ASSUMED_COMPUTE_SLOWDOWN,
    "communication": _Assumption(1.0, 1.0, 1.2),
    "lanes": _Assumption(_MAX_LANE_SLOWDOWN, 1.0, _MAX_LANE_SLOWDOWN),
}


@dataclass(frozen=True, eq=False, kw_only=True)
class Slowdown:
    """Estimated slowdown, a factor of 1 or more."""

    value: float
    is_known: bool
    """True if the recording shows it; otherwise the value is an assumption."""
    draws: Float64Array
    """(D,) equally likely values."""

    @property
    def interval(self) -> tuple[float, float]:
        """Return the 90 % interval of the slowdown."""
        low, high = np.quantile(self.draws, [0.05, 0.95])
        return float(low), float(high)


def estimate_compute_slowdown(backward: RecordedBackward) -> Slowdown:
    """Estimate how much slower compute is while an all-reduce is in flight."""
    random = np.random.default_rng(0)
    if len(backward.start_ns) < _MIN_CYCLES:
        return _assumed_slowdown(_ASSUMPTIONS["compute"])
    durations, shares = _split_backward(backward)
    weights = np.median(durations, axis=0)
    contrast = np.sqrt((shares.var(axis=0) * weights).sum() / max(weights.sum(), 1.0))
    if contrast < _MIN_CONTRAST:
        return _assumed_slowdown(_ASSUMPTIONS["compute"])
    # log of the undisturbed time, by slowdown, cycle and interval
    pure = np.log(np.maximum(durations, 1.0)) + np.log1p(-(1 - 1 / _SLOWDOWNS)[:, None, None] * shares)

    def best(cycles: Int64Array) -> float:
        drawn = pure[:, cycles]
        spread = np.abs(drawn - np.median(drawn, axis=1, keepdims=True)).mean(axis=1)
        return float(_SLOWDOWNS[np.argmin(spread @ weights)])

    every = np.arange(len(durations))
    draws = [best(random.choice(every, size=len(every))) for _ in range(_DRAWS)]
    return Slowdown(value=best(every), is_known=True, draws=np.array(draws))


def estimate_communication_slowdown(
    transfers: Transfers, lane_slowdown: float = 1.0, line: CostLine | None = None
) -> Slowdown:
    """Estimate how much slower an all-reduce progresses while a rank computes.

    Args:
        lane_slowdown: Slowdown while another all-reduce is sending.
        line: Approximate cost of an all-reduce, to compare sizes that differ slightly; fitted if not given.
    """
    spans = transfers.without_slowdown(lane_slowdown=lane_slowdown)
    return _estimate_slowdown(spans, transfers.overlapped_share, line) or _assumed_slowdown(
        _ASSUMPTIONS["communication"]
    )


def estimate_lane_slowdown(
    transfers: Transfers, communication_slowdown: float = 1.0, line: CostLine | None = None
) -> Slowdown:
    """Estimate how much slower an all-reduce progresses while another one is sending: between 1 and 2.

    Args:
        communication_slowdown: Slowdown while a rank computes.
        line: As in ``estimate_communication_slowdown``.
    """
    spans = transfers.without_slowdown(communication_slowdown=communication_slowdown)
    found = _estimate_slowdown(spans, transfers.shared_share, line, most=_MAX_LANE_SLOWDOWN)
    return found or _assumed_slowdown(_ASSUMPTIONS["lanes"])


def compute_lane_slowdown_from_pairs(pairs: Spans, alone: CollectiveCost) -> Slowdown:
    """Compute the slowdown of two lanes from measured pairs of the largest size, where latency matters least.

    Args:
        pairs: Times of two all-reduces launched together, until both have ended.
        alone: Cost of a single all-reduce.
    """
    largest = pairs.bytes.max()
    beyond_latency_ns = max(float(alone.time_ns(largest)) - alone.alpha_ns, 1.0)
    pair_ns = pairs.time_ns[pairs.bytes == largest]
    factors = np.clip((pair_ns - alone.alpha_ns) / beyond_latency_ns, 1.0, _MAX_LANE_SLOWDOWN)
    drawn = np.random.default_rng(0).choice(factors, size=(_DRAWS, len(factors)))
    return Slowdown(value=float(np.median(factors)), is_known=True, draws=np.median(drawn, axis=1))


def _estimate_slowdown(
    spans: Spans, share: Float64Array, line: CostLine | None, most: float = float(_SLOWDOWNS[-1])
) -> Slowdown | None:
    """Estimate a slowdown that applied during a share of each all-reduce; None if the shares vary too little."""
    usable = spans.time_ns > 0
    bytes_, time_ns, cycle = spans.bytes[usable], spans.time_ns[usable], spans.cycle[usable]
    share = share[usable]
    if not len(bytes_):
        return None
    line = line or fit_line(bytes_, time_ns)
    size = np.floor(np.log(bytes_ / bytes_.min()) / np.log(_ABOUT_THE_SAME_SIZE)).astype(np.int64)
    telling = np.zeros(len(size), dtype=bool)
    for group in np.unique(size):
        of_size = size == group
        telling |= of_size & (of_size.sum() >= _MIN_TRANSFERS) & (np.std(share[of_size]) > 2 * _MIN_CONTRAST)
    if not telling.any():
        return None
    size, cycle = size[telling], cycle[telling]
    tried = _SLOWDOWNS[: np.searchsorted(_SLOWDOWNS, most, side="right")]
    pure = np.log(time_ns[telling] / line.time_ns(bytes_[telling])) + np.log1p(
        -(1 - 1 / tried)[:, None] * share[telling]
    )

    def best(rows: Int64Array) -> float:
        spread = np.zeros(len(tried))
        for group in np.unique(size[rows]):
            drawn = pure[:, rows[size[rows] == group]]
            spread += np.abs(drawn - np.median(drawn, axis=1, keepdims=True)).sum(axis=1)
        return float(tried[np.argmin(spread)])

    random = np.random.default_rng(0)
    draws = []
    cycles = np.unique(cycle)
    for _ in range(_DRAWS):
        times = np.bincount(random.choice(cycles, size=len(cycles)), minlength=cycles[-1] + 1)
        draws.append(best(np.repeat(np.arange(len(cycle)), times[cycle])))
    return Slowdown(value=best(np.arange(len(cycle))), is_known=True, draws=np.array(draws))


def _split_backward(backward: RecordedBackward) -> tuple[Float64Array, Float64Array]:
    """Divide backward into intervals, the same in all cycles; return their durations and shares with traffic.

    Returns:
        (S, K) durations and (S, K) shares, for the intervals of all ranks.
    """
    work, busy_ns = backward.without_slowdown(compute_slowdown=1.0), backward.busy_ns
    middle_ns = np.median(work.ready_ns - work.start_ns[:, :, None], axis=(0, 1))
    wanted = np.linspace(0, 1, _INTERVALS + 1)[1:-1] * np.median(work.end_ns - work.start_ns)
    positions = np.unique(np.clip(np.searchsorted(middle_ns, wanted), 0, len(middle_ns) - 1))
    cycles, ranks = work.start_ns.shape
    marks = np.concatenate([work.start_ns[:, :, None], work.ready_ns[:, :, positions], work.end_ns[:, :, None]], axis=2)
    busy = np.concatenate([np.zeros((cycles, ranks, 1)), busy_ns[:, :, positions], busy_ns[:, :, -1:]], axis=2)
    durations = np.diff(marks, axis=2).reshape(cycles, -1)
    shares = np.diff(busy, axis=2).reshape(cycles, -1) / np.maximum(durations, 1.0)
    return durations, np.clip(shares, 0.0, 1.0)


def _assumed_slowdown(assumed: _Assumption) -> Slowdown:
    draws = np.random.default_rng(0).uniform(assumed.low, assumed.high, size=_DRAWS)
    return Slowdown(value=assumed.value, is_known=False, draws=draws)
