"""A recording as the model of ``overlapscope.model`` wants it: cycles, gradients, all-reduces and copies as arrays.

Left out are the first steps, those that do not reduce every bucket exactly once on all ranks, and the step after one
of these, as nobody knows when it began. What lies before the last backward of a step, such as the passes under
``no_sync()``, is part of the time until that one begins.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import pandas as pd

from overlapscope.analysis.arrivals import Matched, match_collectives
from overlapscope.analysis.cycles import lower_median
from overlapscope.analysis.recorded_plans import RecordedPlans
from overlapscope.errors import OverlapScopeError
from overlapscope.model.observation import Collectives, Observations, Spans
from overlapscope.model.partition import Float64Array, Int64Array
from overlapscope.model.wire import lanes_of_backend
from overlapscope.trace.reader import Trace
from overlapscope.trace.turns import turns

WARM_UP_STEPS: Final = 2
"""DDP makes its buckets in the first step, and first uses them in the second one."""
FEWEST_CYCLES: Final = 3
MOST_RANKS: Final = 8
"""Of more ranks those are looked at that are last most often."""
MOST_CYCLES: Final = 48
"""Of each plan, the newest. More tell nothing new."""
RECORD_AGAIN: Final = "record 20 steps or more with overlapscope record, best with --probe-buckets"


def reduced_models(trace: Trace) -> list[int]:
    """The DDP models whose buckets are reduced, the one with the most bytes first: that is the one looked at."""
    reduced = trace.collectives[_is_of_bucket(trace.collectives)]
    return [int(model) for model in reduced.groupby("model")["bytes"].sum().sort_values(ascending=False).index]


def lanes_of(trace: Trace) -> int:
    """How many all-reduces the backend runs at a time."""
    return lanes_of_backend(str(trace.run.get("backend", "")))


def observations_of(trace: Trace) -> Observations:
    """Arrange a recording for the model.

    Raises:
        OverlapScopeError: something that the model can't do without was not recorded.
    """
    _check_world(trace)
    models = reduced_models(trace)
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
            f"{trace.path}: no bucket plan was recorded, so nobody knows which gradients are in which bucket: train "
            f"with DistributedDataParallel, and {RECORD_AGAIN}"
        )
    clocked, has_common_clock = _clocked(trace, model)
    if has_common_clock:
        clocked = _ends_as_seen_first(clocked)
    matched = match_collectives(clocked)
    taken = _Taken.of(clocked, matched, model, plans)
    return _observations(trace, taken, matched, plans, has_common_clock=has_common_clock)


def _check_world(trace: Trace) -> None:
    if _world_size(trace) < 2:
        raise OverlapScopeError(
            f"{trace.path}: one rank has nobody to reduce gradients with, so buckets make no difference: record a job "
            "of 2 ranks or more"
        )
    if len(trace.ranks) < 2:
        raise OverlapScopeError(
            f"{trace.path}: only one of {_world_size(trace)} ranks left a log, so waits can't be told from transfers: "
            "bring the folders of the ranks together, or record again on all of them"
        )


def _check_hook(trace: Trace, model: int) -> None:
    described = {each.get("model"): each for each in trace.run.get("models", [])}
    hook = described.get(model, {}).get("comm_hook")
    if hook:
        raise OverlapScopeError(
            f"{trace.path}: the communication hook {hook} reduces the gradients, and what it sends need not be of "
            "their size: record some steps without the hook; the advice then says what compression would give"
        )


def _world_size(trace: Trace) -> int:
    return len(trace.expected_ranks) or int(trace.run.get("world_size") or len(trace.ranks))


def _is_of_bucket(collectives: pd.DataFrame) -> pd.Series[bool]:
    return (collectives["op"] == "all_reduce") & (collectives["bucket"] >= 0) & collectives["end_ns"].notna()


def _clocked(trace: Trace, model: int) -> tuple[Trace, bool]:
    """The all-reduces of the model alone, and whether the clocks of all ranks can be compared.

    Where they can't, every rank passes for aligned, and times of two ranks are never compared afterwards.
    """
    table = trace.collectives
    table = table[_is_of_bucket(table) & (table["model"] == model)]
    has_common_clock = len(trace.aligned_ranks) == len(trace.ranks)
    ranks = trace.ranks if has_common_clock else trace.ranks.assign(clock="own")
    return replace(trace, collectives=table, ranks=ranks), has_common_clock


def _ends_as_seen_first(trace: Trace) -> Trace:
    """All-reduces that end when the first rank sees them end, as far as the others may just have seen it late.

    On a host the end is seen by a thread that may have to wait for a core, up to some 10 ms, and an all-reduce ends on
    all ranks at nearly the same time.
    """
    table = trace.collectives
    end_ns = table["end_ns"].astype("int64")
    turn = turns(*(table[name].to_numpy() for name in ("rank", "step", "bucket")))
    first_ns = end_ns.groupby([table["step"], table["bucket"], turn]).transform("min")
    least_ns = end_ns - table["end_uncertainty_ns"]
    return replace(
        trace, collectives=table.assign(end_ns=first_ns.where(first_ns > least_ns, least_ns).astype("Int64"))
    )


@dataclass(frozen=True, eq=False, kw_only=True)
class _Taken:
    """The steps and ranks that are looked at."""

    model: int
    ranks: Int64Array
    """(R,)"""
    places: Int64Array
    """(R,) of them, in ``Matched``."""
    steps: Int64Array
    """(S,)"""
    epoch_of_step: dict[int, int]
    """Also of the step before each."""

    @classmethod
    def of(cls, trace: Trace, matched: Matched, model: int, plans: RecordedPlans) -> _Taken:
        by_step = trace.collectives.groupby("step")["plan_epoch"]
        in_force = by_step.first()[by_step.nunique() == 1]
        epoch_of = dict(zip(in_force.index.tolist(), in_force.tolist(), strict=True))
        steps, counts = np.unique(matched.step, return_counts=True)
        # Matched ones are complete on all ranks; a step that reduces twice has each bucket twice.
        wanted = np.array([len(plans.buckets.get(epoch_of.get(step, -1), ())) for step in steps.tolist()])
        whole = steps[counts == wanted]
        first = int(trace.steps["step"].min()) if len(trace.steps) else 0
        cycles = whole[np.isin(whole - 1, whole) & (whole >= first + WARM_UP_STEPS)]
        cycles = _with_backward(cycles, trace, model)
        if len(cycles) < FEWEST_CYCLES:
            raise OverlapScopeError(
                f"{trace.path}: only {len(cycles)} steps after the first {WARM_UP_STEPS} reduce every bucket once on "
                f"all ranks, one after the other, and {FEWEST_CYCLES} are needed: {RECORD_AGAIN}"
            )
        epochs = [epoch_of[step] for step in cycles.tolist()]
        newest = pd.Series(cycles).groupby(epochs).tail(MOST_CYCLES).to_numpy()
        last = np.bincount(matched.arrival_ns.argmax(axis=1), minlength=len(matched.ranks))
        places = np.sort(np.argsort(-last, kind="stable")[:MOST_RANKS])
        return cls(
            model=model,
            ranks=matched.ranks[places],
            places=places,
            steps=np.sort(newest),
            epoch_of_step=epoch_of,
        )

    def spots(self, table: pd.DataFrame, steps_later: int = 0) -> tuple[pd.DataFrame, Int64Array, Int64Array]:
        """The rows of the steps and ranks, and for each row its place among them.

        Args:
            steps_later: look at rows of so many steps before.
        """
        steps = self.steps - steps_later
        table = table[(table["model"] == self.model) & table["rank"].isin(self.ranks) & table["step"].isin(steps)]
        step = np.searchsorted(steps, table["step"].to_numpy(dtype=np.int64))
        return table, step, np.searchsorted(self.ranks, table["rank"].to_numpy(dtype=np.int64))


def _with_backward(steps: Int64Array, trace: Trace, model: int) -> Int64Array:
    """The steps in which all ranks have a backward that is reduced."""
    backward = _reduced_backward(trace, model)
    ranks = backward[backward["step"].isin(steps)].groupby("step")["rank"].nunique()
    return steps[np.isin(steps, ranks.index[ranks == len(trace.ranks)].to_numpy(dtype=np.int64))]


def _reduced_backward(trace: Trace, model: int) -> pd.DataFrame:
    phases = trace.phases
    return phases[(phases["phase"] == "backward") & (phases["model"] == model) & ~phases["no_sync"].astype(bool)]


def _observations(
    trace: Trace, taken: _Taken, matched: Matched, recorded: RecordedPlans, *, has_common_clock: bool
) -> Observations:
    shape = len(taken.steps), len(taken.ranks)
    released_ns = _released(matched, taken, taken.steps - 1)
    ended_ns = _released(matched, taken, taken.steps)
    start_ns, end_ns = released_ns, ended_ns
    if has_common_clock:
        start_ns = np.broadcast_to(lower_median(released_ns, axis=1)[:, None], shape)
        end_ns = np.broadcast_to(lower_median(ended_ns, axis=1)[:, None], shape)

    backward, step, rank = taken.spots(_reduced_backward(trace, taken.model).sort_values("end_ns"))
    backward_start_ns, backward_end_ns = np.zeros(shape, dtype=np.int64), np.zeros(shape, dtype=np.int64)
    backward_start_ns[step, rank] = backward["start_ns"].to_numpy()  # the last one of a step stays
    backward_end_ns[step, rank] = backward["end_ns"].to_numpy()

    plans, plan_of_epoch = recorded.distinct()
    collectives = _collectives(trace, taken, matched, start_ns, has_common_clock=has_common_clock)
    ready_ns = _ready(trace, taken, recorded, backward_start_ns)
    copied_ns, step, rank = taken.spots(trace.copies[trace.copies["direction"] == "out"], steps_later=1)
    copies_out_ns = start_ns.copy()
    np.maximum.at(copies_out_ns, (step, rank), copied_ns["end_ns"].to_numpy(dtype=np.int64))
    epoch_of = taken.epoch_of_step
    return Observations(
        gradients=recorded.gradients(epoch_of[int(taken.steps[-1])], ready_ns),
        world_size=_world_size(trace),
        ranks=taken.ranks,
        has_common_clock=has_common_clock,
        plans=plans,
        steps=taken.steps,
        plan=np.array([plan_of_epoch[epoch_of[int(step)]] for step in taken.steps]),
        plan_before=np.array([plan_of_epoch[epoch_of[int(step) - 1]] for step in taken.steps]),
        cycle_ns=(end_ns - start_ns).astype(np.float64),
        copies_out_ns=(copies_out_ns - start_ns).astype(np.float64),
        backward_start_ns=(backward_start_ns - start_ns).astype(np.float64),
        ready_ns=ready_ns,
        backward_end_ns=(backward_end_ns - backward_start_ns).astype(np.float64),
        collectives=collectives,
        copies_in=_copies(trace, taken, recorded, "in"),
        copies_out=_copies(trace, taken, recorded, "out"),
    )


def _released(matched: Matched, taken: _Taken, steps: Int64Array) -> Int64Array:
    """(S, R) when the last all-reduce of each step ended."""
    known, first = np.unique(matched.step, return_index=True)
    ends_ns = np.maximum.reduceat(matched.end_ns[:, taken.places], first, axis=0)
    released: Int64Array = ends_ns[np.searchsorted(known, steps)]
    return released


def _collectives(
    trace: Trace, taken: _Taken, matched: Matched, start_ns: Int64Array, *, has_common_clock: bool
) -> Collectives:
    wanted = matched.of(np.isin(matched.step, taken.steps))
    cycle = np.searchsorted(taken.steps, wanted.step)
    arrival_ns = wanted.arrival_ns
    own_start_ns = start_ns[cycle]
    end_ns = wanted.end_ns[:, taken.places] - own_start_ns
    launch_ns = np.maximum(arrival_ns[:, taken.places], _copied_in(trace, taken, wanted)) - own_start_ns
    if has_common_clock:
        last_ns = np.maximum(arrival_ns.max(axis=1) - own_start_ns[:, 0], launch_ns.max(axis=1))
        transfer_ns = np.median(end_ns, axis=1) - last_ns
    else:
        transfer_ns = (end_ns - launch_ns).min(axis=1)
    return Collectives(
        cycle=cycle,
        bucket=wanted.bucket,
        bytes=wanted.bytes,
        launch_ns=launch_ns.astype(np.float64),
        end_ns=end_ns.astype(np.float64),
        transfer_ns=transfer_ns.astype(np.float64),
    )


def _copied_in(trace: Trace, taken: _Taken, wanted: Matched) -> Int64Array:
    """(C, R) when the copies into each bucket were over; 0 without copies. On CUDA the host launches ahead of them."""
    copies, step, rank = taken.spots(trace.copies[trace.copies["direction"] == "in"])
    bucket = copies["bucket"].to_numpy(dtype=np.int64)
    width = max(bucket.max(initial=0), wanted.bucket.max(initial=0)) + 1
    over_ns = np.zeros((len(taken.steps), width, len(taken.ranks)), dtype=np.int64)
    np.maximum.at(over_ns, (step, bucket, rank), copies["end_ns"].to_numpy(dtype=np.int64))
    found: Int64Array = over_ns[np.searchsorted(taken.steps, wanted.step), wanted.bucket]
    return found


def _ready(trace: Trace, taken: _Taken, plans: RecordedPlans, backward_start_ns: Int64Array) -> Float64Array:
    """(S, R, P) from backward's start; of buckets alone where single gradients were not recorded."""
    ready_ns = np.full((*backward_start_ns.shape, len(plans.numbers)), np.nan)
    table = trace.collectives[_is_of_bucket(trace.collectives) & trace.collectives["ready_ns"].notna()]
    buckets, step, rank = taken.spots(table)
    place = plans.last_of(buckets)
    ready_ns[step, rank, place] = buckets["ready_ns"].to_numpy(dtype=np.int64) - backward_start_ns[step, rank]
    gradients, step, rank = taken.spots(trace.gradients[trace.gradients["parameter"].isin(plans.numbers)])
    place = np.searchsorted(plans.numbers, gradients["parameter"].to_numpy(dtype=np.int64))
    since_ns = gradients["ready_ns"].to_numpy(dtype=np.int64) - backward_start_ns[step, rank]
    in_order = np.argsort(since_ns, kind="stable")  # of several passes the last one stays
    ready_ns[step[in_order], rank[in_order], place[in_order]] = since_ns[in_order]
    return np.where(ready_ns < 0, np.nan, ready_ns)


def _copies(trace: Trace, taken: _Taken, plans: RecordedPlans, direction: str) -> Spans:
    copies, step, _ = taken.spots(trace.copies[trace.copies["direction"] == direction])
    time_ns = (copies["end_ns"] - copies["start_ns"]).to_numpy(dtype=np.float64)
    return Spans(bytes=plans.bytes_of(copies), time_ns=time_ns, cycle=step)
