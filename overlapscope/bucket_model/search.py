"""Search for the best bucket plan: the best of single sizes, and the best of all, which no size may express.

Everything that chooses among plans begins here: the recommendation for a recording, the page of bucket sizes, and
``bucket_cap_mb="auto"``.

Where buckets are sent one after the other, the best plan up to a gradient extends the best plan up to an earlier one:
all that matters of the earlier buckets is when the link is free again. So dynamic programming over the last cut finds,
for each number of buckets, the plan that finishes first (compare "MG-WFBP: Efficient Data Communication for Distributed
Synchronous SGD Algorithms", Shi et al., INFOCOM 2019). What the dynamic program ignores (two lanes, several recorded
cycles, slowed-down compute) is handled by replaying its plans, and by moving cuts while that helps.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Final

import numpy as np

from overlapscope.bucket_model.partition import (
    SPARSE_KIND,
    BoolArray,
    Buckets,
    Float64Array,
    Gradients,
    buckets_from_cuts,
    build_table_from_cuts,
    cuts_from_buckets,
    forced_cuts,
)
from overlapscope.bucket_model.plans import UniformPlan, default_plan, uniform_plans
from overlapscope.bucket_model.schedule import Costs, replay
from overlapscope.bucket_model.work import ComputeTimes

MIN_GAIN: Final = 0.01
"""Smallest share of the step that is worth a change."""

_MAX_SIZES: Final = 250
_MAX_BUCKETS_OF_SIZES: Final = 100
"""Number of buckets above which sizes are not considered: latency alone makes them slow."""


@dataclass(frozen=True, eq=False, kw_only=True)
class PredictedSizes:
    """Predicted step times of DDP's default and of Q sizes with different buckets."""

    default: UniformPlan
    default_ns: float
    sizes: tuple[UniformPlan, ...]
    """Plans of the sizes, small caps first."""
    sizes_ns: Float64Array
    """(Q,) step times of the sizes."""

    @cached_property
    def fastest(self) -> int:
        """Return the index of the best size."""
        return find_fastest(self.sizes, self.sizes_ns)

    @property
    def best(self) -> UniformPlan:
        """Return the plan of the best size, or the default if no size is better by enough."""
        is_default = prefers_default(self.default_ns, self.sizes_ns[self.fastest])
        return self.default if is_default else self.sizes[self.fastest]

    @property
    def best_ns(self) -> float:
        """Return the step time of ``best``."""
        return self.default_ns if self.best is self.default else float(self.sizes_ns[self.fastest])


def find_fastest(sizes: Sequence[UniformPlan], sizes_ns: Float64Array) -> int:
    """Return the index of the fastest size, of those that a cap of two digits gives if there are any."""
    round_ones = np.flatnonzero([size.has_round_cap for size in sizes])
    among = round_ones if len(round_ones) else np.arange(len(sizes))
    return int(among[np.argmin(sizes_ns[among])])


def prefers_default(default_ns: float, fastest_ns: float, present_ns: float = math.inf) -> bool:
    """Return True if no size is faster than DDP's default by enough: to set nothing is simpler than any size.

    Args:
        present_ns: Step time of the present plan, which nobody should give up for a slower one.
    """
    return bool(default_ns <= min(fastest_ns * (1 + MIN_GAIN), present_ns))


