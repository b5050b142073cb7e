"""Conversion of a profile to the records of an event log: phases, steps, buckets and collectives.

The result is what our recorder would have written for the same training run. On a device, our recorder times phases by
events on the compute stream: such an event completes once the host has enqueued it and all work before it is done. This
is reproduced here from the launches and ends of kernels. Buckets are found by the operators of stock DDP: ``mul_out``
copies a ready gradient into its bucket, the all-reduce follows the last copy, ``copy_bucket_to_grad`` copies a gradient
back.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pandas as pd

from overlapscope.breakdown.spans import Int64Array
from overlapscope.errors import OverlapScopeError
from overlapscope.interop.communication import BusyTime, divide_time, find_collective_spans, has_device
from overlapscope.interop.kineto import Profile
from overlapscope.text import count_of, format_ns
from overlapscope.trace.event_log import RECORD_DTYPE, Records
from overlapscope.trace.schema import DTYPE_BYTES, DTYPES, NO_INDEX, OPS, Flag, Kind, Phase

_PROFILING_HINTS: Final = {
    "torch.profiler": "with ProfilerActivity.CPU (and CUDA on a GPU)",
    "Nsight Systems": "under torch.autograd.profiler.emit_nvtx()",
}
"""Options of each tool with which its traces have all that is needed."""

Span = tuple[int, int]
"""(start, end), in nanoseconds of the profile."""


@dataclass(frozen=True, kw_only=True)
class Pass:
    """A forward and the backward that follows it."""

    step: int
    """Index of the step, counted from the first one of the profile."""
    forward: Span
    is_trained: bool
    """True if gradients are computed; False in an evaluation."""
    backward: Span | None
    """Backward; None if another forward precedes it, as when one module is called after another."""
    copies_in_ns: Int64Array
    """(n,) times at which a gradient had been copied into its bucket."""
    copies_out_ns: Int64Array
    """(n, 2) start and end of each copy of a gradient out of its bucket."""


@dataclass(frozen=True, kw_only=True)
class ProfileSteps:
    """The steps that a profile covers completely."""

    first: int
    """Number of the first step, from its ``ProfilerStep#`` annotation; 0 without one."""
    begin_ns: int
    """Start of the first step."""
    ends_ns: Int64Array
    """(steps,) end of each step, which is the end of its last optimizer."""
    passes: tuple[Pass, ...]
    """Passes of all steps in order of time."""
    optimizers: tuple[Span, ...]
    """Calls of ``Optimizer.step`` in order of time."""
    fetches: tuple[Span, ...]
    """Waits for a batch of a DataLoader in order of time."""

    def index_at(self, host_ns: int) -> int | None:
        """Return the index of the step at a time; None if that step does not end in the profile.

        Example: with steps that end at 8 and 16, time 5 is in step 0, 9 in step 1, and 17 in none.
        """
        step = int(np.searchsorted(self.ends_ns, host_ns))
        return step if step < len(self.ends_ns) else None


def describe_lack_of_steps(profile: Profile) -> str | None:
    """Return what a profile lacks without which it has no steps; None if it has some."""
    forwards, optimizers = _spans_of_kind(profile, "forward"), _spans_of_kind(profile, "optimizer")
    if not len(forwards):
        return "no forward of DistributedDataParallel"
    if not len(optimizers) or optimizers[-1, 1] < forwards[0, 0]:
        return "no step of an optimizer"
    return None


def find_steps(profile: Profile) -> ProfileSteps:
    """Find the steps of a profile that has some, see ``describe_lack_of_steps``."""
    forwards, optimizers = _spans_of_kind(profile, "forward"), _spans_of_kind(profile, "optimizer")
    # A step ends with the last optimizer before the next forward. Example: with forwards from 0 and 10 and optimizers
    # that end at 6, 8 and 16, next_forward is 1, 1, 2, so that the steps end at 8 and 16.
    next_forward = np.searchsorted(forwards[:, 0], optimizers[:, 1])
    is_last = np.append(next_forward[1:] != next_forward[:-1], True)
    ends_ns = optimizers[is_last & (next_forward > 0), 1]
    first, begin_ns = _find_first_step(profile, int(forwards[0, 0]))
    return ProfileSteps(
        first=first,
        begin_ns=begin_ns,
        ends_ns=ends_ns,
        passes=_find_passes(profile, forwards, optimizers, ends_ns),
        optimizers=tuple((start, end) for start, end in optimizers.tolist() if begin_ns <= start),
        fetches=tuple((start, end) for start, end in _spans_of_kind(profile, "fetch").tolist() if begin_ns <= start),
    )


