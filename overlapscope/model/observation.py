"""What the model learns from: some recorded cycles of one job, in whichever way they were seen.

A *cycle* runs from the end of one step's last all-reduce to the end of the next one's, and is known by the step whose
gradients it reduces. It holds, in this order: the copies back into the gradients of the step before, as far as they
come after its last all-reduce; the optimizer, data and forward; backward; and what is exposed of the communication.

S cycles, R ranks, P parameters, C all-reduces. Times are float64 nanoseconds, relative to the cycle's start unless
stated otherwise. With clocks that can be compared the start is one moment for all ranks; else it is the moment
at which the rank itself saw the last all-reduce end, which is nearly the same one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from overlapscope.model.bucket_cycles import BucketCycles
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
    """(N,) which of them were measured together, and are resampled together to tell how sure a fit is."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Observations:
    """What was observed of one job. Of very many ranks, those that others wait for are enough."""

    gradients: Gradients
    world_size: int
    """Size of the reducing group, even if not all its ranks are among the R."""
    ranks: Int64Array
    """(R,)"""
    has_common_clock: bool
    plans: tuple[Buckets, ...]
    """The distinct plans that were in force at some time, also before these steps."""
    steps: Int64Array
    """(S,)"""
    plan: Int64Array
    """(S,) which of the plans was used."""
    plan_before: Int64Array
    """(S,) the plan of the previous step, whose copies back begin the cycle; -1 if unknown."""
    cycle_ns: Float64Array
    """(S, R) from the start to the end."""
    copies_out_ns: Float64Array
    """(S, R) when the last copy back of the step before is over; 0 without copies."""
    backward_start_ns: Float64Array
    """(S, R)"""
    ready_ns: Float64Array
    """(S, R, P) when each gradient is ready, from backward's start; NaN where unknown."""
    backward_end_ns: Float64Array
    """(S, R) from backward's start; its collectives may not be over then."""
    collectives: Collectives
    copies_in: Spans
    """Copies into buckets, after their last gradient is ready and before they are launched."""
    copies_out: Spans
    """Copies of buckets back, after their all-reduces."""

    @property
    def used_plans(self) -> int:
        """How many plans were used in these steps."""
        return len(np.unique(self.plan))

    def of_cycles(self, which: BoolArray) -> Observations:
        """The observations of some cycles.

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


def observations_of_cycles(
    cycles: BucketCycles,
    ranks: Int64Array,
    plans: Mapping[int, Buckets],
    gradients: Gradients,
    world_size: int,
    last_entry_ns: Float64Array | None = None,
) -> Observations:
    """Cycles as the model wants them.

    Args:
        cycles: all of them whole.
        ranks: (R,)
        plans: by epoch.
        gradients: of the model.
        world_size: of the group that reduces.
        last_entry_ns: (S, B) when the last of all ranks entered each all-reduce, from the cycle's start; not given
            where clocks can't be compared.
    """
    distinct = tuple(dict.fromkeys(plans.values()))
    place_of_plan = {epoch: distinct.index(plan) for epoch, plan in plans.items()}
    sizes_of_plan = [[int(gradients.bytes[list(bucket)].sum()) for bucket in plan] for plan in distinct]
    plan = np.array([place_of_plan[epoch] for epoch in cycles.epoch.tolist()], dtype=np.int64)
    plan_before = np.array([place_of_plan[epoch] for epoch in cycles.epoch_before.tolist()], dtype=np.int64)
    cycle, bucket = np.nonzero(~np.isnan(cycles.buckets_ns[0, :, :, 0]))
    sizes = np.array(
        [sizes_of_plan[place][number] for place, number in zip(plan[cycle].tolist(), bucket.tolist(), strict=True)],
        dtype=np.int64,
    )
    launch_ns, end_ns, copy_in_ns, copy_out_ns = cycles.buckets_ns[:, cycle, bucket].T  # (C, R) each
    if last_entry_ns is None:
        transfer_ns = (end_ns - launch_ns).min(axis=1)
    else:
        transfer_ns = np.median(end_ns, axis=1) - np.maximum(last_entry_ns[cycle, bucket], launch_ns.max(axis=1))
    length_ns, copied_out_ns, backward_start_ns, backward_ns = cycles.moments_ns.T
    return Observations(
        gradients=gradients,
        world_size=world_size,
        ranks=ranks,
        has_common_clock=last_entry_ns is not None,
        plans=distinct,
        steps=cycles.steps,
        plan=plan,
        plan_before=plan_before,
        cycle_ns=length_ns,
        copies_out_ns=copied_out_ns,
        backward_start_ns=backward_start_ns,
        ready_ns=cycles.ready_ns.swapaxes(0, 1),
        backward_end_ns=backward_ns,
        collectives=Collectives(
            cycle=cycle, bucket=bucket, bytes=sizes, launch_ns=launch_ns, end_ns=end_ns, transfer_ns=transfer_ns
        ),
        copies_in=_known_spans(copy_in_ns, sizes, cycle),
        copies_out=_known_spans(copy_out_ns, sizes, cycle),
    )


def _known_spans(time_ns: Float64Array, sizes: Int64Array, cycle: Int64Array) -> Spans:
    """Of (C, R) times those that are known."""
    which, rank = np.nonzero(~np.isnan(time_ns))
    return Spans(bytes=sizes[which].astype(np.float64), time_ns=time_ns[which, rank], cycle=cycle[which])


def _spans_of(spans: Spans, which: BoolArray, place: Int64Array) -> Spans:
    kept = which[spans.cycle]
    return Spans(bytes=spans.bytes[kept], time_ns=spans.time_ns[kept], cycle=place[spans.cycle[kept]])