def predict_sizes(work: ComputeTimes, costs: Costs, first_bucket_bytes: int | None = None) -> PredictedSizes:
    """Replay every size that makes a difference.

    Args:
        first_bucket_bytes: Separate limit for the first bucket of each size; DDP's default always has one.
    """
    gradients = work.gradients
    smallest = max(1, gradients.total_bytes // _MAX_BUCKETS_OF_SIZES)
    default = default_plan(gradients)
    sizes = uniform_plans(gradients, first_bucket_bytes, max_plans=_MAX_SIZES, smallest_cap_bytes=smallest)
    step_ns = replay([plan.buckets for plan in (default, *sizes)], work, costs).typical_ns
    return PredictedSizes(default=default, default_ns=float(step_ns[0]), sizes=sizes, sizes_ns=step_ns[1:])


# Merging of neighboring gradients, so that plans for thousands of gradients are found as quickly as for a small
# model.
#
# Gradients are merged if they are of one kind, consecutive, and small compared with the model, so that closing a
# bucket between them would make no measurable difference.

_MAX_GRADIENTS: Final = 500
"""Models with at most this many gradients are left unchanged."""
_MERGED_PARTS: Final = 400
"""Merged gradients hold at most 1/400 of the model's bytes each, unless a single member is larger."""


@dataclass(frozen=True, eq=False, kw_only=True)
class MergedGradients:
    """Work on merged gradients, and the gradients that each one consists of."""

    work: ComputeTimes
    members: tuple[tuple[int, ...], ...]
    """Original gradient indices merged into each coarse gradient, in order."""

    def expand_plan(self, buckets: Buckets) -> Buckets:
        """Translate a plan on merged gradients to one on the original gradients."""
        return tuple(tuple(number for joined in bucket for number in self.members[joined]) for bucket in buckets)


def merge_gradients(work: ComputeTimes) -> MergedGradients | None:
    """Merge small consecutive gradients; return None if there are few enough."""
    gradients = work.gradients
    if len(gradients.order) <= _MAX_GRADIENTS:
        return None
    kinds, sizes = gradients.kinds.tolist(), gradients.bytes.tolist()
    enough = gradients.total_bytes / _MERGED_PARTS
    filling: dict[int, list[int]] = {}
    filled: dict[int, int] = {}
    joined: list[tuple[int, ...]] = []
    for number in gradients.order.tolist():
        kind, size = kinds[number], sizes[number]
        if kind == SPARSE_KIND:
            joined.append((number,))
            continue
        if kind in filling and filled[kind] + size > enough:
            joined.append(tuple(filling.pop(kind)))
            filled[kind] = 0
        filling.setdefault(kind, []).append(number)
        filled[kind] = filled.get(kind, 0) + size
    joined += [tuple(members) for members in filling.values()]
    position = np.empty(len(gradients.order), dtype=np.int64)
    position[gradients.order] = np.arange(len(gradients.order))
    joined.sort(key=lambda members: position[members[-1]])
    last = np.array([members[-1] for members in joined])
    return MergedGradients(
        work=replace(
            work,
            gradients=Gradients(
                names=tuple(gradients.names[number] for number in last),
                bytes=np.array([sum(sizes[number] for number in members) for members in joined], dtype=np.int64),
                kinds=gradients.kinds[last],
                order=np.arange(len(joined)),
            ),
            ready_ns=work.ready_ns[:, :, position[last]],
        ),
        members=tuple(joined),
    )


_MAX_BUCKETS: Final = 96
"""Maximum number of buckets; more are never faster."""
_MAX_CYCLES: Final = 12
"""Maximum number of cycles used when moving cuts."""
_SHIFTS: Final = (-8, -4, -2, -1, 1, 2, 4, 8)
_MIN_IMPROVEMENT: Final = 1e-5
_MIN_GAIN_PER_BUCKET: Final = 1e-4
"""Share of the step that a bucket must gain to be worthwhile: the recording can't resolve smaller gains."""
_ROUNDS: Final = 30
_UNIFORM_PLANS: Final = 100


def find_best_plan(work: ComputeTimes, costs: Costs, also: Sequence[Buckets] = ()) -> Buckets:
    """Find the plan with the shortest mean step time, in the replay of all cycles.

    There it is at least as good as DDP's default and any cap, except that buckets which gain almost nothing are left
    out. Neighboring gradients of a model with very many are merged first (``merge_gradients``).

    Args:
        also: Further plans that the result must not be worse than.
    """
    joined = merge_gradients(work)
    if joined is None:
        return _find_best_plan(work, costs, also)
    plans = [*also, joined.expand_plan(_find_best_plan(joined.work, costs, ()))]
    return plans[int(np.argmin(replay(plans, work, costs).cycle_ns.mean(axis=1)))]


def _find_best_plan(work: ComputeTimes, costs: Costs, also: Sequence[Buckets]) -> Buckets:
    gradients = work.gradients
    few = work.select_cycles(np.unique(np.linspace(0, len(work.end_ns) - 1, _MAX_CYCLES).round().astype(np.int64)))
    known = [default_plan(gradients).buckets, *also]
    known += [plan.buckets for plan in uniform_plans(gradients, max_plans=_UNIFORM_PLANS)]
    candidates = [cuts for cuts in (cuts_from_buckets(plan, gradients) for plan in known) if cuts is not None]
    typical = work.typical()
    candidates += find_cuts_by_count(typical, costs)
    if costs.lanes > 1:
        candidates += find_cuts_by_count(typical, costs, is_latency_hidden=True)
    cuts = np.unique(np.array(candidates) | forced_cuts(gradients), axis=0)
    mean_ns = _mean_ns(cuts, few, costs)
    best = _improve_cuts(cuts[np.argmin(mean_ns)], few, costs)
    finalists = np.concatenate([best[None], cuts[np.argsort(mean_ns)[:8]]])
    return buckets_from_cuts(
        _simplify_cuts(finalists[np.argmin(_mean_ns(finalists, work, costs))], work, costs), gradients
    )


def find_cuts_by_count(work: ComputeTimes, costs: Costs, *, is_latency_hidden: bool = False) -> list[BoolArray]:
    """Compute the cuts (P,) of the plan that finishes its communication first, for each number of buckets.

    Exact for one cycle, one lane and no slowdowns. A cut ends the buckets of all kinds.

    Args:
        work: Only its first cycle is used.
        is_latency_hidden: Count no latency, as if another lane always hid it.
    """
    gradients = work.gradients
    positions = len(gradients.order)
    relative_slowdown = costs.communication_slowdown / costs.compute_slowdown
    transfer, copy_out = _segment_costs(gradients, costs, is_latency_hidden=is_latency_hidden)
    transfer *= relative_slowdown
    transfer[:, -1] += copy_out
    filled = np.cumsum(gradients.bytes[gradients.order])
    ready = work.last_ready_ns[0] + costs.copy_in.beta_ns * filled
    free = np.full(positions, -np.inf)  # when the link is free, after buckets up to a position; none before the first
    from_start = transfer[0]
    cuts: list[BoolArray] = []
    previous_cut: list[np.ndarray] = []
    for count in range(1, min(positions, _MAX_BUCKETS) + 1):
        launch = ready + count * costs.copy_in.alpha_ns
        if count == 1:
            free = launch + from_start
            previous_cut.append(np.full(positions, -1))
        else:
            # buckets up to `row`, then one more up to `column`
            ends = np.maximum(free[:-1, None], launch) + transfer[1:]
            previous_cut.append(np.argmin(ends, axis=0))
            free = np.take_along_axis(ends, previous_cut[-1][None], axis=0)[0]
        if np.isfinite(free[-1]):
            cuts.append(_trace_cuts_back(previous_cut, gradients))
    return cuts


def _segment_costs(gradients: Gradients, costs: Costs, *, is_latency_hidden: bool) -> tuple[Float64Array, Float64Array]:
    """Compute the cost of sending all gradients from one position to another (P, P), and of the last copies out (P,).

    Example: with three gradients of one kind and 4, 2 and 6 bytes, element (0, 1) of the first array is the cost of an
    all-reduce of 6 bytes, and element 1 of the second that of copying 2 + 6 = 8 bytes.
    """
    positions = len(gradients.order)
    kinds, sizes = gradients.kinds[gradients.order], gradients.bytes[gradients.order]
    latency = costs.collective.alpha_ns if is_latency_hidden else 0.0
    transfer, copy_out = np.zeros((positions, positions)), np.zeros(positions)
    first, last = np.triu_indices(positions)
    for kind in np.unique(kinds):
        of_kind = kinds == kind
        if kind == SPARSE_KIND:
            each = np.where(of_kind, np.maximum(costs.collective.time_ns(sizes) - latency, 0.0), 0.0)
            before = np.concatenate([[0.0], np.cumsum(each)])
            transfer[first, last] += before[last + 1] - before[first]
            continue
        filled = np.concatenate([[0], np.cumsum(np.where(of_kind, sizes, 0))])
        bytes_ = filled[last + 1] - filled[first]
        time_ns = np.maximum(costs.collective.time_ns(bytes_) - latency, 0.0)
        transfer[first, last] += np.where(bytes_ > 0, time_ns, 0.0)
        copy_out += costs.copy_out.time_ns(filled[-1] - filled[:-1])
    transfer[np.tril_indices(positions, -1)] = np.inf
    return transfer, copy_out


def _trace_cuts_back(previous_cut: list[np.ndarray], gradients: Gradients) -> BoolArray:
    """Reconstruct the cuts of the plan that ends at the last position, from where each bucket began."""
    kinds = gradients.kinds[gradients.order]
    cuts = np.zeros(len(kinds), dtype=bool)
    position = len(kinds) - 1
    for previous in reversed(previous_cut):
        begin = int(previous[position])
        segment = np.arange(begin + 1, position + 1)
        for kind in np.unique(kinds[segment]):
            cuts[segment[kinds[segment] == kind][-1]] = True
        position = begin
    return cuts


def _improve_cuts(cuts: BoolArray, work: ComputeTimes, costs: Costs) -> BoolArray:
    """Move, remove and add cuts, one at a time, as long as that shortens the mean step."""
    best_ns = float(_mean_ns(cuts[None], work, costs)[0])
    for _ in range(_ROUNDS):
        neighbors = _neighboring_cuts(cuts, forced_cuts(work.gradients))
        if not len(neighbors):
            break
        mean_ns = _mean_ns(neighbors, work, costs)
        if mean_ns.min() >= best_ns * (1 - _MIN_IMPROVEMENT):
            break
        cuts, best_ns = neighbors[np.argmin(mean_ns)], float(mean_ns.min())
    return cuts


def _simplify_cuts(cuts: BoolArray, work: ComputeTimes, costs: Costs) -> BoolArray:
    """Remove the cuts that gain almost nothing, the least useful first."""
    forced = forced_cuts(work.gradients)
    allowed_ns = float(_mean_ns(cuts[None], work, costs)[0])
    while (free := np.flatnonzero(cuts & ~forced)).size:
        simpler = np.tile(cuts, (len(free), 1))
        simpler[np.arange(len(free)), free] = False
        mean_ns = _mean_ns(simpler, work, costs)
        allowed_ns *= 1 + _MIN_GAIN_PER_BUCKET
        if mean_ns.min() > allowed_ns:
            break
        cuts = simpler[np.argmin(mean_ns)]
    return cuts


def _neighboring_cuts(cuts: BoolArray, forced: BoolArray) -> BoolArray:
    """Return the plans that differ in one cut, which is flipped or moved."""
    free = np.flatnonzero(~forced)
    flipped = np.tile(cuts, (len(free), 1))
    flipped[np.arange(len(free)), free] ^= True
    here = np.flatnonzero(cuts & ~forced)
    moved, to = np.repeat(here, len(_SHIFTS)), (here[:, None] + np.array(_SHIFTS)).ravel()
    fits = (to >= 0) & (to < len(cuts))
    fits[fits] = ~cuts[to[fits]]
    shifted = np.tile(cuts, (int(fits.sum()), 1))
    shifted[np.arange(len(shifted)), moved[fits]] = False
    shifted[np.arange(len(shifted)), to[fits]] = True
    return np.concatenate([flipped, shifted])


def _mean_ns(cuts: BoolArray, work: ComputeTimes, costs: Costs) -> Float64Array:
    mean: Float64Array = replay(build_table_from_cuts(cuts, work.gradients), work, costs).cycle_ns.mean(axis=1)
    return mean