def _find_passes(
    profile: Profile, forwards: Int64Array, optimizers: Int64Array, ends_ns: Int64Array
) -> tuple[Pass, ...]:
    autograd, copies_in, copies_out = (_spans_of_kind(profile, kind) for kind in ("autograd", "copy_in", "copy_out"))
    trained = profile.trained.to_numpy(dtype=np.int64).reshape(-1, 1)
    begins_ns = np.sort(np.concatenate([forwards[:, 0], optimizers[:, 0]]))

    def between(spans: Int64Array, begin_ns: int, end_ns: int) -> Int64Array:
        return spans[(spans[:, 0] >= begin_ns) & (spans[:, 0] < end_ns)]

    passes = []
    for begin_ns, end_ns in forwards.tolist():
        step = int(np.searchsorted(ends_ns, begin_ns))
        if step == len(ends_ns):
            break
        until_ns = int(begins_ns[np.searchsorted(begins_ns, end_ns)])
        own = between(autograd, end_ns, until_ns)
        passes.append(
            Pass(
                step=step,
                forward=(begin_ns, end_ns),
                is_trained=len(between(trained, begin_ns, end_ns)) > 0 if len(trained) else len(own) > 0,
                backward=(int(own[:, 0].min()), int(own[:, 1].max())) if len(own) else None,
                copies_in_ns=between(copies_in, end_ns, until_ns)[:, 1],
                copies_out_ns=between(copies_out, end_ns, until_ns),
            )
        )
    return tuple(passes)


def _find_first_step(profile: Profile, first_forward_ns: int) -> tuple[int, int]:
    """Return the number of the first step and its start."""
    spans = profile.spans
    steps = spans[(spans["kind"] == "step") & (spans["start_ns"] <= first_forward_ns)]
    if not len(steps):
        return 0, first_forward_ns
    number = str(steps["name"].iloc[-1]).partition("#")[2]
    return int(number) if number.isdecimal() else 0, int(steps["start_ns"].iloc[-1])


def _spans_of_kind(profile: Profile, kind: str) -> Int64Array:
    """Return (n, 2) start and end of the spans of a kind, in order of start."""
    own = profile.spans.loc[profile.spans["kind"] == kind, ["start_ns", "end_ns"]]
    return own.to_numpy(dtype=np.int64).reshape(-1, 2)


_RECORDED_OPS: Final = ("all_reduce", "broadcast")
"""Operations that an event log can hold."""


@dataclass(kw_only=True)
class Collective:
    """A collective of this rank."""

    op: str
    dtype: str
    elements: int
    """Number of elements; 0 if the trace does not have it."""
    group: str
    launch_ns: int
    """Launch time on the clock of the host."""
    start_ns: int | None = None
    """Start time; None if the trace does not show when it ran."""
    end_ns: int | None = None


def extract_collectives(profile: Profile) -> tuple[list[Collective], Counter[str]]:
    """Return the collectives that an event log can hold, in launch order, and the number of others by name."""
    found, left_out = [], Counter[str]()
    ran = _device_spans(profile)
    on_host = {op: iter(_host_spans(profile, op)) for op in _RECORDED_OPS}
    columns = ("id", "op", "elements", "dtype", "group", "start_ns")
    for identity, op, elements, dtype, group, launch_ns in zip(
        *(profile.collectives[column].tolist() for column in columns), strict=True
    ):
        if op not in _RECORDED_OPS:
            left_out.update([op] * (op != "barrier"))
            continue
        # Without a device, annotations of the backend span its collectives: the n-th belongs to the n-th launch.
        start_ns, end_ns = ran.get(identity, (None, None)) if len(profile.kernels) else next(on_host[op], (None, None))
        found.append(
            Collective(
                op=op,
                dtype=dtype if dtype in DTYPE_BYTES else "unknown",
                elements=int(elements),
                group=group,
                launch_ns=launch_ns,
                start_ns=start_ns,
                end_ns=end_ns,
            )
        )
    return found, left_out


