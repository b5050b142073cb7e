"""What-if replay: the recorded cycles again, with the times of some ranks, causes or transfers replaced.

The dependency graph of a cycle is small. A rank arrives at each all-reduce when its local time up to there is over; an
all-reduce begins when the last rank has arrived and the previous one is over; the cycle ends with the last one. So a
cycle's length follows from local times and transfers by one maximum and one sum per all-reduce. With nothing replaced
the replay gives the recorded cycle to the nanosecond.

To find what a rank costs, times are replaced by those of the median rank in the same cycle, as in "Understanding
Stragglers in Large Model Training Using What-if Analysis" (Lin et al., OSDI 2025): with all ranks like that the cycle
is *ideal*. What would be gained if only one rank were like that is its *saving*; what one rank as recorded adds to the
ideal says whether it matters at all.

Example: one all-reduce of 30 ns, local times of 80, 80 and 120 ns. The recorded cycle takes 150 ns, the ideal 110 ns,
and the third rank has a saving of 40 ns and adds as much. With local times of 80, 80, 80, 120 and 120 ns, both late
ranks add 40 ns to the ideal, but have a saving of 0, as the other one is still late.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Final

import numpy as np
import numpy.typing as npt

from overlapscope.breakdown.spans import Float64Array, Int64Array
from overlapscope.stragglers.cycles import (
    CAUSE_GROUPS,
    CAUSES,
    Cycles,
    find_median_ranks,
    get_cause_indices,
    lower_median,
    previous_ends,
)

BEST_TRANSFER_QUANTILE: Final = 0.05
"""Quantile that counts as the best observed transfer of a bucket: the very shortest one may be an outlier."""
MIN_KNOWN_TRANSFERS: Final = 5
"""Minimum number of transfers of a bucket that are known exactly, for one of them to be the best."""

_ARRIVALS_AT_ONCE: Final = 4_000_000
"""Maximum size of temporary arrays (S, R, K), each of which then takes 32 MB."""

_COLLECTIVES: Final = CAUSES.index("collectives")
_FORWARD: Final = CAUSES.index("forward")
"""Index of the cause during which buffers are broadcast: earlier causes precede the broadcast."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Times:
    """Times of R ranks in S cycles of K all-reduces, in nanoseconds. The first rank broadcasts the buffers."""

    local_ns: Int64Array
    """(C, S, R) Local time by cause."""
    lead_ns: Int64Array
    """(S, R, K) How long before its last arrival a rank arrives at each all-reduce."""
    broadcast_ns: Int64Array
    """(S, R) Time of the broadcast of buffers; 0 in cycles without one."""

    def arrivals_ns(self, root_before_ns: Int64Array | None = None) -> Int64Array:
        """Return when the ranks arrive at each all-reduce (S, R, K).

        Args:
            root_before_ns: (S, 1) When the broadcasting rank calls forward, if it is not the first of these ranks.
        """
        before_ns, after_ns = self.before_ns, self.local_ns[_FORWARD:].sum(axis=0)
        root_ns = before_ns[:, :1] if root_before_ns is None else root_before_ns
        ready_ns = np.where(self.broadcast_ns > 0, np.maximum(before_ns, root_ns), before_ns)
        arrivals_ns: Int64Array = (ready_ns + self.broadcast_ns + after_ns)[:, :, None] - self.lead_ns
        return arrivals_ns

    @property
    def buffers_ns(self) -> Int64Array:
        """Return for how long ranks wait for their buffers, transfer included (S, R)."""
        before_ns = self.before_ns
        waiting_ns = np.maximum(before_ns, before_ns[:, :1]) - before_ns
        buffers_ns: Int64Array = np.where(self.broadcast_ns > 0, waiting_ns + self.broadcast_ns, 0)
        return buffers_ns

    @property
    def before_ns(self) -> Int64Array:
        """Return when the ranks call forward (S, R)."""
        total_ns: Int64Array = self.local_ns[:_FORWARD].sum(axis=0)
        return total_ns

    def middle(self) -> Times:
        """Return one rank that stands for all: the median of each group of causes and each cycle.

        See ``cycles.find_median_ranks``. In collectives issued by user code ranks wait for the last one, which waits
        least: equal ranks would wait for that time.
        """
        all_cycles = np.arange(self.local_ns.shape[1])
        local_ns = np.zeros_like(self.local_ns[:, :, 0])
        for group in CAUSE_GROUPS:
            middle = find_median_ranks(self.local_ns, group)
            for cause in get_cause_indices(group):
                local_ns[cause] = self.local_ns[cause, all_cycles, middle]
        local_ns[_COLLECTIVES] = self.local_ns[_COLLECTIVES].min(axis=1)
        lead_ns = self.lead_ns[all_cycles, find_median_ranks(self.local_ns, "compute")]
        return Times(
            local_ns=local_ns[:, :, None],
            lead_ns=lead_ns[:, None, :],
            broadcast_ns=lower_median(self.broadcast_ns, axis=1)[:, None],
        )

    def of_ranks(self, indices: npt.ArrayLike) -> Times:
        """Return the times of some ranks, by index."""
        indices = np.asarray(indices)
        return Times(
            local_ns=self.local_ns[:, :, indices],
            lead_ns=self.lead_ns[:, indices],
            broadcast_ns=self.broadcast_ns[:, indices],
        )

    def split_by_cycles(self) -> Iterator[Times]:
        """Yield all cycles in parts that are small enough for temporary arrays with a value per rank and all-reduce."""
        for part in _split_cycles(self.lead_ns):
            yield Times(
                local_ns=self.local_ns[:, part], lead_ns=self.lead_ns[part], broadcast_ns=self.broadcast_ns[part]
            )

    def plus(self, excess: Times) -> Times:
        """Add an excess, which may be negative."""
        return Times(
            local_ns=self.local_ns + excess.local_ns,
            lead_ns=self.lead_ns + excess.lead_ns,
            broadcast_ns=self.broadcast_ns + excess.broadcast_ns,
        )

    def minus(self, excess: Times) -> Times:
        """Subtract an excess; shapes broadcast as in numpy, also in ``plus``."""
        return Times(
            local_ns=self.local_ns - excess.local_ns,
            lead_ns=self.lead_ns - excess.lead_ns,
            broadcast_ns=self.broadcast_ns - excess.broadcast_ns,
        )

    def restricted(self, causes: npt.ArrayLike, cycles: npt.NDArray[np.bool_] | slice = slice(None)) -> Times:
        """Keep the times of some causes and cycles, and set the others to zero.

        Leads are kept with backward, in which they arise.
        """
        local_ns, lead_ns = np.zeros_like(self.local_ns), np.zeros_like(self.lead_ns)
        causes = np.atleast_1d(causes)
        for cause in causes:
            local_ns[cause, cycles] = self.local_ns[cause, cycles]
        if CAUSES.index("backward") in causes:
            lead_ns[cycles] = self.lead_ns[cycles]
        return Times(local_ns=local_ns, lead_ns=lead_ns, broadcast_ns=np.zeros_like(self.broadcast_ns))


