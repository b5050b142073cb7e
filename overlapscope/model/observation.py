"""What the model learns from: some recorded cycles of one job, in whichever way they were seen.

A *cycle* runs from the end of one step's last all-reduce to the end of the next one's, and is known by the step whose
gradients it reduces. It holds, in this order: the copies back into the gradients of the step before, as far as they
come after its last all-reduce; the optimizer, data and forward; backward; and what is exposed of the communication.

S cycles, R ranks, P parameters, C all-reduces. Times are float64 nanoseconds, relative to the cycle's start where
nothing else is said. With clocks that can be compared the start is one moment for all ranks; else it is the moment
at which the rank itself saw the last all-reduce end, which is nearly the same one.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from overlapscope.model.partition import BoolArray, Buckets, Float64Array, Gradients, Int64Array


@dataclass(frozen=True, eq=False, kw_only=True)
class Collectives:
    """The all-reduces of buckets in all cycles: C of them, sorted by cycle, and within it by launch."""

    cycle: Int64Array
    """(C,) place of its cycle, from 0 to S - 1."""
    bucket: Int64Array
    """(C,) in the plan of its cycle."""
    bytes: Int64Array
    """(C,)"""
    launch_ns: Float64Array
    """(C, R) when a rank entered it: it was launched, and on the device all its gradients were ready."""
    end_ns: Float64Array
    """(C, R)"""
    transfer_ns: Float64Array
    """(C,) from the arrival of the last rank to the end, as it was seen: also while it queued behind the one before.
    Where clocks can't be compared it is the shortest time from arrival to end of any rank, which needs no clock."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Spans:
    """How long something took for how many bytes: N times."""

    bytes: Float64Array
    """(N,)"""
    time_ns: Float64Array
    """(N,)"""
    cycle: Int64Array
    """(N,) which of them were measured together, and are drawn together when one asks how sure a fit is."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Observations:
    """See the module. Of very many ranks it is enough to have those that others wait for."""

    gradients: Gradients
    world_size: int
    """Of the group that reduces, also if not all its ranks are among the R."""
    ranks: Int64Array
    """(R,)"""
    has_common_clock: bool
    plans: tuple[Buckets, ...]
    """The distinct plans that were in force."""
    steps: Int64Array
    """(S,)"""
    plan: Int64Array
    """(S,) which of the plans was in force."""
    plan_before: Int64Array
    """(S,) which was in the step before, whose copies back begin the cycle; -1 if that is not known."""
    cycle_ns: Float64Array
    """(S, R) from the start to the end."""
    copies_out_ns: Float64Array
    """(S, R) when the last copy back of the step before is over; 0 without copies."""
    backward_start_ns: Float64Array
    """(S, R)"""
    ready_ns: Float64Array
    """(S, R, P) when each gradient is ready, from backward's start; NaN where that is not known."""
    backward_end_ns: Float64Array
    """(S, R) from backward's start; its collectives may not be over then."""
    collectives: Collectives
    copies_in: Spans
    """Of a bucket, once its last gradient is ready and before it is launched."""
    copies_out: Spans
    """Of a bucket, after its all-reduce."""

    def of_cycles(self, which: BoolArray) -> Observations:
        """Some of the cycles.

        Args:
            which: (S,)
        """
        place = np.cumsum(which) - 1
        kept = which[self.collectives.cycle]
        collectives = self.collectives
        return Observations(
            gradients=self.gradients,
            world_size=self.world_size,
            ranks=self.ranks,
            has_common_clock=self.has_common_clock,
            plans=self.plans,
            steps=self.steps[which],
            plan=self.plan[which],
            plan_before=self.plan_before[which],
            cycle_ns=self.cycle_ns[which],
            copies_out_ns=self.copies_out_ns[which],
            backward_start_ns=self.backward_start_ns[which],
            ready_ns=self.ready_ns[which],
            backward_end_ns=self.backward_end_ns[which],
            collectives=Collectives(
                cycle=place[collectives.cycle[kept]],
                bucket=collectives.bucket[kept],
                bytes=collectives.bytes[kept],
                launch_ns=collectives.launch_ns[kept],
                end_ns=collectives.end_ns[kept],
                transfer_ns=collectives.transfer_ns[kept],
            ),
            copies_in=_spans_of(self.copies_in, which, place),
            copies_out=_spans_of(self.copies_out, which, place),
        )


def _spans_of(spans: Spans, which: BoolArray, place: Int64Array) -> Spans:
    kept = which[spans.cycle]
    return Spans(bytes=spans.bytes[kept], time_ns=spans.time_ns[kept], cycle=place[spans.cycle[kept]])
