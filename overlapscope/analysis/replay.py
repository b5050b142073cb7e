"""What if: the recorded cycles again, with the time of some ranks, causes or transfers replaced.

The graph behind a cycle is small. A rank arrives at each all-reduce when its own time up to there is over; an
all-reduce begins when the last rank has arrived and the previous one is over; the cycle ends with the last one. So a
cycle's length follows from own times and transfers by one maximum and one sum per all-reduce. With nothing
replaced the replay gives the recorded cycle to the nanosecond.

To ask what a rank costs, times are replaced by those of the median rank in the same cycle, as in
"Understanding Stragglers in Large Model Training Using What-if Analysis" (Lin et al., OSDI 2025): with all ranks like
that the cycle is *ideal*; what keeping one of them as recorded adds to it is that one's *cost*, and what fixing that
one alone would gain is its *saving*. Two equally late ranks have the same cost, and neither has a saving.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Final

import numpy as np
import numpy.typing as npt

from overlapscope.account.intervals import Int64Array
from overlapscope.analysis.cycles import CAUSES, GROUPS, Cycles, causes_of, lower_median, middle_ranks

BEST_TRANSFER_QUANTILE: Final = 0.05
"""Quantile that counts as the best observed transfer of a bucket: the very shortest one may be an outlier."""

_ARRIVALS_AT_ONCE: Final = 4_000_000
"""Each (S, R, K) that is computed on the way takes 32 MB then."""

_COLLECTIVES: Final = CAUSES.index("collectives")
_FORWARD: Final = CAUSES.index("forward")
"""Buffers are broadcast when forward is called; causes before this one come before that."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Times:
    """What R ranks do in S cycles of K all-reduces, in nanoseconds. The first rank broadcasts the buffers."""

    own_ns: Int64Array
    """(C, S, R) by cause"""
    lead_ns: Int64Array
    """(S, R, K) how long before its last arrival a rank arrives at each all-reduce."""
    broadcast_ns: Int64Array
    """(S, R) 0 in cycles without a broadcast."""

    def arrivals_ns(self, root_before_ns: Int64Array | None = None) -> Int64Array:
        """(S, R, K) when the ranks arrive.

        Args:
            root_before_ns: (S, 1) when the broadcasting rank is there, if it is not the first of these.
        """
        before_ns, after_ns = self.before_ns, self.own_ns[_FORWARD:].sum(axis=0)
        root_ns = before_ns[:, :1] if root_before_ns is None else root_before_ns
        ready_ns = np.where(self.broadcast_ns > 0, np.maximum(before_ns, root_ns), before_ns)
        arrivals_ns: Int64Array = (ready_ns + self.broadcast_ns + after_ns)[:, :, None] - self.lead_ns
        return arrivals_ns

    @property
    def buffers_ns(self) -> Int64Array:
        """(S, R) for how long ranks wait for their buffers, transfer included."""
        before_ns = self.before_ns
        waiting_ns = np.maximum(before_ns, before_ns[:, :1]) - before_ns
        buffers_ns: Int64Array = np.where(self.broadcast_ns > 0, waiting_ns + self.broadcast_ns, 0)
        return buffers_ns

    @property
    def before_ns(self) -> Int64Array:
        """(S, R) when the ranks call forward."""
        total_ns: Int64Array = self.own_ns[:_FORWARD].sum(axis=0)
        return total_ns

    def middle(self) -> Times:
        """One rank for all: the median rank of each group of causes and each cycle; see ``cycles.middle_ranks``.

        In collectives of the user's own ranks wait for the last one, which waits least: alike ranks would do that.
        """
        every = np.arange(self.own_ns.shape[1])
        own_ns = np.zeros_like(self.own_ns[:, :, 0])
        for group in GROUPS:
            middle = middle_ranks(self.own_ns, group)
            for cause in causes_of(group):
                own_ns[cause] = self.own_ns[cause, every, middle]
        own_ns[_COLLECTIVES] = self.own_ns[_COLLECTIVES].min(axis=1)
        lead_ns = self.lead_ns[every, middle_ranks(self.own_ns, "compute")]
        return Times(
            own_ns=own_ns[:, :, None],
            lead_ns=lead_ns[:, None, :],
            broadcast_ns=lower_median(self.broadcast_ns, axis=1)[:, None],
        )

    def of_ranks(self, places: npt.ArrayLike) -> Times:
        """Some of the ranks, by place."""
        places = np.asarray(places)
        return Times(
            own_ns=self.own_ns[:, :, places],
            lead_ns=self.lead_ns[:, places],
            broadcast_ns=self.broadcast_ns[:, places],
        )

    def few_at_once(self) -> Iterator[Times]:
        """All of these cycles, so many at once that as much again for each rank and all-reduce takes little memory."""
        for part in _few_at_once(self.lead_ns):
            yield Times(own_ns=self.own_ns[:, part], lead_ns=self.lead_ns[part], broadcast_ns=self.broadcast_ns[part])

    def plus(self, excess: Times) -> Times:
        """These times plus an excess, which may be negative."""
        return Times(
            own_ns=self.own_ns + excess.own_ns,
            lead_ns=self.lead_ns + excess.lead_ns,
            broadcast_ns=self.broadcast_ns + excess.broadcast_ns,
        )

    def minus(self, excess: Times) -> Times:
        """These times minus an excess; broadcasts as numpy does, like ``plus``."""
        return Times(
            own_ns=self.own_ns - excess.own_ns,
            lead_ns=self.lead_ns - excess.lead_ns,
            broadcast_ns=self.broadcast_ns - excess.broadcast_ns,
        )

    def restricted(self, causes: npt.ArrayLike, cycles: npt.NDArray[np.bool_] | slice = slice(None)) -> Times:
        """These times, zero except for some causes and cycles. Leads go with backward, in which they arise."""
        own_ns, lead_ns = np.zeros_like(self.own_ns), np.zeros_like(self.lead_ns)
        causes = np.atleast_1d(causes)
        for cause in causes:
            own_ns[cause, cycles] = self.own_ns[cause, cycles]
        if CAUSES.index("backward") in causes:
            lead_ns[cycles] = self.lead_ns[cycles]
        return Times(own_ns=own_ns, lead_ns=lead_ns, broadcast_ns=np.zeros_like(self.broadcast_ns))