def _split_cycles(lead_ns: Int64Array) -> list[slice]:
    """Return consecutive slices that cover all cycles of (S, R, K); at least one."""
    each = max(1, _ARRIVALS_AT_ONCE // max(1, lead_ns[:1].size))
    return [slice(first, first + each) for first in range(0, max(1, len(lead_ns)), each)]


def finish_ns(last_arrival_ns: Int64Array, transfer_ns: Int64Array) -> Int64Array:
    """Return when each cycle ends.

    Example: arrivals [10, 20] and transfers [15, 5] give 30, as the first all-reduce ends at 25, after the second
    arrival.

    Args:
        last_arrival_ns: (S, ..., K)
        transfer_ns: (S, K)

    Returns:
        (S, ...)
    """
    shape = (len(transfer_ns), *[1] * (last_arrival_ns.ndim - 2))
    end_ns = np.zeros(last_arrival_ns.shape[:-1], dtype=np.int64)
    for number in range(last_arrival_ns.shape[-1]):
        end_ns = np.maximum(last_arrival_ns[..., number], end_ns) + transfer_ns[:, number].reshape(shape)
    return end_ns


def median_ns(values_ns: Int64Array, axis: int) -> Int64Array:
    """Compute the median in whole nanoseconds, keeping the axis; 0 for an empty axis."""
    if not values_ns.shape[axis]:
        return np.zeros_like(values_ns.sum(axis=axis, keepdims=True))
    return np.median(values_ns, axis=axis, keepdims=True).round().astype(np.int64)


def _find_best_ns(cycles: Cycles) -> Float64Array:
    """Return the best observed transfer of each bucket (K,); NaN if too few are known.

    A transfer is known if the link was idle when the last rank arrived, or all-reduces run one by one, as with NCCL.
    Where two run at a time, as with gloo, one behind another may have begun earlier than that one ended, and seem to
    take no time at all.
    """
    is_known = (cycles.arrival_ns.max(axis=1) >= previous_ends(cycles.end_ns)) | cycles.is_serial
    return np.array(
        [
            np.quantile(of_bucket[known], BEST_TRANSFER_QUANTILE, method="lower")
            if known.sum() >= MIN_KNOWN_TRANSFERS
            else np.nan
            for of_bucket, known in zip(cycles.transfer_ns.T, is_known.T, strict=True)
        ]
    )


class Replay:
    """Recorded cycles, their ideal, and variants in between. Every result is nanoseconds by cycle (S,)."""

    def __init__(self, cycles: Cycles) -> None:
        self.cycles = cycles
        self.recorded = Times(local_ns=cycles.local_ns, lead_ns=cycles.lead_ns, broadcast_ns=cycles.broadcast_ns)
        self.ideal = self.recorded.middle()
        self.transfer_ns = cycles.transfer_ns
        self.best_ns = _find_best_ns(cycles)
        # Not where all are shorter than the best that is known, or none is known.
        self.best_transfer_ns = np.fmin(self.transfer_ns, self.best_ns).astype(np.int64)

    @property
    def excess(self) -> Times:
        """Return how much longer each rank takes than the median rank; waiting in a collective is not lateness."""
        return self.excess_of(np.arange(len(self.cycles.ranks)))

    def excess_of(self, indices: npt.ArrayLike) -> Times:
        """Return the excess of some of the ranks, by index."""
        excess = self.recorded.of_ranks(indices).minus(self.ideal)
        excess.local_ns[_COLLECTIVES] = 0
        return excess

    @cached_property
    def recorded_ns(self) -> Int64Array:
        """Return the recorded lengths (S,)."""
        return finish_ns(self._last_arrivals_ns, self.transfer_ns)

    @cached_property
    def ideal_ns(self) -> Int64Array:
        """Return the lengths (S,) if all ranks were like the median rank."""
        return finish_ns(self._ideal_arrivals_ns[:, 0], self.transfer_ns)

    def with_transfers_ns(self, transfer_ns: Int64Array) -> Int64Array:
        """Return the lengths (S,) with other transfers (S, K)."""
        return finish_ns(self._last_arrivals_ns, transfer_ns)

    def ideal_with_transfers_ns(self, transfer_ns: Int64Array) -> Int64Array:
        """Return the lengths (S,) of the ideal with other transfers (S, K)."""
        return finish_ns(self._ideal_arrivals_ns[:, 0], transfer_ns)

    def ideal_except_ns(self, indices: npt.ArrayLike, excess: Times) -> Int64Array:
        """Return the lengths (S,) of the ideal in which some ranks, by index, are later by an excess."""
        indices = np.atleast_1d(indices)
        late = self.ideal.plus(excess)
        root_ns = late.before_ns[:, :1] if 0 in indices else self.ideal.before_ns
        last_ns = late.arrivals_ns(root_ns).max(axis=1)
        if len(indices) < len(self.cycles.ranks):
            last_ns = np.maximum(last_ns, self.ideal.arrivals_ns(root_ns)[:, 0])
        return finish_ns(last_ns, self.transfer_ns)

    def without(self, indices: Sequence[int], excess: Times) -> Times:
        """Return the times of all ranks if some ranks, by index, were without an excess."""
        indices = list(indices)
        fixed = self.recorded.of_ranks(indices).minus(excess)
        local_ns, lead_ns, broadcast_ns = (
            values.copy() for values in (self.recorded.local_ns, self.recorded.lead_ns, self.recorded.broadcast_ns)
        )
        # The others wait for less in collectives issued by user code, but not for less than the one that waits least.
        waited_ns = local_ns[_COLLECTIVES] - local_ns[_COLLECTIVES].min(axis=1, keepdims=True)
        saved_ns = np.maximum(excess.local_ns.sum(axis=0).max(axis=1, keepdims=True), 0)
        local_ns[_COLLECTIVES] -= np.minimum(waited_ns, saved_ns)
        fixed.local_ns[_COLLECTIVES] = local_ns[_COLLECTIVES][:, indices]
        local_ns[:, :, indices], lead_ns[:, indices] = fixed.local_ns, fixed.lead_ns
        broadcast_ns[:, indices] = fixed.broadcast_ns
        return Times(local_ns=local_ns, lead_ns=lead_ns, broadcast_ns=broadcast_ns)

    def length_ns(self, times: Times) -> Int64Array:
        """Return the lengths (S,) with other times of all ranks."""
        last_ns = [some.arrivals_ns().max(axis=1) for some in times.split_by_cycles()]
        return finish_ns(np.concatenate(last_ns), self.transfer_ns)

    def savings_by_rank_ns(self) -> Int64Array:
        """Return what would be gained if one rank were like the median rank and the others as recorded (S, R)."""
        return self._by_cycles(Replay._savings_by_rank_ns)

    def _savings_by_rank_ns(self) -> Int64Array:
        savings_ns = self._savings_ns(self.recorded.arrivals_ns())
        collectives_ns = self.recorded.local_ns[_COLLECTIVES]
        if collectives_ns.any():  # others wait there for the last rank, and would not if it were fixed
            is_last = collectives_ns == collectives_ns.min(axis=1, keepdims=True)
            savings_ns = np.where(is_last, self._savings_ns(self._minimal_waits.arrivals_ns()), savings_ns)
        savings_ns[:, 0] = self.saving_of_ranks_ns([0])  # other ranks wait for its buffers
        return savings_ns

    def _savings_ns(self, arrivals_ns: Int64Array) -> Int64Array:
        """Return the gain over the recorded cycles (S, R) if all ranks but one arrive at the given times (S, R, K)."""
        fixed_ns = self.ideal.arrivals_ns(self.recorded.before_ns[:, :1])
        order = np.argpartition(arrivals_ns, arrivals_ns.shape[1] - 2, axis=1)[:, -2:]
        second, last = (
            np.take_along_axis(arrivals_ns, order[:, position : position + 1], axis=1) for position in (0, 1)
        )
        indices = np.arange(arrivals_ns.shape[1])[None, :, None]
        others_ns = np.where(indices == order[:, 1:], second, last)
        savings_ns: Int64Array = self.recorded_ns[:, None] - finish_ns(
            np.maximum(others_ns, fixed_ns), self.transfer_ns
        )
        return savings_ns

    def saving_of_ranks_ns(self, indices: Sequence[int]) -> Int64Array:
        """Return what would be gained (S,) if some ranks, by index, were like the median rank."""
        return self.recorded_ns - self.length_ns(self.without(indices, self.excess_of(indices)))

    def saving_of_cause_ns(self, cause: int) -> Int64Array:
        """Return what would be gained (S,) if all ranks were like the median rank in one cause."""
        ranks = range(len(self.cycles.ranks))
        return self._by_cycles(
            lambda some: some.recorded_ns - some.length_ns(some.without(ranks, some.excess.restricted(cause)))
        )

    def _by_cycles(self, result: Callable[[Replay], Int64Array]) -> Int64Array:
        """Compute a result by cycle, for few enough cycles at a time that temporary arrays take little memory."""
        parts = _split_cycles(self.recorded.lead_ns)
        if len(parts) == 1:
            return result(self)
        number = np.arange(len(self.cycles.steps))
        masks = ((number >= part.start) & (number < part.stop) for part in parts)
        return np.concatenate([result(Replay(self.cycles.of(mask))) for mask in masks])

    @cached_property
    def _minimal_waits(self) -> Times:
        """Return the recorded times, but with minimal waits of all ranks in collectives issued by user code."""
        local_ns = self.recorded.local_ns.copy()
        local_ns[_COLLECTIVES] = local_ns[_COLLECTIVES].min(axis=1, keepdims=True)
        return replace(self.recorded, local_ns=local_ns)

    @cached_property
    def _last_arrivals_ns(self) -> Int64Array:
        """Return when the last rank arrives at each all-reduce (S, K)."""
        return np.concatenate([some.arrivals_ns().max(axis=1) for some in self.recorded.split_by_cycles()])

    @cached_property
    def _ideal_arrivals_ns(self) -> Int64Array:
        return self.ideal.arrivals_ns()
