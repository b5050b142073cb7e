"""Input of the model: recorded cycles of one job, however they were observed.

A *cycle* runs from the end of one step's last all-reduce to the end of the next one's, and is identified by the step
whose gradients it reduces. It contains, in this order: the part of the previous step's copies out that follows its last
all-reduce; the optimizer, data and forward; backward; and the exposed communication.

S cycles, R ranks, P parameters, C all-reduces. Times are float64 nanoseconds, relative to the start of the cycle unless
stated otherwise. With comparable clocks the start is one moment for all ranks; otherwise it is the moment at which each
rank saw the last all-reduce end, which is nearly the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from overlapscope.bucket_model.partition import BoolArray, Buckets, Float64Array, Gradients, Int64Array
from overlapscope.trace.event_log import Records
from overlapscope.trace.schema import NO_INDEX, Flag, Kind, Phase

# Conversion of a rank's records to per-cycle bucket times of one model; ``observation`` defines a cycle.
#
# Used by a training process for its own latest steps, and for recordings.

_TIMES_PER_CYCLE: Final = 4
_TIMES_PER_BUCKET: Final = 4


@dataclass(frozen=True, eq=False, kw_only=True)
class BucketCycles:
    """Bucket times of S cycles on R ranks, in nanoseconds; NaN where a time was not observed."""

    steps: Int64Array
    """(S,) step whose gradients each cycle reduces."""
    epoch: Int64Array
    """(S,) epoch of the active plan; -1 if the cycle was not observed completely."""
    previous_epoch: Int64Array
    """(S,) epoch of the active plan in the previous step."""
    moments_ns: Float64Array
    """(R, S, 4): length of the cycle; end of the previous step's copies out and start of backward, both relative to the
    start of the cycle; duration of backward."""
    ready_ns: Float64Array
    """(R, S, P) time at which each gradient is ready, relative to the start of backward."""
    buckets_ns: Float64Array
    """(R, S, B, 4): launch and end, relative to the start of the cycle; duration of the copy in and of the copy out."""

    @classmethod
    def without_observations(cls, steps: Sequence[int], parameters: int, buckets: int) -> BucketCycles:
        """Return cycles of one rank with no observed times.

        Args:
            steps: Steps of the S cycles.
            parameters: Number of parameters, P.
            buckets: Number of buckets, B.
        """
        count = len(steps)
        return cls(
            steps=np.array(steps, dtype=np.int64),
            epoch=np.full(count, -1),
            previous_epoch=np.full(count, -1),
            moments_ns=np.full((1, count, _TIMES_PER_CYCLE), np.nan),
            ready_ns=np.full((1, count, parameters), np.nan),
            buckets_ns=np.full((1, count, buckets, _TIMES_PER_BUCKET), np.nan),
        )

    @property
    def shape(self) -> tuple[int, int, int]:
        """Return S, P and B."""
        return len(self.steps), self.ready_ns.shape[2], self.buckets_ns.shape[2]

    @property
    def is_complete(self) -> BoolArray:
        """Return (S,) True for cycles that all ranks observed completely."""
        seen: BoolArray = ~np.isnan(self.moments_ns).any(axis=(0, 2)) & (self.epoch >= 0)
        return seen

    @property
    def length_ns(self) -> Float64Array:
        """Return (S,) the lengths of the cycles as seen by the first rank."""
        return self.moments_ns[0, :, 0]

    @property
    def backward_end_ns(self) -> Float64Array:
        """Return (R, S) the end of backward, relative to the start of the cycle."""
        end_ns: Float64Array = self.moments_ns[..., 2:].sum(axis=-1)
        return end_ns

    def of(self, which: BoolArray) -> BucketCycles:
        """Return the cycles selected by a mask.

        Args:
            which: (S,) mask.
        """
        return replace(
            self,
            steps=self.steps[which],
            epoch=self.epoch[which],
            previous_epoch=self.previous_epoch[which],
            moments_ns=self.moments_ns[:, which],
            ready_ns=self.ready_ns[:, which],
            buckets_ns=self.buckets_ns[:, which],
        )


def compute_bucket_cycles(
    records: Records,
    model: int,
    plans: Mapping[int, Buckets],
    steps: Sequence[int],
    parameters: int,
    bounds_ns: Int64Array | None = None,
) -> BucketCycles:
    """Compute the cycles of one rank (R is 1).

    A cycle is left unobserved unless both its step and the previous one reduce each bucket exactly once.

    Example: the last all-reduce of step 6 ends at 100 ns and its last copy out at 103; backward of step 7 runs from 110
    to 150 and its last all-reduce ends at 160. Then ``moments_ns`` of step 7 is (60, 3, 10, 40).

    Args:
        records: Records of these steps and of the steps before them, in any order; some may be missing. An all-reduce
            starts when the rank enters it.
        model: Index of the model in the records.
        plans: All plans that were active, by epoch.
        steps: Steps of the S cycles to compute.
        parameters: Number of parameters.
        bounds_ns: (S, 2) start and end of each cycle, if the ranks share them; otherwise a cycle ends when this rank
            saw its last all-reduce end.
    """
    cycles = BucketCycles.without_observations(steps, parameters, max(map(len, plans.values()), default=0))
    records = records[np.argsort(records["step"], kind="stable")]
    numbers = np.unique(np.concatenate([cycles.steps - 1, cycles.steps]))
    firsts, ends = (np.searchsorted(records["step"], numbers, side).tolist() for side in ("left", "right"))
    seen = {
        number: _StepRecords.of(records[first:end], model, plans, parameters)
        for number, first, end in zip(numbers.tolist(), firsts, ends, strict=True)
    }
    for row, number in enumerate(steps):
        before, step = seen[number - 1], seen[number]
        if step is None or before is None:
            continue
        begin_ns, end_ns = (
            bounds_ns[row].tolist()
            if bounds_ns is not None
            else (before.last_all_reduce_end_ns, step.last_all_reduce_end_ns)
        )
        cycles.epoch[row], cycles.previous_epoch[row] = step.epoch, before.epoch
        cycles.moments_ns[0, row] = (
            end_ns - begin_ns,
            max(0, before.copies_out_end_ns - begin_ns),
            step.backward_start_ns - begin_ns,
            step.backward_end_ns - step.backward_start_ns,
        )
        cycles.ready_ns[0, row] = step.ready_ns(parameters, plans[step.epoch])
        cycles.buckets_ns[0, row, : len(plans[step.epoch])] = step.buckets_ns(begin_ns)
    return cycles


def concatenate_ranks(ranks: Sequence[BucketCycles]) -> BucketCycles:
    """Concatenate the cycles of several ranks, which must have the same steps and plans."""
    return replace(
        ranks[0],
        moments_ns=np.concatenate([own.moments_ns for own in ranks]),
        ready_ns=np.concatenate([own.ready_ns for own in ranks]),
        buckets_ns=np.concatenate([own.buckets_ns for own in ranks]),
    )


@dataclass(frozen=True, eq=False, kw_only=True)
class _StepRecords:
    """Records of one step that reduces every bucket once, with times as in the records."""

    epoch: int
    gradients: Records
    buckets_ready: Records
    copies_in: Records
    collectives: Records
    """Collective records, sorted by bucket."""
    copies_out: Records
    backward_start_ns: int
    backward_end_ns: int

    @classmethod
    def of(cls, records: Records, model: int, plans: Mapping[int, Buckets], parameters: int) -> _StepRecords | None:
        records = records[np.argsort(records["start_ns"], kind="stable")]
        own = records[records["model"] == model]
        collectives = own[(own["kind"] == Kind.COLLECTIVE) & (own["index"] != NO_INDEX)]
        collectives = collectives[np.argsort(collectives["index"], kind="stable")]
        ready = own[own["kind"] == Kind.BUCKET_READY]
        # A second pass of the step may have begun with another plan and not be finished: then its buckets were ready.
        epochs = np.unique(np.concatenate([collectives["plan_epoch"], ready["plan_epoch"]]))
        if len(epochs) != 1 or (epoch := int(epochs[0])) not in plans:
            return None
        every_bucket = np.arange(len(plans[epoch]))
        is_once = np.array_equal(collectives["index"], every_bucket)
        if not is_once or not np.array_equal(np.sort(ready["index"]), every_bucket):
            return None
        # Phases belong to no model: of several passes, the one that we need contains the buckets' ready times.
        backward = records[(records["kind"] == Kind.PHASE) & (records["index"] == Phase.BACKWARD)]
        moment_ns = ready["start_ns"].min()
        contains_ready = (backward["start_ns"] <= moment_ns) & (moment_ns <= backward["end_ns"])
        backward = backward[contains_ready & ((backward["flags"] & Flag.NO_SYNC) == 0)]
        if not len(backward):
            return None
        own = own[own["plan_epoch"] == epoch]
        of_bucket = own[own["index"] < len(every_bucket)]
        gradients = own[own["kind"] == Kind.GRADIENT_READY]
        return cls(
            epoch=epoch,
            gradients=gradients[gradients["index"] < parameters],
            buckets_ready=ready,
            copies_in=of_bucket[of_bucket["kind"] == Kind.COPY_IN],
            collectives=collectives,
            copies_out=of_bucket[of_bucket["kind"] == Kind.COPY_OUT],
            backward_start_ns=int(backward["start_ns"][-1]),
            backward_end_ns=int(backward["end_ns"][-1]),
        )

    @property
    def last_all_reduce_end_ns(self) -> int:
        """Return the end of the last all-reduce."""
        return int(self.collectives["end_ns"].max())

    @property
    def copies_out_end_ns(self) -> int:
        """Return the end of the last copy out; 0 without copies."""
        return int(self.copies_out["end_ns"].max(initial=0))

    def ready_ns(self, parameters: int, plan: Buckets) -> Float64Array:
        """Return (P,) ready times relative to the start of backward; per bucket where gradients were not recorded."""
        ready_ns = np.full(parameters, np.nan)
        last = np.array([bucket[-1] for bucket in plan])
        for records, index in (
            (self.buckets_ready, last[self.buckets_ready["index"]]),
            (self.gradients, self.gradients["index"]),  # of several passes, the last one is used
        ):
            ready_ns[index] = records["start_ns"] - self.backward_start_ns
        return np.where(ready_ns < 0, np.nan, ready_ns)

    def buckets_ns(self, begin_ns: int) -> Float64Array:
        """Return (B, 4) times as in ``BucketCycles.buckets_ns``."""
        copied_in_ns, copies_out_end_ns = np.full((2, len(self.collectives)), np.nan)
        for length_ns, copies in ((copied_in_ns, self.copies_in), (copies_out_end_ns, self.copies_out)):
            length_ns[copies["index"]] = copies["end_ns"] - copies["start_ns"]
        entered_ns = self.collectives["start_ns"].copy()
        np.maximum.at(entered_ns, self.copies_in["index"], self.copies_in["end_ns"])  # the host may be ahead of them
        launch_ns, end_ns = entered_ns - begin_ns, self.collectives["end_ns"] - begin_ns
        return np.stack([launch_ns, end_ns, copied_in_ns, copies_out_end_ns], axis=1)


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

    def select(self, rows: BoolArray | Int64Array) -> Spans:
        """Return the measurements selected by a mask or by indices, which may repeat."""
        return Spans(bytes=self.bytes[rows], time_ns=self.time_ns[rows], cycle=self.cycle[rows])


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
        return replace(
            self,
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
        last_arrival_ns: (S, B) arrival of the last of all ranks at each all-reduce, relative to the start of the cycle;
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
    selected = spans.select(which[spans.cycle])
    return replace(selected, cycle=index[selected.cycle])