def _device_spans(profile: Profile) -> dict[int, tuple[int, int]]:
    """Return (start, end) of each collective by id: from its first kernel until its last."""
    kernels = profile.kernels[profile.kernels["op"] != ""]
    edges = kernels.groupby("id").agg({"start_ns": "min", "end_ns": "max"})
    return {
        int(str(identity)): (start, end)
        for identity, (start, end) in zip(edges.index, edges.to_numpy().tolist(), strict=True)
    }


def _host_spans(profile: Profile, op: str) -> list[tuple[int, int]]:
    spans = profile.spans
    own = spans.loc[(spans["kind"] == "backend") & spans["name"].str.endswith(f":{op}"), ["start_ns", "end_ns"]]
    return [(start, end) for start, end in own.to_numpy().tolist()]


Bucket = tuple[str, int]
"""(element type, number of elements)."""


@dataclass(frozen=True, kw_only=True)
class ImportedTraining:
    """A training run as an event log would hold it."""

    records: Records
    """Records in the order in which they would have been written, with the times of the profile."""
    plans: tuple[tuple[Bucket, ...], ...]
    """Buckets of each bucket plan, in launch order."""
    communication: pd.DataFrame
    """Collectives of its steps, ``communication.find_collective_spans`` with ``is_bucket``; without steps, all."""
    busy: BusyTime
    """What the time of its steps went to, by what ran; without steps, that of the profile."""
    steps: int
    """Number of steps."""
    notes: tuple[str, ...] = ()
    """Sentences about data that the records lack."""


def convert_profile(profile: Profile) -> ImportedTraining:
    """Convert a profile to a training run.

    Raises:
        OverlapScopeError: it has neither steps nor communication; the message says what the profile lacks.
    """
    spans = find_collective_spans(profile)
    lacks = describe_lack_of_steps(profile)
    if lacks is not None:
        return _convert_without_steps(profile, spans, lacks)
    steps = find_steps(profile)
    collectives, left_out = extract_collectives(profile)
    clock = _DeviceClock(profile)
    builder = _RecordBuilder(steps, has_device=len(profile.kernels) > 0, clock=clock)
    buckets = [_find_bucket_all_reduces(one, collectives) for one in steps.passes]
    for one, own in zip(steps.passes, buckets, strict=True):
        if own:
            builder.add_reduction(one, own)
    kept, others = _split_by_group(collectives, buckets)
    builder.collectives(kept)
    builder.phases(buckets)
    reduced_ns = [each.start_ns for own in buckets for each in own]
    window_ns = clock(steps.begin_ns), clock(int(steps.ends_ns[-1]))
    spans = spans[spans["start_ns"].between(*window_ns)]
    return ImportedTraining(
        records=builder.records(),
        plans=tuple(builder.plans),
        communication=spans.assign(is_bucket=(spans["op"] == "all_reduce") & spans["start_ns"].isin(reduced_ns)),
        busy=divide_time(profile, window_ns),
        steps=len(steps.ends_ns),
        notes=(*_describe_backlog(profile), *_notes(collectives, left_out + others)),
    )


def _convert_without_steps(profile: Profile, spans: pd.DataFrame, lacks: str) -> ImportedTraining:
    if not len(spans) and not has_device(profile):
        hint = "" if len(profile.spans) else f" {_PROFILING_HINTS[profile.source.tool]}"
        raise OverlapScopeError(
            f"{profile.source.path}: {lacks} in it, and no communication; profile whole steps of a training{hint}"
        )
    window_ns, count = _find_profiler_steps(profile)
    inside = spans["start_ns"].between(*window_ns) if window_ns is not None else slice(None)
    return ImportedTraining(
        records=np.zeros(0, dtype=RECORD_DTYPE),
        plans=(),
        communication=spans[inside].assign(is_bucket=False),
        busy=divide_time(profile, window_ns),
        steps=count,
        notes=(*_describe_backlog(profile), f"{lacks} in it: its steps have no phases, only what ran is known"),
    )