def _few_at_once(lead_ns: Int64Array) -> list[slice]:
    """One after the other, all cycles of (S, R, K); at least one slice."""
    each = max(1, _ARRIVALS_AT_ONCE // max(1, lead_ns[:1].size))
    return [slice(first, first + each) for first in range(0, max(1, len(lead_ns)), each)]


def finish_ns(last_arrival_ns: Int64Array, transfer_ns: Int64Array) -> Int64Array:
    """When each cycle ends.

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
    """The median, in whole nanoseconds, with the axis kept; 0 of nothing."""
    if not values_ns.shape[axis]:
        return np.zeros_like(values_ns.sum(axis=axis, keepdims=True))
    return np.median(values_ns, axis=axis, keepdims=True).round().astype(np.int64)


class Replay:
    """The cycles as recorded, their ideal, and anything between. Every result is nanoseconds by cycle (S,)."""

    def __init__(self, cycles: Cycles) -> None:
        self.cycles = cycles
        self.recorded = Times(own_ns=cycles.own_ns, lead_ns=cycles.lead_ns, broadcast_ns=cycles.broadcast_ns)
        self.ideal = self.recorded.middle()
        self.transfer_ns = cycles.transfer_ns
        best_ns = np.quantile(self.transfer_ns, BEST_TRANSFER_QUANTILE, axis=0, method="lower")
        self.best_transfer_ns = np.minimum(self.transfer_ns, best_ns)

    @property
    def excess(self) -> Times:
        """How much longer each rank takes than the median rank; who waits in a collective is not late."""
        return self.excess_of(np.arange(len(self.cycles.ranks)))

    def excess_of(self, places: npt.ArrayLike) -> Times:
        """The same of some of the ranks, by place."""
        excess = self.recorded.of_ranks(places).minus(self.ideal)
        excess.own_ns[_COLLECTIVES] = 0
        return excess

    @cached_property
    def recorded_ns(self) -> Int64Array:
        """(S,) as recorded."""
        return finish_ns(self._last_arrivals_ns, self.transfer_ns)

    @cached_property
    def ideal_ns(self) -> Int64Array:
        """(S,) if all ranks were like the median rank."""
        return finish_ns(self._ideal_arrivals_ns[:, 0], self.transfer_ns)

    def with_transfers_ns(self, transfer_ns: Int64Array) -> Int64Array:
        """(S,) with other transfers (S, K)."""
        return finish_ns(self._last_arrivals_ns, transfer_ns)

    def ideal_with_transfers_ns(self, transfer_ns: Int64Array) -> Int64Array:
        """(S,) the ideal with other transfers (S, K)."""
        return finish_ns(self._ideal_arrivals_ns[:, 0], transfer_ns)

    def ideal_but_ns(self, places: npt.ArrayLike, excess: Times) -> Int64Array:
        """(S,) if all ranks were like the median rank, but those in some places later by an excess."""
        places = np.atleast_1d(places)
        late = self.ideal.plus(excess)
        root_ns = late.before_ns[:, :1] if 0 in places else self.ideal.before_ns
        last_ns = late.arrivals_ns(root_ns).max(axis=1)
        if len(places) < len(self.cycles.ranks):
            last_ns = np.maximum(last_ns, self.ideal.arrivals_ns(root_ns)[:, 0])
        return finish_ns(last_ns, self.transfer_ns)

    def without(self, places: Sequence[int], excess: Times) -> Times:
        """What ranks do if those in some places are without an excess."""
        places = list(places)
        fixed = self.recorded.of_ranks(places).minus(excess)
        own_ns, lead_ns, broadcast_ns = (
            values.copy() for values in (self.recorded.own_ns, self.recorded.lead_ns, self.recorded.broadcast_ns)
        )
        # The others wait for less in collectives of the user's own, but not less than who waits least.
        waited_ns = own_ns[_COLLECTIVES] - own_ns[_COLLECTIVES].min(axis=1, keepdims=True)
        saved_ns = np.maximum(excess.own_ns.sum(axis=0).max(axis=1, keepdims=True), 0)
        own_ns[_COLLECTIVES] -= np.minimum(waited_ns, saved_ns)
        fixed.own_ns[_COLLECTIVES] = own_ns[_COLLECTIVES][:, places]
        own_ns[:, :, places], lead_ns[:, places] = fixed.own_ns, fixed.lead_ns
        broadcast_ns[:, places] = fixed.broadcast_ns
        return Times(own_ns=own_ns, lead_ns=lead_ns, broadcast_ns=broadcast_ns)

    def length_ns(self, times: Times) -> Int64Array:
        """(S,) if all ranks did something else."""
        last_ns = [some.arrivals_ns().max(axis=1) for some in times.few_at_once()]
        return finish_ns(np.concatenate(last_ns), self.transfer_ns)

    def costs_by_rank_ns(self) -> Int64Array:
        """(S, R) what each rank alone, all its causes together, adds to the ideal."""
        return self._by_cycles(Replay._costs_by_rank_ns)

    def _costs_by_rank_ns(self) -> Int64Array:
        arrivals_ns = self._hardly_waiting.arrivals_ns(self.ideal.before_ns)
        together_ns = np.maximum(arrivals_ns, self._ideal_arrivals_ns)
        costs_ns = finish_ns(together_ns, self.transfer_ns) - self.ideal_ns[:, None]
        costs_ns[:, 0] = self.ideal_but_ns(0, self.excess_of([0])) - self.ideal_ns  # the others wait for its buffers
        return costs_ns

    def savings_by_rank_ns(self) -> Int64Array:
        """(S, R) what would be gained if one rank were like the median rank, and the others as recorded."""
        return self._by_cycles(Replay._savings_by_rank_ns)

    def _savings_by_rank_ns(self) -> Int64Array:
        savings_ns = self._savings_ns(self.recorded.arrivals_ns())
        collectives_ns = self.recorded.own_ns[_COLLECTIVES]
        if collectives_ns.any():  # the others wait there for the last one, and would not if it were mended
            is_last = collectives_ns == collectives_ns.min(axis=1, keepdims=True)
            savings_ns = np.where(is_last, self._savings_ns(self._hardly_waiting.arrivals_ns()), savings_ns)
        savings_ns[:, 0] = self.recorded_ns - self.length_ns(self.without([0], self.excess_of([0])))
        return savings_ns

    def _savings_ns(self, arrivals_ns: Int64Array) -> Int64Array:
        """(S, R) what is gained over the recorded cycles if all ranks but one arrive like this (S, R, K)."""
        mended_ns = self.ideal.arrivals_ns(self.recorded.before_ns[:, :1])
        order = np.argpartition(arrivals_ns, arrivals_ns.shape[1] - 2, axis=1)[:, -2:]
        second, last = (np.take_along_axis(arrivals_ns, order[:, place : place + 1], axis=1) for place in (0, 1))
        places = np.arange(arrivals_ns.shape[1])[None, :, None]
        others_ns = np.where(places == order[:, 1:], second, last)
        savings_ns: Int64Array = self.recorded_ns[:, None] - finish_ns(
            np.maximum(others_ns, mended_ns), self.transfer_ns
        )
        return savings_ns

    def cost_of_cause_ns(self, cause: int) -> Int64Array:
        """(S,) what one cause, on all ranks, adds to the ideal."""
        ranks = np.arange(len(self.cycles.ranks))
        return self._by_cycles(lambda some: some.ideal_but_ns(ranks, some.excess.restricted(cause)) - some.ideal_ns)

    def _by_cycles(self, result: Callable[[Replay], Int64Array]) -> Int64Array:
        """A result by cycle, of so many cycles at once that it takes little memory on the way."""
        parts = _few_at_once(self.recorded.lead_ns)
        if len(parts) == 1:
            return result(self)
        number = np.arange(len(self.cycles.steps))
        masks = ((number >= part.start) & (number < part.stop) for part in parts)
        return np.concatenate([result(Replay(self.cycles.of(mask))) for mask in masks])

    @cached_property
    def _hardly_waiting(self) -> Times:
        """What ranks do, but in collectives of the user's own all wait for as long as the one that waits least."""
        own_ns = self.recorded.own_ns.copy()
        own_ns[_COLLECTIVES] = own_ns[_COLLECTIVES].min(axis=1, keepdims=True)
        return replace(self.recorded, own_ns=own_ns)

    @cached_property
    def _last_arrivals_ns(self) -> Int64Array:
        """(S, K) when the last rank arrives."""
        return np.concatenate([some.arrivals_ns().max(axis=1) for some in self.recorded.few_at_once()])

    @cached_property
    def _ideal_arrivals_ns(self) -> Int64Array:
        return self.ideal.arrivals_ns()
