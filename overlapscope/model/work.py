"""What ranks do on their own in each recorded cycle: when gradients would be ready if nothing was sent or copied.

Recorded gradients come later than that, because compute is slowed down while an all-reduce is in flight and because
buckets are copied between them. Both are taken out here, and put in again by a replay with other buckets.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from overlapscope.model.line import Line
from overlapscope.model.observation import Observations
from overlapscope.model.partition import Float64Array, Gradients
from overlapscope.model.plan_table import table_of


@dataclass(frozen=True, eq=False, kw_only=True)
class Work:
    """S cycles of R ranks. Times are of compute, from the end of the copies back of the step before."""

    gradients: Gradients
    start_ns: Float64Array
    """(S, R) of backward."""
    ready_ns: Float64Array
    """(S, R, P) when all gradients up to a place in their order are there; never falling."""
    end_ns: Float64Array
    """(S, R) of backward."""

    @cached_property
    def last_ready_ns(self) -> Float64Array:
        """(S, P) on the last rank."""
        return self.ready_ns.max(axis=1)

    @cached_property
    def last_end_ns(self) -> Float64Array:
        """(S,) on the last rank."""
        return self.end_ns.max(axis=1)

    def of_cycles(self, which: npt.NDArray[Any] | slice) -> Work:
        """Some of the cycles, as numpy picks them; also some of them several times."""
        return replace(self, start_ns=self.start_ns[which], ready_ns=self.ready_ns[which], end_ns=self.end_ns[which])

    def typical(self) -> Work:
        """One cycle for all: the median of every time."""
        return replace(
            self,
            start_ns=np.median(self.start_ns, axis=0, keepdims=True),
            ready_ns=np.median(self.ready_ns, axis=0, keepdims=True),
            end_ns=np.median(self.end_ns, axis=0, keepdims=True),
        )

    def later_by(self, delay_ns: Float64Array | float) -> Work:
        """The same work, with backward beginning later.

        Args:
            delay_ns: broadcasts to (S, R); may be negative.
        """
        delay_ns = np.broadcast_to(np.asarray(delay_ns, dtype=np.float64), self.start_ns.shape)
        return replace(
            self,
            start_ns=self.start_ns + delay_ns,
            ready_ns=self.ready_ns + delay_ns[:, :, None],
            end_ns=self.end_ns + delay_ns,
        )


@dataclass(frozen=True, eq=False, kw_only=True)
class Backward:
    """Backward as it was recorded: S cycles of R ranks, with what delayed it. Times count from the cycle's start."""

    gradients: Gradients
    copied_out_ns: Float64Array
    """(S, R) when the copies back of the step before were over."""
    start_ns: Float64Array
    """(S, R)"""
    ready_ns: Float64Array
    """(S, R, P) by place in the order of gradients; never falling, and with no gaps."""
    end_ns: Float64Array
    """(S, R)"""
    busy_ns: Float64Array
    """(S, R, P + 1) for how long, until each gradient and the end, something had been in flight."""
    copied_in_ns: Float64Array
    """(S, P + 1) for how long, until each gradient and the end, buckets had been copied."""

    def freed_of(self, compute_slowdown: float) -> Work:
        """The work without copies, and without what was in flight having slowed it down."""
        delays_ns = (
            (1 - 1 / compute_slowdown) * self.busy_ns + self.copied_in_ns[:, None] + self.copied_out_ns[:, :, None]
        )
        ready_ns = np.maximum.accumulate(self.ready_ns - delays_ns[:, :, :-1], axis=2)
        return Work(
            gradients=self.gradients,
            start_ns=self.start_ns - self.copied_out_ns,
            ready_ns=ready_ns,
            end_ns=np.maximum(self.end_ns - delays_ns[:, :, -1], ready_ns[:, :, -1]),
        )


def backward_of(observations: Observations, copy_in: Line) -> Backward:
    """What was recorded of backward.

    Args:
        copy_in: what copying a bucket took.
    """
    ready_ns, end_ns = _moments_of(observations)
    return Backward(
        gradients=observations.gradients,
        copied_out_ns=observations.copies_out_ns,
        start_ns=observations.backward_start_ns,
        ready_ns=ready_ns,
        end_ns=end_ns,
        busy_ns=_busy_until(observations, np.concatenate([ready_ns, end_ns[:, :, None]], axis=2)),
        copied_in_ns=_copied_before(observations, copy_in),
    )


def _moments_of(observations: Observations) -> tuple[Float64Array, Float64Array]:
    """When gradients were ready, and backward over, from the cycle's start; never falling, and with no gaps.

    Gradients whose time is unknown are put between their neighbours, by their bytes.

    Returns:
        (S, R, P) by place in the order of gradients, and (S, R).
    """
    order = observations.gradients.order
    ready_ns = observations.ready_ns[:, :, order].copy()
    passed = np.cumsum(observations.gradients.bytes[order]).astype(np.float64)
    end_ns = observations.backward_end_ns
    gaps = np.isnan(ready_ns)
    for cycle, rank in zip(*np.nonzero(gaps.any(axis=2)), strict=True):
        known = ~gaps[cycle, rank]
        ready_ns[cycle, rank] = np.interp(
            passed,
            np.concatenate([[0.0], passed[known], [] if known[-1] else [passed[-1]]]),
            np.concatenate([[0.0], ready_ns[cycle, rank, known], [] if known[-1] else [end_ns[cycle, rank]]]),
        )
    start_ns = observations.backward_start_ns
    ready_ns = np.maximum.accumulate(ready_ns, axis=2) + start_ns[:, :, None]
    return ready_ns, np.maximum(end_ns + start_ns, ready_ns[:, :, -1])


def _busy_until(observations: Observations, moments_ns: Float64Array) -> Float64Array:
    """(S, R, N) for how long, up to each moment (S, R, N), an all-reduce was in flight, as each rank's clock has it."""
    collectives = observations.collectives
    bounds = np.searchsorted(collectives.cycle, np.arange(len(moments_ns) + 1))
    busy_ns = np.zeros_like(moments_ns)
    for cycle, (first, end) in enumerate(pairwise(bounds)):
        ends_ns = collectives.end_ns[first:end]
        starts_ns = ends_ns - collectives.transfer_ns[first:end, None]
        for rank in range(moments_ns.shape[1]):
            starts, until = np.sort(starts_ns[:, rank]), np.sort(ends_ns[:, rank])
            moments = moments_ns[cycle, rank]
            # What has begun less what has ended is how many are in flight; its union is summed between the changes.
            edges = np.concatenate([starts, until])
            change = np.concatenate([np.ones(len(starts)), -np.ones(len(until))])
            by_time = np.lexsort((-change, edges))
            edges, in_flight = edges[by_time], np.cumsum(change[by_time])
            lengths = np.diff(edges, append=edges[-1:]) * (in_flight > 0)
            if len(edges):
                busy_ns[cycle, rank] = np.interp(moments, edges, np.concatenate([[0.0], np.cumsum(lengths)[:-1]]))
    return busy_ns


def _copied_before(observations: Observations, copy_in: Line) -> Float64Array:
    """(S, P + 1) how long buckets were copied before each gradient, and in all, in the plans that were in force."""
    table = table_of(observations.plans, observations.gradients)
    time_ns = np.where(table.is_bucket, copy_in.time_ns(table.bytes), 0.0)
    after = np.zeros((len(table), len(observations.gradients.order) + 1))
    np.add.at(after, (np.arange(len(table))[:, None], table.last + 1), time_ns)
    copied: Float64Array = np.cumsum(after, axis=1)[observations.plan]
    return copied