def _split_by_group(
    collectives: Sequence[Collective], buckets: Sequence[Sequence[Collective]]
) -> tuple[list[Collective], Counter[str]]:
    """Return the collectives of the groups that reduce gradients, and the number of others by operation.

    Ranks are compared by what all of them launch, which is known of these groups only.
    """
    groups = {each.group for own in buckets for each in own} or {each.group for each in collectives}
    others = Counter(each.op for each in collectives if each.group not in groups)
    return [each for each in collectives if each.group in groups], others


def _find_profiler_steps(profile: Profile) -> tuple[Span | None, int]:
    """Return when the first ``ProfilerStep#`` begins and the last ends on the device, and their number."""
    steps, clock = _spans_of_kind(profile, "step"), _DeviceClock(profile)
    if not len(steps):
        return None, 0
    return (clock(int(steps[0, 0])), clock(int(steps[:, 1].max()))), len(steps)


class _DeviceClock:
    """Function from the host time at which an event is recorded to its completion on the compute stream.

    Example: if kernels are launched at 10 and 20 and end at 15 and 90, an event recorded at 5 completes at 5, one
    recorded at 12 completes at 15, and one recorded at 30 at 90. Without a device, events complete when recorded.
    """

    def __init__(self, profile: Profile) -> None:
        kernels = profile.kernels[profile.kernels["op"] == ""]
        launched = profile.launches.drop_duplicates("correlation")
        index = pd.Index(launched["correlation"]).get_indexer(pd.Index(kernels["correlation"]))
        launch_ns = kernels["start_ns"].to_numpy(dtype=np.int64).copy()
        launch_ns[index >= 0] = launched["start_ns"].to_numpy(dtype=np.int64)[index[index >= 0]]
        launch_ns[find_backlog(profile)[(profile.kernels["op"] == "").to_numpy()]] = _BEFORE_PROFILE
        order = np.argsort(launch_ns, kind="stable")
        self._launch_ns: Int64Array = launch_ns[order]
        self._done_ns: Int64Array = np.maximum.accumulate(kernels["end_ns"].to_numpy(dtype=np.int64)[order])

    def __call__(self, host_ns: int) -> int:
        before = int(np.searchsorted(self._launch_ns, host_ns, side="left"))
        return max(host_ns, int(self._done_ns[before - 1])) if before else host_ns


_BEFORE_PROFILE: Final = np.iinfo(np.int64).min


def find_backlog(profile: Profile) -> npt.NDArray[np.bool_]:
    """Return which rows of ``profile.kernels`` were launched before the profile began.

    These have no launch in it, and come before all that do on their stream, or if there are none there, on any. A
    profile without any launches says nothing about them.

    Example: a stream runs kernels at 0, 10 and 20, of which the second has a launch: the first is of the backlog, and
    the launch of the third was lost.
    """
    kernels = profile.kernels
    has_launch = kernels["correlation"].isin(profile.launches["correlation"])
    if not has_launch.any():
        return np.zeros(len(kernels), dtype=bool)
    first_ns = kernels["start_ns"].where(has_launch).groupby(kernels["stream"]).transform("min")
    before_ns = first_ns.fillna(kernels.loc[has_launch, "start_ns"].min())
    backlog: npt.NDArray[np.bool_] = (~has_launch & (kernels["start_ns"] < before_ns)).to_numpy(dtype=bool)
    return backlog


