"""Compute of ranks in each recorded cycle: when gradients would be ready if nothing were sent or copied.

Recorded gradients are ready later than that, because compute is slowed down while an all-reduce is in flight and
because buckets are copied in between. Both are removed here, and added again by a replay with other buckets.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from overlapscope.bucket_model.cost import CostLine
from overlapscope.bucket_model.observation import Observations
from overlapscope.bucket_model.partition import Float64Array, Gradients, Int64Array, build_table


@dataclass(frozen=True, eq=False, kw_only=True)
class ComputeTimes:
    """Compute of S cycles on R ranks, in compute time relative to the end of the previous step's copies out."""

    gradients: Gradients
    ranks: Int64Array
    """(R,) rank numbers."""
    start_ns: Float64Array
    """(S, R) start of backward."""
    ready_ns: Float64Array
    """(S, R, P) time at which all gradients up to a position in their order are ready; never decreasing."""
    end_ns: Float64Array
    """(S, R) end of backward."""

    @cached_property
    def last_ready_ns(self) -> Float64Array:
        """Return (S, P) the ready times on the last rank."""
        return self.ready_ns.max(axis=1)

    @cached_property
    def last_end_ns(self) -> Float64Array:
        """Return (S,) the end of backward on the last rank."""
        return self.end_ns.max(axis=1)

    def select_cycles(self, which: npt.NDArray[Any] | slice) -> ComputeTimes:
        """Select some of the cycles by a numpy index, which may repeat cycles."""
        return replace(self, start_ns=self.start_ns[which], ready_ns=self.ready_ns[which], end_ns=self.end_ns[which])

    def typical(self) -> ComputeTimes:
        """Return a single cycle, the median of every time."""
        return replace(
            self,
            start_ns=np.median(self.start_ns, axis=0, keepdims=True),
            ready_ns=np.median(self.ready_ns, axis=0, keepdims=True),
            end_ns=np.median(self.end_ns, axis=0, keepdims=True),
        )

    def delayed_by(self, delay_ns: Float64Array | float) -> ComputeTimes:
        """Return the same work with backward starting later.

        Args:
            delay_ns: Broadcasts to (S, R); may be negative.
        """
        delay_ns = np.broadcast_to(np.asarray(delay_ns, dtype=np.float64), self.start_ns.shape)
        return replace(
            self,
            start_ns=self.start_ns + delay_ns,
            ready_ns=self.ready_ns + delay_ns[:, :, None],
            end_ns=self.end_ns + delay_ns,
        )


@dataclass(frozen=True, eq=False, kw_only=True)
class RecordedBackward:
    """Recorded backward of S cycles on R ranks, with what delayed it. Times are relative to the start of the cycle."""

    gradients: Gradients
    ranks: Int64Array
    """(R,) rank numbers."""
    copies_out_end_ns: Float64Array
    """(S, R) end of the previous step's copies out."""
    start_ns: Float64Array
    """(S, R) start of backward."""
    ready_ns: Float64Array
    """(S, R, P) ready times by position in the order of gradients; never decreasing, and without gaps."""
    end_ns: Float64Array
    """(S, R) end of backward."""
    busy_ns: Float64Array
    """(S, R, P + 1) for how long something had been in flight before each gradient, and before the end."""
    copied_in_ns: Float64Array
    """(S, P + 1) for how long buckets had been copied before each gradient, and before the end."""

    def without_slowdown(self, compute_slowdown: float) -> ComputeTimes:
        """Remove the copies and the slowdown by concurrent traffic."""
        delays_ns = (
            (1 - 1 / compute_slowdown) * self.busy_ns + self.copied_in_ns[:, None] + self.copies_out_end_ns[:, :, None]
        )
        ready_ns = np.maximum.accumulate(self.ready_ns - delays_ns[:, :, :-1], axis=2)
        return ComputeTimes(
            gradients=self.gradients,
            ranks=self.ranks,
            start_ns=self.start_ns - self.copies_out_end_ns,
            ready_ns=ready_ns,
            end_ns=np.maximum(self.end_ns - delays_ns[:, :, -1], ready_ns[:, :, -1]),
        )


def extract_backward(observations: Observations, copy_in: CostLine) -> RecordedBackward:
    """Extract the recorded backward of all cycles.

    Args:
        copy_in: Cost of copying a bucket.
    """
    ready_ns, end_ns = _fill_gaps(observations)
    return RecordedBackward(
        gradients=observations.gradients,
        ranks=observations.ranks,
        copies_out_end_ns=observations.copies_out_ns,
        start_ns=observations.backward_start_ns,
        ready_ns=ready_ns,
        end_ns=end_ns,
        busy_ns=_busy_until(observations, np.concatenate([ready_ns, end_ns[:, :, None]], axis=2)),
        copied_in_ns=_copy_time_before(observations, copy_in),
    )


def _fill_gaps(observations: Observations) -> tuple[Float64Array, Float64Array]:
    """Compute when gradients were ready and backward ended, from the start of the cycle, without gaps.

    Unknown times are interpolated between neighboring gradients, by bytes. Example: with gradients of 4, 2 and 2 bytes,
    of which the first is ready at 10 ns and the last at 30, the middle one is assumed to be ready at 20.

    Returns:
        (S, R, P) ready times by position in the order of gradients, never decreasing, and (S, R) ends.
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
    """Compute (S, R, N) for how long an all-reduce was in flight before each moment (S, R, N), on each rank's clock.

    Example: with all-reduces from 0 to 5, from 3 to 8 and from 10 to 12, 9 ns had been in flight before moment 11.
    """
    collectives = observations.collectives
    bounds = np.searchsorted(collectives.cycle, np.arange(len(moments_ns) + 1))
    busy_ns = np.zeros_like(moments_ns)
    for cycle, (first, end) in enumerate(pairwise(bounds)):
        ends_ns = collectives.end_ns[first:end]
        starts_ns = ends_ns - collectives.transfer_ns[first:end, None]
        for rank in range(moments_ns.shape[1]):
            starts, until = np.sort(starts_ns[:, rank]), np.sort(ends_ns[:, rank])
            moments = moments_ns[cycle, rank]
            # Begun minus ended all-reduces are in flight; the time with any of them in flight is summed between the
            # changes.
            edges = np.concatenate([starts, until])
            change = np.concatenate([np.ones(len(starts)), -np.ones(len(until))])
            by_time = np.lexsort((-change, edges))
            edges, in_flight = edges[by_time], np.cumsum(change[by_time])
            lengths = np.diff(edges, append=edges[-1:]) * (in_flight > 0)
            if len(edges):
                busy_ns[cycle, rank] = np.interp(moments, edges, np.concatenate([[0.0], np.cumsum(lengths)[:-1]]))
    return busy_ns


def _copy_time_before(observations: Observations, copy_in: CostLine) -> Float64Array:
    """Compute (S, P + 1) for how long buckets were copied before each gradient, and in total, with the active plans."""
    table = build_table(observations.plans, observations.gradients)
    time_ns = np.where(table.is_bucket, copy_in.time_ns(table.bytes), 0.0)
    after = np.zeros((len(table), len(observations.gradients.order) + 1))
    np.add.at(after, (np.arange(len(table))[:, None], table.last + 1), time_ns)
    copied: Float64Array = np.cumsum(after, axis=1)[observations.plan]
    return copied
