"""Input of the model: recorded cycles of one job, however they were observed.

A *cycle* runs from the end of one step's last all-reduce to the end of the next one's, and is identified by the step
whose gradients it reduces. It contains, in this order: the part of the previous step's copies out that follows its last
all-reduce; the optimizer, data and forward; backward; and the exposed communication.

S cycles, R ranks, P parameters, C all-reduces. Times are float64 nanoseconds, relative to the start of the cycle unless
stated otherwise. With comparable clocks the start is one moment for all ranks; otherwise it is the moment at which each
rank saw the last all-reduce end, which is nearly the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from overlapscope.model.bucket_cycles import BucketCycles
from overlapscope.model.partition import BoolArray, Buckets, Float64Array, Gradients, Int64Array


@dataclass(frozen=True, eq=False, kw_only=True)
class BucketAllReduces:
    """The C all-reduces of buckets in all cycles, sorted by cycle, and by launch within a cycle."""

    cycle: Int64Array
    """(C,) index of the cycle, from 0 to S - 1."""
    bucket: Int64Array
    """(C,) index of the bucket in the plan of its cycle."""
    bytes: Int64Array
    """(C,) bytes reduced."""
    launch_ns: Float64Array
    """(C, R) arrival of each rank: it had launched the all-reduce, and all gradients were ready on the device."""
    end_ns: Float64Array
    """(C, R) end on each rank."""
    transfer_ns: Float64Array
    """(C,) time from the arrival of the last rank to the end, including time queued behind the previous all-reduce.
    Where clocks can't be compared it is the shortest time from arrival to end of any rank, which needs no common
    clock."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Spans:
    """N measurements of how long something took for how many bytes."""

    bytes: Float64Array
    """(N,) bytes of each measurement."""
    time_ns: Float64Array
    """(N,) duration of each measurement."""
    cycle: Int64Array
    """(N,) group of each measurement: those of one group were measured together, and are resampled together to estimate
    the uncertainty of a fit."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Observations:
    """Observed cycles of one job. Of very many ranks, those that others wait for are sufficient."""

    gradients: Gradients
    world_size: int
    """Size of the reducing group, even if not all its ranks are among the R."""
    ranks: Int64Array
    """(R,) rank numbers."""
    has_common_clock: bool
    plans: tuple[Buckets, ...]
    """Distinct plans that were active at some time, also before these steps."""
    steps: Int64Array
    """(S,) steps of the cycles."""
    plan: Int64Array
    """(S,) index of the active plan."""
    previous_plan: Int64Array
    """(S,) index of the plan of the previous step, whose copies out begin the cycle; -1 if unknown."""
    cycle_ns: Float64Array
    """(S, R) length of the cycle."""
    copies_out_ns: Float64Array
    """(S, R) end of the previous step's last copy out; 0 without copies."""
    backward_start_ns: Float64Array
    """(S, R) start of backward."""
    ready_ns: Float64Array
    """(S, R, P) time at which each gradient is ready, relative to the start of backward; NaN where unknown."""
    backward_end_ns: Float64Array
    """(S, R) end of backward, relative to its start; collectives may still be running."""
    collectives: BucketAllReduces
    copies_in: Spans
    """Copies into buckets, after their last gradient is ready and before they are launched."""
    copies_out: Spans
    """Copies out of buckets, after their all-reduces."""

    @property
    def used_plan_count(self) -> int:
        """Return the number of distinct plans used in these steps."""
        return len(np.unique(self.plan))

    def select_cycles(self, which: BoolArray) -> Observations:
        """Return the observations of the cycles selected by a mask.

        Args:
            which: (S,) mask.
        """
        index = np.cumsum(which) - 1
        selected = which[self.collectives.cycle]
        collectives = self.collectives
        return Observations(
            gradients=self.gradients,
            world_size=self.world_size,
            ranks=self.ranks,
            has_common_clock=self.has_common_clock,
            plans=self.plans,
            steps=self.steps[which],
            plan=self.plan[which],
            previous_plan=self.previous_plan[which],
            cycle_ns=self.cycle_ns[which],
            copies_out_ns=self.copies_out_ns[which],
            backward_start_ns=self.backward_start_ns[which],
            ready_ns=self.ready_ns[which],
            backward_end_ns=self.backward_end_ns[which],
            collectives=BucketAllReduces(
                cycle=index[collectives.cycle[selected]],
                bucket=collectives.bucket[selected],
                bytes=collectives.bytes[selected],
                launch_ns=collectives.launch_ns[selected],
                end_ns=collectives.end_ns[selected],
                transfer_ns=collectives.transfer_ns[selected],
            ),
            copies_in=_select_spans(self.copies_in, which, index),
            copies_out=_select_spans(self.copies_out, which, index),
        )