class _RecordBuilder:
    """Builder of the records.

    Args:
        steps: steps of the profile.
        has_device: True if the profile has work on a device, so that times are those of its clock.
        clock: clock of that device.
    """

    def __init__(self, steps: ProfileSteps, *, has_device: bool, clock: _DeviceClock) -> None:
        self._steps, self._has_device, self._clock = steps, has_device, clock
        self._flags = Flag.DEVICE_CLOCK if has_device else Flag.NONE
        self._rows: list[dict[str, Any]] = []
        self._bucket_info: dict[int, tuple[int, int, int]] = {}
        """Bucket, plan epoch and ready time, by ``id()`` of the collective's object."""
        self.plans: list[tuple[Bucket, ...]] = []

    def add_reduction(self, one: Pass, buckets: Sequence[Collective]) -> None:
        """Add the buckets of a pass: their plan, when they were ready, and the copies back.

        A bucket is ready with its last copy in. Example: launches at 30 and 50 and copies in that end at 10, 20 and 40
        give counts of 2 and 1, which sum up to 2 and 3, so that the buckets are ready at 20 and 40.
        """
        plan = tuple((each.dtype, each.elements) for each in buckets)
        if not self.plans or self.plans[-1] != plan:
            self.plans.append(plan)
        epoch = len(self.plans) - 1
        launches_ns = np.array([each.launch_ns for each in buckets])
        copied_ns = one.copies_in_ns[one.copies_in_ns <= launches_ns[-1]]
        counts = np.bincount(np.searchsorted(launches_ns, copied_ns), minlength=len(buckets))
        last = np.cumsum(counts)
        for bucket, (each, count, until) in enumerate(zip(buckets, counts.tolist(), last.tolist(), strict=True)):
            ready_ns = self._clock(int(copied_ns[until - 1]) if count else each.launch_ns)
            self._bucket_info[id(each)] = bucket, epoch, ready_ns
            # If the numbers of copies in and out differ, parameters were unused or gradients are views of the buckets:
            # copies can't be assigned to buckets.
            if count and last[-1] == len(one.copies_out_ns):
                copies_ns = one.copies_out_ns[until - count : until]
                self._copy_out(one.step, bucket, epoch, each, (int(copies_ns[0, 0]), int(copies_ns[-1, 1])))

    def _copy_out(self, step: int, bucket: int, epoch: int, all_reduce: Collective, host: Span) -> None:
        if not self._has_device and all_reduce.end_ns is not None:
            # The host has waited for the sum: an annotation that ends later was closed late.
            all_reduce.end_ns = min(all_reduce.end_ns, host[0])
        start_ns = max(self._clock(host[0]), all_reduce.end_ns or 0)
        end_ns = max(self._clock(host[1]), start_ns)
        self._add(Kind.COPY_OUT, step, start_ns, end_ns, index=bucket, plan_epoch=epoch, flags=self._flags)

    def collectives(self, collectives: Sequence[Collective]) -> None:
        """Add the collectives of all steps."""
        groups = {name: number for number, name in enumerate(dict.fromkeys(each.group for each in collectives))}
        for each in collectives:
            step = self._steps.index_at(each.launch_ns)
            if step is None:
                continue
            bucket, epoch, ready_ns = self._bucket_info.get(id(each), (NO_INDEX, 0, 0))
            body = {"op": OPS.index(each.op), "dtype": DTYPES.index(each.dtype), "elements": each.elements}
            body |= {"index": bucket, "group": groups[each.group], "plan_epoch": epoch}
            if bucket != NO_INDEX:
                self._add(Kind.BUCKET_READY, step, ready_ns, ready_ns, flags=self._flags, **body)
            self._add(Kind.LAUNCH, step, each.launch_ns, each.launch_ns, **body)
            if each.start_ns is not None and each.end_ns is not None:
                self._add(Kind.COLLECTIVE, step, each.start_ns, each.end_ns, flags=self._flags, **body)

    def phases(self, buckets: Sequence[Sequence[Collective]]) -> None:
        """Add the steps and the phases of each, which don't overlap.

        Args:
            buckets: buckets of each pass.
        """
        steps, clock = self._steps, self._clock
        host_begin_ns, now_ns = steps.begin_ns, clock(steps.begin_ns)
        for step, host_end_ns in enumerate(steps.ends_ns.tolist()):
            begin_ns = now_ns
            spans: list[tuple[Phase, Span, Flag]] = []
            for one, own in zip(steps.passes, buckets, strict=True):
                if one.step == step:
                    spans += self._phases_of(one, own)
            if spans:
                spans += self._phases_before_forward((host_begin_ns, host_end_ns), begin_ns, spans[0][1][0])
            for start_ns, end_ns in steps.optimizers:
                if host_begin_ns <= start_ns and end_ns <= host_end_ns:
                    spans.append((Phase.OPTIMIZER, (clock(start_ns), clock(end_ns)), Flag.NONE))
            for phase, (from_ns, until_ns), flag in sorted(spans, key=lambda span: span[1]):
                start_ns = max(now_ns, from_ns)
                now_ns = max(start_ns, until_ns)
                self._add(Kind.PHASE, step, start_ns, now_ns, index=phase, flags=self._flags | flag)
            self._add(Kind.STEP, step, begin_ns, now_ns, flags=self._flags)
            host_begin_ns = host_end_ns

    def _phases_before_forward(self, host: Span, begin_ns: int, forward_ns: int) -> list[tuple[Phase, Span, Flag]]:
        """Return the phases between the start of a step and its first forward: waits for data, and host loop."""
        spans = []
        for fetch_ns in (each for each in self._steps.fetches if host[0] <= each[0] < host[1]):
            start_ns, end_ns = (min(self._clock(ns), forward_ns) for ns in fetch_ns)
            if begin_ns <= start_ns < end_ns:
                spans.append((Phase.LOOP, (begin_ns, start_ns), Flag.NONE))
                spans.append((Phase.DATA_WAIT, (start_ns, end_ns), Flag.NONE))
                begin_ns = end_ns
        return [*spans, (Phase.LOOP, (begin_ns, forward_ns), Flag.NONE)]

    def _phases_of(self, one: Pass, buckets: Sequence[Collective]) -> list[tuple[Phase, Span, Flag]]:
        clock = self._clock
        forward = clock(one.forward[0]), clock(one.forward[1])
        if one.backward is None:
            return [(Phase.FORWARD if one.is_trained else Phase.EVALUATION, forward, Flag.NONE)]
        backward = clock(one.backward[0]), clock(one.backward[1])
        spans = [(Phase.FORWARD, forward, Flag.NONE)]
        spans.append((Phase.BACKWARD, backward, Flag.NONE if buckets else Flag.NO_SYNC))
        if buckets:
            copied_ns = clock(int(one.copies_out_ns[:, 1].max(initial=one.backward[1])))
            reduced_ns = max(each.end_ns or 0 for each in buckets)
            spans.append((Phase.FINALIZE, (backward[1], max(copied_ns, reduced_ns)), Flag.NONE))
        return spans

    def _add(self, kind: Kind, step: int, start_ns: int, end_ns: int, **body: int) -> None:
        row = {"kind": kind, "step": step + self._steps.first, "start_ns": start_ns, "end_ns": end_ns}
        self._rows.append(row | body)

    def records(self) -> Records:
        """Return all records, in the order in which they would have been written."""
        ordered = sorted(self._rows, key=lambda row: (row["end_ns"], row["kind"] == Kind.STEP))
        records = np.zeros(len(ordered), dtype=RECORD_DTYPE)
        for name in RECORD_DTYPE.names or ():
            records[name] = [row.get(name, 0) for row in ordered]
        records["sequence"] = np.arange(1, len(ordered) + 1)
        return records


