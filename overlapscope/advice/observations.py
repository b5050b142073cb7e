"""Input of ``overlapscope.bucket_model`` from a recording: cycles, gradients, all-reduces and copies as arrays.

Left out are the first steps, those that do not reduce every bucket exactly once on all ranks, and the step after each
of these, as its start is unknown. What precedes the last backward of a step, such as passes under ``no_sync()``, is
part of the time before that backward.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Final

import numpy as np
import pandas as pd

from overlapscope.breakdown.arrivals import MatchedCollectives, match_collectives
from overlapscope.breakdown.steady_steps import find_light_steps
from overlapscope.bucket_model.observation import (
    BucketCycles,
    Observations,
    compute_bucket_cycles,
    concatenate_ranks,
    observations_from_cycles,
)
from overlapscope.bucket_model.partition import Buckets, Float64Array, Gradients, Int64Array
from overlapscope.errors import OverlapScopeError
from overlapscope.stragglers.cycles import lower_median
from overlapscope.text import count_of
from overlapscope.trace.collective_arrival import compute_arrival_ns, occurrence_index
from overlapscope.trace.event_log import RECORD_DTYPE, Records
from overlapscope.trace.recording import Trace
from overlapscope.trace.schema import Kind, Phase, count_lanes

# Bucket plans of one recorded model, by epoch, with gradients numbered without gaps.


@dataclass(frozen=True, eq=False, kw_only=True)
class RecordedPlans:
    """The plans of one model.

    A gradient is identified by its *index* among reduced gradients, in the order of parameters.
    """

    numbers: Int64Array
    """(P,) Numbers of the parameters, ascending."""
    buckets: dict[int, Buckets]
    """Buckets by epoch, as gradient indices."""
    bytes: Int64Array
    """(P,) Size of each gradient in bytes."""
    names: tuple[str, ...]
    dtypes: tuple[str, ...]

    @classmethod
    def of(cls, trace: Trace, model: int) -> RecordedPlans:
        """Read the plans of one model; empty if none was recorded."""
        table = trace.plans[trace.plans["model"] == model]
        rows = table.drop_duplicates(["plan_epoch", "bucket", "position"])
        rows = rows.sort_values(["plan_epoch", "bucket", "position"])
        numbers, latest = np.unique(rows["parameter"].to_numpy(dtype=np.int64)[::-1], return_index=True)
        described = rows.iloc[len(rows) - 1 - latest]
        index = np.searchsorted(numbers, rows["parameter"].to_numpy(dtype=np.int64))
        epoch, bucket = rows["plan_epoch"].to_numpy(dtype=np.int64), rows["bucket"].to_numpy(dtype=np.int64)
        starts = np.flatnonzero(np.diff(epoch, prepend=-1) | np.diff(bucket, prepend=-1))
        buckets: dict[int, list[tuple[int, ...]]] = {}
        for first, end in pairwise([*starts.tolist(), len(rows)]):
            buckets.setdefault(int(epoch[first]), []).append(tuple(index[first:end].tolist()))
        return cls(
            numbers=numbers,
            buckets={epoch: tuple(plan) for epoch, plan in buckets.items()},
            bytes=described["bytes"].to_numpy(dtype=np.int64),
            names=tuple(described["name"].astype(str)),
            dtypes=tuple(described["dtype"].astype(str)),
        )

    def gradients(self, epoch: int, ready_ns: Float64Array) -> Gradients:
        """Return the reduced gradients in the order in which DDP fills buckets with them: that of one plan.

        If there are several types, each with its own buckets, gradients of different types are ordered by when they
        were ready.

        Args:
            ready_ns: (R, S, P) When each was ready; NaN where that is unknown.
        """
        order = np.array([index for bucket in self.buckets[epoch] for index in bucket], dtype=np.int64)
        kinds = np.unique(self.dtypes, return_inverse=True)[1].astype(np.int64)
        is_known = ~np.isnan(ready_ns).all(axis=(0, 1))
        moment_ns = np.full(len(self.numbers), np.inf)
        moment_ns[is_known] = np.nanmedian(ready_ns[:, :, is_known], axis=(0, 1))
        moment_ns = moment_ns[order]
        for kind in np.unique(kinds):
            of_kind = np.flatnonzero(kinds[order] == kind)
            # A gradient without a time takes that of the next with one; one that is ready early still waits for those
            # before it.
            next_ns = np.minimum.accumulate(moment_ns[of_kind][::-1])[::-1]
            own_ns = np.where(np.isfinite(moment_ns[of_kind]), moment_ns[of_kind], next_ns)
            moment_ns[of_kind] = np.maximum.accumulate(own_ns)
        return Gradients(
            names=self.names, bytes=self.bytes, kinds=kinds, order=order[np.argsort(moment_ns, kind="stable")]
        )


WARM_UP_STEPS: Final = 2
"""Number of steps left out at the start: DDP builds its buckets in the first step, and first uses them in the
second."""
MIN_CYCLES: Final = 3
"""Minimum number of cycles to fit the model to."""
MAX_RANKS: Final = 8
"""Maximum number of ranks used: of more, those that are last most often."""
MAX_CYCLES: Final = 48
"""Maximum number of steps used of each plan, the latest. More add no information."""
RECORD_AGAIN: Final = "record 20 steps or more with overlapscope record, best with --probe-buckets"
_REDUCE_ONCE: Final = "run all backwards of a step but its last one under no_sync(), and record again"


def find_reduced_models(trace: Trace) -> list[int]:
    """Return the DDP models whose buckets are reduced, the one with the most bytes first, which is the one used."""
    reduced = trace.collectives[_is_of_bucket(trace.collectives)]
    return [int(model) for model in reduced.groupby("model")["bytes"].sum().sort_values(ascending=False).index]


def get_backend_lanes(trace: Trace) -> int:
    """Return the number of all-reduces that the backend runs at a time."""
    return count_lanes(str(trace.run.get("backend", "")))


def extract_observations(trace: Trace) -> Observations:
    """Arrange a recording for the model.

    Raises:
        OverlapScopeError: Something that the model needs was not recorded.
    """
    _check_world(trace)
    models = find_reduced_models(trace)
    if not models:
        raise OverlapScopeError(
            f"{trace.path}: no all-reduce of a bucket was recorded to its end: train with DistributedDataParallel, and "
            f"{RECORD_AGAIN}"
        )
    model = models[0]
    _check_hook(trace, model)
    plans = RecordedPlans.of(trace, model)
    if not plans.buckets:
        raise OverlapScopeError(
            f"{trace.path}: no bucket plan was recorded, so it is unknown which gradients are in which bucket: train "
            f"with DistributedDataParallel, and {RECORD_AGAIN}"
        )
    clocked, has_common_clock = _select_model(trace, model)
    if has_common_clock:
        clocked = _use_earliest_ends(clocked)
    matched = match_collectives(clocked, has_common_clock=has_common_clock)
    steps, ranks = _select_steps(clocked, matched, plans), _select_ranks(matched)
    begin_ns, end_ns = (_find_release_ns(matched, ranks, each) for each in (steps - 1, steps))
    own_records = _records_by_rank(clocked, model, plans, matched.ranks[ranks], steps)
    cycles = concatenate_ranks(
        [
            compute_bucket_cycles(
                records,
                model,
                plans.buckets,
                steps.tolist(),
                len(plans.numbers),
                bounds_ns=np.stack([begin_ns, end_ns], axis=1) if has_common_clock else None,
            )
            for records in own_records
        ]
    )
    is_complete = cycles.is_complete
    cycles = cycles.of(is_complete)
    if len(cycles.steps) < MIN_CYCLES:
        is_repeated = clocked.collectives.duplicated(["rank", "step", "bucket"]).any()
        what_to_do = _REDUCE_ONCE if is_repeated else RECORD_AGAIN
        raise OverlapScopeError(
            f"{trace.path}: only {count_of(len(cycles.steps), 'step')} after the first {WARM_UP_STEPS} with every "
            f"bucket reduced once on all ranks, one after the other, and {MIN_CYCLES} are needed: {what_to_do}"
        )
    return observations_from_cycles(
        cycles,
        matched.ranks[ranks],
        plans.buckets,
        plans.gradients(int(cycles.epoch[-1]), cycles.ready_ns),
        _world_size(trace),
        _find_last_arrivals(matched, cycles, begin_ns[is_complete]) if has_common_clock else None,
    )


def _check_world(trace: Trace) -> None:
    if _world_size(trace) < 2:
        raise OverlapScopeError(
            f"{trace.path}: with one rank nothing is reduced, so buckets make no difference: record a job of 2 ranks "
            f"or more"
        )
    if len(trace.ranks) < 2:
        raise OverlapScopeError(
            f"{trace.path}: only one of {_world_size(trace)} ranks left a log, so waits can't be told from transfers: "
            "copy the rank folders together, or record again on all ranks"
        )


def _check_hook(trace: Trace, model: int) -> None:
    described = {each.get("model"): each for each in trace.run.get("models", [])}
    hook = described.get(model, {}).get("comm_hook")
    if hook:
        raise OverlapScopeError(
            f"{trace.path}: the communication hook {hook} reduces the gradients, and may send more or less than their "
            f"size: record some steps without the hook; the advice then says what compression would give"
        )


def _world_size(trace: Trace) -> int:
    return len(trace.expected_ranks) or int(trace.run.get("world_size") or len(trace.ranks))


def _is_of_bucket(collectives: pd.DataFrame) -> pd.Series[bool]:
    return (collectives["op"] == "all_reduce") & (collectives["bucket"] >= 0) & collectives["end_ns"].notna()


def _select_model(trace: Trace, model: int) -> tuple[Trace, bool]:
    """Return a trace with only the all-reduces of the model, and whether the clocks of all ranks can be compared.

    If they can't, every rank is treated as aligned, and times of two ranks are never compared afterwards.
    """
    table = trace.collectives
    table = table[_is_of_bucket(table) & (table["model"] == model)]
    has_common_clock = len(trace.aligned_ranks) == len(trace.ranks)
    ranks = trace.ranks if has_common_clock else trace.ranks.assign(clock="own")
    return replace(trace, collectives=table, ranks=ranks), has_common_clock


def _use_earliest_ends(trace: Trace) -> Trace:
    """Move the end of each all-reduce to where the first rank sees it, as far as the others may have noticed it late.

    On a host the end is observed by a thread that may have to wait for a core, up to some 10 ms, and an all-reduce ends
    on all ranks at nearly the same time.
    """
    table = trace.collectives
    end_ns = table["end_ns"].astype("int64")
    turn = occurrence_index(*(table[name].to_numpy() for name in ("rank", "step", "bucket")))
    first_ns = end_ns.groupby([table["step"], table["bucket"], turn]).transform("min")
    least_ns = end_ns - table["end_uncertainty_ns"]
    return replace(
        trace, collectives=table.assign(end_ns=first_ns.where(first_ns > least_ns, least_ns).astype("Int64"))
    )


def _select_steps(trace: Trace, matched: MatchedCollectives, plans: RecordedPlans) -> Int64Array:
    """Return the latest steps (S,) with each plan of those that reduce every bucket once, as does the step before.

    Light steps are used only of plans with too few others, because they have no copies and on a host may be late with
    the ends of short buckets.
    """
    by_step = trace.collectives.groupby("step")["plan_epoch"]
    in_force = by_step.first()[by_step.nunique() == 1]
    epoch_of = dict(zip(in_force.index.tolist(), in_force.tolist(), strict=True))
    steps, counts = np.unique(matched.step, return_counts=True)
    # Matched collectives are complete on all ranks; a step that reduces twice has each bucket twice.
    wanted = np.array([len(plans.buckets.get(epoch_of.get(step, -1), ())) for step in steps.tolist()])
    whole = steps[counts == wanted]
    first = int(trace.steps["step"].min()) if len(trace.steps) else 0
    taken = whole[np.isin(whole - 1, whole) & (whole >= first + WARM_UP_STEPS)]
    epochs = np.array([epoch_of[step] for step in taken.tolist()], dtype=np.int64)
    is_full = pd.Series(~np.isin(taken, find_light_steps(trace.steps)))
    has_enough = is_full.groupby(epochs).transform("sum") >= MIN_CYCLES
    used = (is_full | ~has_enough).to_numpy(dtype=bool)
    return np.sort(pd.Series(taken[used]).groupby(epochs[used]).tail(MAX_CYCLES).to_numpy(dtype=np.int64))


def _select_ranks(matched: MatchedCollectives) -> Int64Array:
    """Return the indices (R,) in ``MatchedCollectives`` of the ranks that are last most often."""
    last = np.bincount(matched.arrival_ns.argmax(axis=1), minlength=len(matched.ranks))
    return np.sort(np.argsort(-last, kind="stable")[:MAX_RANKS])


def _find_release_ns(matched: MatchedCollectives, ranks: Int64Array, steps: Int64Array) -> Int64Array:
    """Return when the last all-reduce of each step ended on the median of some ranks (S,)."""
    known, first = np.unique(matched.step, return_index=True)
    ends_ns = np.maximum.reduceat(matched.end_ns[:, ranks], first, axis=0)
    return lower_median(ends_ns[np.searchsorted(known, steps)], axis=1)


def _find_last_arrivals(matched: MatchedCollectives, cycles: BucketCycles, begin_ns: Int64Array) -> Float64Array:
    """Return when the last of all ranks entered each all-reduce, from the start of the cycle (S, B)."""
    wanted = matched.of(np.isin(matched.step, cycles.steps))
    cycle = np.searchsorted(cycles.steps, wanted.step)
    entries_ns = np.full(cycles.buckets_ns.shape[1:3], np.nan)
    entries_ns[cycle, wanted.bucket] = wanted.arrival_ns.max(axis=1) - begin_ns[cycle]
    return entries_ns


def _records_by_rank(
    trace: Trace, model: int, plans: RecordedPlans, ranks: Int64Array, steps: Int64Array
) -> list[Records]:
    """Return what each rank recorded of some steps and of those before them.

    Records are on the common clock; gradients are numbered by their index in ``plans.numbers``.
    """
    wanted_steps = np.union1d(steps - 1, steps)
    found: list[tuple[Int64Array, Records]] = []

    def add(kind: Kind, table: pd.DataFrame, start: str, end: str, index: pd.Series[int] | Int64Array | int) -> None:
        records = np.zeros(len(table), dtype=RECORD_DTYPE)
        records["kind"], records["step"], records["model"], records["index"] = kind, table["step"], model, index
        records["start_ns"], records["end_ns"] = table[start].astype("int64"), table[end].astype("int64")
        if "plan_epoch" in table:
            records["plan_epoch"] = table["plan_epoch"]
        found.append((table["rank"].to_numpy(dtype=np.int64), records))

    def taken(table: pd.DataFrame, *, of_model: bool = True) -> pd.DataFrame:
        is_taken = table["rank"].isin(ranks) & table["step"].isin(wanted_steps)
        return table[is_taken & (table["model"] == model)] if of_model else table[is_taken]

    reduced = taken(trace.collectives)
    ready = reduced[reduced["ready_ns"].notna()]
    add(
        Kind.COLLECTIVE,
        reduced.assign(entered_ns=compute_arrival_ns(reduced)),
        "entered_ns",
        "end_ns",
        reduced["bucket"],
    )
    add(Kind.BUCKET_READY, ready, "ready_ns", "ready_ns", ready["bucket"])
    for kind, direction in ((Kind.COPY_IN, "in"), (Kind.COPY_OUT, "out")):
        copies = taken(trace.copies[trace.copies["direction"] == direction])
        add(kind, copies, "start_ns", "end_ns", copies["bucket"])
    gradients = taken(trace.gradients[trace.gradients["parameter"].isin(plans.numbers)])
    indices = np.searchsorted(plans.numbers, gradients["parameter"].to_numpy(dtype=np.int64))
    add(Kind.GRADIENT_READY, gradients, "ready_ns", "ready_ns", indices)
    is_reduced = (trace.phases["phase"] == "backward") & ~trace.phases["no_sync"].astype(bool)
    add(Kind.PHASE, taken(trace.phases[is_reduced], of_model=False), "start_ns", "end_ns", Phase.BACKWARD)
    rank_of_record, records = (np.concatenate(parts) for parts in zip(*found, strict=True))
    return [records[rank_of_record == rank] for rank in ranks]
