"""Search for the best bucket plan, which need not be one that a single size can express.

Where buckets are sent one after the other, the best plan up to a gradient extends the best plan up to an earlier one:
all that matters of the earlier buckets is when the link is free again. So dynamic programming over the last cut finds,
for each number of buckets, the plan that finishes first (compare "MG-WFBP: Efficient Data Communication for Distributed
Synchronous SGD Algorithms", Shi et al., INFOCOM 2019). What the dynamic program ignores (two lanes, several recorded
cycles, slowed-down compute) is handled by replaying its plans, and by moving cuts while that helps.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np

from overlapscope.model.coarse import coarse
from overlapscope.model.partition import ALONE, BoolArray, Buckets, Float64Array, Gradients
from overlapscope.model.plan import default_plan, uniform_plans
from overlapscope.model.plan_table import buckets_of_cuts, cuts_of, forced_cuts, table_of_cuts
from overlapscope.model.schedule import Costs, replay
from overlapscope.model.work import Work

_MOST_BUCKETS: Final = 96
"""Maximum number of buckets; more are never faster."""
_MOST_CYCLES: Final = 12
"""Maximum number of cycles used when moving cuts."""
_SHIFTS: Final = (-8, -4, -2, -1, 1, 2, 4, 8)
_SMALLEST_GAIN: Final = 1e-5
_WORTH_A_BUCKET: Final = 1e-4
"""Share of the step that a bucket must gain to be worthwhile: the recording can't resolve smaller gains."""
_ROUNDS: Final = 30
_UNIFORM_PLANS: Final = 100


def best_plan(work: Work, costs: Costs, also: Sequence[Buckets] = ()) -> Buckets:
    """Find the plan with the shortest mean step time, in the replay of all cycles.

    There it is at least as good as DDP's default and any cap, except that buckets which gain almost nothing are left
    out. Neighboring gradients of a model with very many are merged first (``coarse``).

    Args:
        also: Further plans that the result must not be worse than.
    """
    joined = coarse(work)
    if joined is None:
        return _best_plan(work, costs, also)
    plans = [*also, joined.expanded(_best_plan(joined.work, costs, ()))]
    return plans[int(np.argmin(replay(plans, work, costs).cycle_ns.mean(axis=1)))]


def _best_plan(work: Work, costs: Costs, also: Sequence[Buckets]) -> Buckets:
    gradients = work.gradients
    few = work.of_cycles(np.unique(np.linspace(0, len(work.end_ns) - 1, _MOST_CYCLES).round().astype(np.int64)))
    known = [default_plan(gradients).buckets, *also]
    known += [plan.buckets for plan in uniform_plans(gradients, at_most=_UNIFORM_PLANS)]
    candidates = [cuts for cuts in (cuts_of(plan, gradients) for plan in known) if cuts is not None]
    typical = work.typical()
    candidates += cuts_by_count(typical, costs)
    if costs.lanes > 1:
        candidates += cuts_by_count(typical, costs, is_latency_hidden=True)
    cuts = np.unique(np.array(candidates) | forced_cuts(gradients), axis=0)
    mean_ns = _mean_ns(cuts, few, costs)
    best = _improved(cuts[np.argmin(mean_ns)], few, costs)
    finalists = np.concatenate([best[None], cuts[np.argsort(mean_ns)[:8]]])
    return buckets_of_cuts(_simplified(finalists[np.argmin(_mean_ns(finalists, work, costs))], work, costs), gradients)


def cuts_by_count(work: Work, costs: Costs, *, is_latency_hidden: bool = False) -> list[BoolArray]:
    """Compute the cuts (P,) of the plan that finishes its communication first, for each number of buckets.

    Exact for one cycle, one lane and no slowdowns. A cut ends the buckets of all kinds.

    Args:
        work: Only its first cycle is used.
        is_latency_hidden: Count no latency, as if another lane always hid it.
    """
    gradients = work.gradients
    places = len(gradients.order)
    stretch = costs.communication_slowdown / costs.compute_slowdown
    transfer, copy_out = _segment_costs(gradients, costs, is_latency_hidden=is_latency_hidden)
    transfer *= stretch
    transfer[:, -1] += copy_out
    filled = np.cumsum(gradients.bytes[gradients.order])
    ready = work.last_ready_ns[0] + costs.copy_in.beta_ns * filled
    free = np.full(places, -np.inf)  # when the link is free, after buckets up to a position; none before the first
    from_start = transfer[0]
    cuts: list[BoolArray] = []
    came_from: list[np.ndarray] = []
    for count in range(1, min(places, _MOST_BUCKETS) + 1):
        launch = ready + count * costs.copy_in.alpha_ns
        if count == 1:
            free = launch + from_start
            came_from.append(np.full(places, -1))
        else:
            # buckets up to `row`, then one more up to `column`
            ends = np.maximum(free[:-1, None], launch) + transfer[1:]
            came_from.append(np.argmin(ends, axis=0))
            free = np.take_along_axis(ends, came_from[-1][None], axis=0)[0]
        if np.isfinite(free[-1]):
            cuts.append(_traced(came_from, gradients))
    return cuts