def _find_bucket_all_reduces(one: Pass, collectives: Sequence[Collective]) -> list[Collective]:
    """Return the all-reduces that were launched during the backward of a pass."""
    if one.backward is None:
        return []
    begin_ns, end_ns = one.backward
    return [each for each in collectives if each.op == "all_reduce" and begin_ns <= each.launch_ns <= end_ns]


def _describe_backlog(profile: Profile) -> list[str]:
    is_old = find_backlog(profile)
    if not is_old.any():
        return []
    begin_ns = min(int(table["start_ns"].min()) for table in (profile.kernels, profile.launches, profile.spans))
    until_ns = int(profile.kernels.loc[is_old, "end_ns"].max()) - begin_ns
    kernels = f"{count_of(int(is_old.sum()), 'kernel')} launched before the profile began"
    return [f"{kernels} ran until {format_ns(until_ns)} after its begin; they are no part of its first step"]


def _notes(collectives: Sequence[Collective], left_out: Counter[str]) -> tuple[str, ...]:
    notes = []
    if left_out:
        counted = ", ".join(f"{count:,} {op}" for op, count in left_out.most_common())
        notes.append(f"in the summary of communication only, as they are no buckets: {counted}")
    if any(each.elements == 0 for each in collectives):
        notes.append("the trace does not say how large all-reduces are; profile with record_shapes=True")
    if unseen := sum(each.end_ns is None for each in collectives):
        notes.append(f"{unseen:,} collectives are launched and not seen to run")
    return tuple(notes)