def observations_from_cycles(
    cycles: BucketCycles,
    ranks: Int64Array,
    plans: Mapping[int, Buckets],
    gradients: Gradients,
    world_size: int,
    last_arrival_ns: Float64Array | None = None,
) -> Observations:
    """Convert bucket cycles to observations.

    Args:
        cycles: Cycles, all of them complete.
        ranks: (R,) rank numbers.
        plans: All plans by epoch.
        gradients: Gradients of the model.
        world_size: Size of the reducing group.
        last_entry_ns: (S, B) arrival of the last of all ranks at each all-reduce, relative to the start of the cycle;
            not given where clocks can't be compared.
    """
    distinct = tuple(dict.fromkeys(plans.values()))
    index_of_plan = {epoch: distinct.index(plan) for epoch, plan in plans.items()}
    sizes_of_plan = [[int(gradients.bytes[list(bucket)].sum()) for bucket in plan] for plan in distinct]
    plan = np.array([index_of_plan[epoch] for epoch in cycles.epoch.tolist()], dtype=np.int64)
    previous_plan = np.array([index_of_plan[epoch] for epoch in cycles.previous_epoch.tolist()], dtype=np.int64)
    cycle, bucket = np.nonzero(~np.isnan(cycles.buckets_ns[0, :, :, 0]))
    sizes = np.array(
        [sizes_of_plan[index][number] for index, number in zip(plan[cycle].tolist(), bucket.tolist(), strict=True)],
        dtype=np.int64,
    )
    launch_ns, end_ns, copy_in_ns, copy_out_ns = cycles.buckets_ns[:, cycle, bucket].T  # (C, R) each
    if last_arrival_ns is None:
        transfer_ns = (end_ns - launch_ns).min(axis=1)
    else:
        transfer_ns = np.median(end_ns, axis=1) - np.maximum(last_arrival_ns[cycle, bucket], launch_ns.max(axis=1))
    length_ns, copies_out_end_ns, backward_start_ns, backward_ns = cycles.moments_ns.T
    return Observations(
        gradients=gradients,
        world_size=world_size,
        ranks=ranks,
        has_common_clock=last_arrival_ns is not None,
        plans=distinct,
        steps=cycles.steps,
        plan=plan,
        previous_plan=previous_plan,
        cycle_ns=length_ns,
        copies_out_ns=copies_out_end_ns,
        backward_start_ns=backward_start_ns,
        ready_ns=cycles.ready_ns.swapaxes(0, 1),
        backward_end_ns=backward_ns,
        collectives=BucketAllReduces(
            cycle=cycle, bucket=bucket, bytes=sizes, launch_ns=launch_ns, end_ns=end_ns, transfer_ns=transfer_ns
        ),
        copies_in=_known_spans(copy_in_ns, sizes, cycle),
        copies_out=_known_spans(copy_out_ns, sizes, cycle),
    )


def _known_spans(time_ns: Float64Array, sizes: Int64Array, cycle: Int64Array) -> Spans:
    """Return the spans of (C, R) times that are not NaN."""
    which, rank = np.nonzero(~np.isnan(time_ns))
    return Spans(bytes=sizes[which].astype(np.float64), time_ns=time_ns[which, rank], cycle=cycle[which])


def _select_spans(spans: Spans, which: BoolArray, index: Int64Array) -> Spans:
    selected = which[spans.cycle]
    return Spans(bytes=spans.bytes[selected], time_ns=spans.time_ns[selected], cycle=index[spans.cycle[selected]])