def _segment_costs(gradients: Gradients, costs: Costs, *, is_latency_hidden: bool) -> tuple[Float64Array, Float64Array]:
    """Compute the cost of sending all gradients from one position to another (P, P), and of the last copies out (P,).

    Example: with three gradients of one kind and 4, 2 and 6 bytes, element (0, 1) of the first array is the cost of an
    all-reduce of 6 bytes, and element 1 of the second that of copying 2 + 6 = 8 bytes.
    """
    places = len(gradients.order)
    kinds, sizes = gradients.kinds[gradients.order], gradients.bytes[gradients.order]
    latency = costs.collective.alpha_ns if is_latency_hidden else 0.0
    transfer, copy_out = np.zeros((places, places)), np.zeros(places)
    first, last = np.triu_indices(places)
    for kind in np.unique(kinds):
        of_kind = kinds == kind
        if kind == ALONE:
            each = np.where(of_kind, np.maximum(costs.collective.time_ns(sizes) - latency, 0.0), 0.0)
            before = np.concatenate([[0.0], np.cumsum(each)])
            transfer[first, last] += before[last + 1] - before[first]
            continue
        filled = np.concatenate([[0], np.cumsum(np.where(of_kind, sizes, 0))])
        bytes_ = filled[last + 1] - filled[first]
        time_ns = np.maximum(costs.collective.time_ns(bytes_) - latency, 0.0)
        transfer[first, last] += np.where(bytes_ > 0, time_ns, 0.0)
        copy_out += costs.copy_out.time_ns(filled[-1] - filled[:-1])
    transfer[np.tril_indices(places, -1)] = np.inf
    return transfer, copy_out


def _traced(came_from: list[np.ndarray], gradients: Gradients) -> BoolArray:
    """Reconstruct the cuts of the plan that ends at the last position, from where each bucket began."""
    kinds = gradients.kinds[gradients.order]
    cuts = np.zeros(len(kinds), dtype=bool)
    place = len(kinds) - 1
    for previous in reversed(came_from):
        begin = int(previous[place])
        segment = np.arange(begin + 1, place + 1)
        for kind in np.unique(kinds[segment]):
            cuts[segment[kinds[segment] == kind][-1]] = True
        place = begin
    return cuts


def _improved(cuts: BoolArray, work: Work, costs: Costs) -> BoolArray:
    """Move, remove and add cuts, one at a time, as long as that shortens the mean step."""
    best_ns = float(_mean_ns(cuts[None], work, costs)[0])
    for _ in range(_ROUNDS):
        neighbours = _neighbours(cuts, forced_cuts(work.gradients))
        if not len(neighbours):
            break
        mean_ns = _mean_ns(neighbours, work, costs)
        if mean_ns.min() >= best_ns * (1 - _SMALLEST_GAIN):
            break
        cuts, best_ns = neighbours[np.argmin(mean_ns)], float(mean_ns.min())
    return cuts


def _simplified(cuts: BoolArray, work: Work, costs: Costs) -> BoolArray:
    """Remove the cuts that gain almost nothing, the least useful first."""
    forced = forced_cuts(work.gradients)
    allowed_ns = float(_mean_ns(cuts[None], work, costs)[0])
    while (free := np.flatnonzero(cuts & ~forced)).size:
        simpler = np.tile(cuts, (len(free), 1))
        simpler[np.arange(len(free)), free] = False
        mean_ns = _mean_ns(simpler, work, costs)
        allowed_ns *= 1 + _WORTH_A_BUCKET
        if mean_ns.min() > allowed_ns:
            break
        cuts = simpler[np.argmin(mean_ns)]
    return cuts


def _neighbours(cuts: BoolArray, forced: BoolArray) -> BoolArray:
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


def _mean_ns(cuts: BoolArray, work: Work, costs: Costs) -> Float64Array:
    mean: Float64Array = replay(table_of_cuts(cuts, work.gradients), work, costs).cycle_ns.mean(axis=1)
    return mean
