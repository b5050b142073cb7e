"""Records of some steps -> cycles of this rank -> cycles of all ranks, as the model wants to have them.

It is what ``overlapscope.analysis.observations`` makes of a recording, from the same records, while the job runs: in
memory, and between ranks that send each other nothing but these numbers. Clocks are not compared.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import AllgatherOptions  # type: ignore[attr-defined]

from instrumented_ddp.completion import NO_TIMEOUT
from overlapscope.model.observation import Collectives, Observations, Spans
from overlapscope.model.partition import BoolArray, Buckets, Float64Array, Gradients, Int64Array
from overlapscope.trace.format import NO_BUCKET, Flag, Kind, Phase
from overlapscope.trace.log import Records

MOST_RANKS: Final = 8
"""Of more ranks those are looked at that take longest."""

_LENGTH, _COPIED_OUT, _BACKWARD_START, _BACKWARD_END, _MOMENTS = range(5)
_LAUNCH, _END, _COPY_IN, _COPY_OUT, _OF_BUCKET = range(5)


@dataclass(frozen=True, eq=False, kw_only=True)
class Cycles:
    """S cycles of R ranks. What was not seen is NaN."""

    epoch: Int64Array
    """(S,) number of the plan in force; -1 if the cycle was not seen whole."""
    epoch_before: Int64Array
    """(S,) of the step before."""
    moments_ns: Float64Array
    """(R, S, 4): length of the cycle; end of the copies back of the step before, and begin of backward, both from the
    cycle's start; end of backward, from its begin."""
    ready_ns: Float64Array
    """(R, S, P) from the begin of backward."""
    buckets_ns: Float64Array
    """(R, S, B, 4): launch and end, from the cycle's start; length of the copy in and of the copy out."""

    @property
    def is_whole(self) -> BoolArray:
        """(S,) seen by all ranks."""
        seen: BoolArray = ~np.isnan(self.moments_ns).any(axis=(0, 2)) & (self.epoch >= 0)
        return seen

    @property
    def length_ns(self) -> Float64Array:
        """(S,) as the first of the ranks has it."""
        return self.moments_ns[0, :, _LENGTH]

    def of(self, which: BoolArray) -> Cycles:
        """Some of the cycles."""
        return Cycles(
            epoch=self.epoch[which],
            epoch_before=self.epoch_before[which],
            moments_ns=self.moments_ns[:, which],
            ready_ns=self.ready_ns[:, which],
            buckets_ns=self.buckets_ns[:, which],
        )


def cycles_of(records: Records, model: int, plans: Sequence[Buckets], steps: Sequence[int], parameters: int) -> Cycles:
    """This rank's cycles: R is 1.

    Args:
        records: of these steps.
        model: number of the model.
        plans: by epoch.
        steps: one after the other; the cycles of all but the first are wanted.
        parameters: how many there are.
    """
    count, most_buckets = len(steps) - 1, max(map(len, plans))
    cycles = Cycles(
        epoch=np.full(count, -1),
        epoch_before=np.full(count, -1),
        moments_ns=np.full((1, count, _MOMENTS), np.nan),
        ready_ns=np.full((1, count, parameters), np.nan),
        buckets_ns=np.full((1, count, most_buckets, _OF_BUCKET), np.nan),
    )
    before: _Step | None = None
    for place, number in enumerate(steps, start=-1):
        step = _Step.of(records[records["step"] == number], model, plans)
        if step is not None and before is not None and place >= 0:
            cycles.epoch[place], cycles.epoch_before[place] = step.epoch, before.epoch
            cycles.moments_ns[0, place] = (
                step.released_ns - before.released_ns,
                max(0, before.copied_out_ns - before.released_ns),
                step.backward_start_ns - before.released_ns,
                step.backward_end_ns - step.backward_start_ns,
            )
            cycles.ready_ns[0, place] = step.ready_ns(parameters, plans[step.epoch])
            cycles.buckets_ns[0, place, : len(plans[step.epoch])] = step.buckets_ns(before.released_ns)
        before = step
    return cycles


@dataclass(frozen=True, eq=False, kw_only=True)
class _Step:
    """Records of one step that reduces every bucket once. Times are host nanoseconds."""

    epoch: int
    gradients: Records
    buckets_ready: Records
    copies_in: Records
    collectives: Records
    """By bucket."""
    copies_out: Records
    backward_start_ns: int
    backward_end_ns: int

    @classmethod
    def of(cls, records: Records, model: int, plans: Sequence[Buckets]) -> _Step | None:
        own = records[records["model"] == model]
        collectives = own[(own["kind"] == Kind.COLLECTIVE) & (own["index"] != NO_BUCKET)]
        collectives = collectives[np.argsort(collectives["index"], kind="stable")]
        if not len(collectives):
            return None
        epoch = int(collectives["plan_epoch"][0])
        is_once = np.array_equal(collectives["index"], np.arange(len(plans[epoch])))
        ready = own[own["kind"] == Kind.BUCKET_READY]
        # Phases belong to no model: of several passes this one's has its buckets in it.
        backward = records[(records["kind"] == Kind.PHASE) & (records["index"] == Phase.BACKWARD)]
        backward = backward[(backward["flags"] & Flag.NO_SYNC) == 0]
        if len(ready):
            moment_ns = ready["start_ns"].min()
            backward = backward[(backward["start_ns"] <= moment_ns) & (moment_ns <= backward["end_ns"])]
        if not is_once or (collectives["plan_epoch"] != epoch).any() or not len(backward) or not len(ready):
            return None
        return cls(
            epoch=epoch,
            gradients=own[own["kind"] == Kind.GRADIENT_READY],
            buckets_ready=ready,
            copies_in=own[own["kind"] == Kind.COPY_IN],
            collectives=collectives,
            copies_out=own[own["kind"] == Kind.COPY_OUT],
            backward_start_ns=int(backward["start_ns"][-1]),
            backward_end_ns=int(backward["end_ns"][-1]),
        )

    @property
    def released_ns(self) -> int:
        """When its last all-reduce ended."""
        return int(self.collectives["end_ns"].max())

    @property
    def copied_out_ns(self) -> int:
        """When its last copy back ended; 0 without one."""
        return int(self.copies_out["end_ns"].max(initial=0))

    def ready_ns(self, parameters: int, plan: Buckets) -> Float64Array:
        """(P,) from the begin of backward; of buckets alone where single gradients were not recorded."""
        ready_ns = np.full(parameters, np.nan)
        last = np.array([bucket[-1] for bucket in plan])
        for records, index in (
            (self.buckets_ready, last[self.buckets_ready["index"]]),
            (self.gradients, self.gradients["index"]),
        ):
            ready_ns[index] = records["start_ns"] - self.backward_start_ns
        return np.where(ready_ns < 0, np.nan, ready_ns)

    def buckets_ns(self, start_ns: int) -> Float64Array:
        """(B, 4) as in ``Cycles``."""
        times_ns = np.full((len(self.collectives), _OF_BUCKET), np.nan)
        for column, copies in ((_COPY_IN, self.copies_in), (_COPY_OUT, self.copies_out)):
            times_ns[copies["index"], column] = copies["end_ns"] - copies["start_ns"]
        arrived_ns = self.collectives["start_ns"].copy()
        np.maximum.at(arrived_ns, self.copies_in["index"], self.copies_in["end_ns"])  # the host may be ahead of them
        times_ns[:, _LAUNCH] = arrived_ns - start_ns
        times_ns[:, _END] = self.collectives["end_ns"] - start_ns
        return times_ns


def of_all_ranks(own: Cycles, group: dist.ProcessGroup, device: torch.device) -> tuple[Cycles, Int64Array]:
    """The same cycles of all ranks, or of those that take longest. Called on all ranks.

    Args:
        device: on which the group communicates.

    Returns:
        Cycles of R ranks, on every rank, with its own epochs; and (R,) who they are.
    """
    moments_ns = own.moments_ns[0]
    lateness = torch.tensor([np.nan_to_num(np.median(moments_ns[:, _BACKWARD_START:].sum(axis=1)))], device=device)
    everyones = [torch.empty_like(lateness) for _ in range(group.size())]
    group.allgather([everyones], [lateness], AllgatherOptions()).wait(NO_TIMEOUT)
    latest_first = torch.cat(everyones).argsort(descending=True, stable=True)
    ranks = np.sort(latest_first[:MOST_RANKS].cpu().numpy())
    parts = (own.moments_ns, own.ready_ns, own.buckets_ns)
    flat = np.concatenate([part.ravel() for part in parts])
    sum_of_one = torch.zeros((len(ranks), len(flat)), dtype=torch.float64, device=device)
    if group.rank() in ranks:
        sum_of_one[int(np.searchsorted(ranks, group.rank()))] = torch.from_numpy(flat)
    group.allreduce([sum_of_one], dist.AllreduceOptions()).wait(NO_TIMEOUT)
    columns = np.split(sum_of_one.cpu().numpy(), np.cumsum([part.size for part in parts])[:-1], axis=1)
    moments, ready, buckets = (
        column.reshape(len(ranks), *part.shape[1:]) for column, part in zip(columns, parts, strict=True)
    )
    cycles = Cycles(
        epoch=own.epoch, epoch_before=own.epoch_before, moments_ns=moments, ready_ns=ready, buckets_ns=buckets
    )
    return cycles, ranks


def observations_of(
    cycles: Cycles, ranks: Int64Array, plans: Sequence[Buckets], gradients: Gradients, world_size: int
) -> Observations:
    """Cycles as the model wants them.

    Args:
        cycles: all of them whole.
        ranks: (R,)
        plans: by epoch.
    """
    distinct = tuple(dict.fromkeys(plans))
    plan_of_epoch = np.array([distinct.index(plan) for plan in plans])
    plan = plan_of_epoch[cycles.epoch]
    cycle, bucket = np.nonzero(~np.isnan(cycles.buckets_ns[0, :, :, _END]))
    sizes = np.array(
        [
            gradients.bytes[list(plans[epoch][number])].sum()
            for epoch, number in zip(cycles.epoch[cycle].tolist(), bucket.tolist(), strict=True)
        ]
    )
    reduced_ns = cycles.buckets_ns[:, cycle, bucket]  # (R, C, 4)
    launch_ns, end_ns = reduced_ns[..., _LAUNCH].T, reduced_ns[..., _END].T
    length_ns, copied_out_ns, start_ns, backward_ns = np.moveaxis(cycles.moments_ns, (0, 1, 2), (2, 1, 0))
    return Observations(
        gradients=gradients,
        world_size=world_size,
        ranks=ranks,
        has_common_clock=False,
        plans=distinct,
        steps=np.arange(len(cycles.epoch)),
        plan=plan,
        plan_before=plan_of_epoch[cycles.epoch_before],
        cycle_ns=length_ns,
        copies_out_ns=copied_out_ns,
        backward_start_ns=start_ns,
        ready_ns=cycles.ready_ns.swapaxes(0, 1),
        backward_end_ns=backward_ns,
        collectives=Collectives(
            cycle=cycle,
            bucket=bucket,
            bytes=sizes,
            launch_ns=launch_ns,
            end_ns=end_ns,
            transfer_ns=(end_ns - launch_ns).min(axis=1),
        ),
        copies_in=_spans(reduced_ns[..., _COPY_IN], sizes, cycle),
        copies_out=_spans(reduced_ns[..., _COPY_OUT], sizes, cycle),
    )


def _spans(time_ns: Float64Array, sizes: Int64Array, cycle: Int64Array) -> Spans:
    """Of (R, C) times those that are known."""
    rank, which = np.nonzero(~np.isnan(time_ns))
    return Spans(bytes=sizes[which].astype(np.float64), time_ns=time_ns[rank, which], cycle=cycle[which])
