"""Cycles of a recording: what each rank does between the last all-reduces of two consecutive steps.

The last all-reduce of a step releases all ranks at about the same time. What each then does until it arrives at the
last all-reduce of the next step is its *local time*: copies back, optimizer, data, forward, backward. All-reduce makes
every rank equally late, so the step times of a straggler and of the ranks that wait for it are the same; local times
are not.

A cycle is identified by the step whose gradients it reduces; its optimizer phase is that of the step before. For cycles
of S steps, R ranks and K all-reduces a step, times are nanoseconds, and arrivals and ends count from ``begin_ns``.

Where parameters are sharded, ranks wait for each other at every gather and reduction, as often as units are exchanged;
where gradients are accumulated without ``no_sync()``, or several models are trained, in every backward of a step. Then
all of a step's collectives count as one (K = 1): a rank arrives when what it does between them, without its waits, is
over, and the transfer is the rest. A rank that is late in one of them can't hide behind another one that is late in
another, so the saving found for it is the least that it saves.

Example: the last all-reduce of step 6 ends at 100 ns on both of two ranks, and that of step 7 at 250 ns. Rank 0 arrives
at the latter at 180 ns and rank 1 at 220 ns. Cycle 7 begins at 100 ns and lasts 150 ns on both ranks, the local times
are 80 and 120 ns, rank 1 is late by 40 ns, and the transfer takes 30 ns.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import numpy.typing as npt

from overlapscope.breakdown.arrivals import MatchedCollectives
from overlapscope.breakdown.breakdown import BLOCKS, Breakdown
from overlapscope.breakdown.spans import Int64Array, Rows, RowsByRank
from overlapscope.trace.recording import Trace
from overlapscope.trace.schema import OPS, count_lanes

CAUSES: Final = (
    "release_skew",
    "bucket_copies",
    "optimizer",
    "data_wait",
    "host_loop",
    "evaluation",
    "forward",
    "inter_phase",
    "backward",
    "collectives",
    "gc",
)
"""Causes that local time is divided into, in the order of a cycle. ``release_skew``: the rank was released later than
the others, because the previous step's communication ended later for it. ``bucket_copies``: averages out of buckets.
The others are blocks of the breakdown; ``inter_phase`` also holds what is in none of them."""

CAUSE_GROUPS: Final = {
    "compute": ("bucket_copies", "optimizer", "forward", "inter_phase", "backward"),
    "data_wait": ("data_wait",),
    "host_loop": ("host_loop",),
    "evaluation": ("evaluation",),
    "gc": ("gc",),
    "release_skew": ("release_skew",),
    "collectives": ("collectives",),
}
"""Causes that belong together: a slow processor shows in all phases that compute, and none of them alone is as reliable
a sign."""

StepKind = tuple[tuple[int, int], ...]
"""What a step reduces: bucket and bytes of each of its all-reduces, in order."""

BLAMABLE_GROUPS: Final = ("compute", "data_wait", "host_loop", "evaluation", "gc", "release_skew")
"""Groups that a rank can be blamed for. In a collective issued by user code it waits for others."""

_BLOCK_CAUSES: Final = [index for index, name in enumerate(CAUSES) if name in BLOCKS and name != "inter_phase"]
"""Indices in ``CAUSES`` of the causes that are blocks."""
_BLOCKS: Final = [BLOCKS.index(CAUSES[index]) for index in _BLOCK_CAUSES]
"""Indices in ``BLOCKS`` of the same."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Cycles:
    """The cycles of a recording. All ranks have the same K all-reduces in each step; other steps are left out."""

    ranks: Int64Array
    """(R,) Ranks, ascending."""
    steps: Int64Array
    """(S,) Step numbers, ascending."""
    missing_ranks: int
    """Number of ranks of the job that left no log or have an unknown clock. Time spent waiting for them looks like
    transfer."""
    left_out: int
    """Number of steps without a cycle: the first ones, those whose all-reduces differ, and those that follow these."""
    buckets: Int64Array
    """(K,) Bucket of each all-reduce; -1 for one that belongs to none."""
    bytes: Int64Array
    """(K,) Size of each all-reduce in bytes."""
    begin_ns: Int64Array
    """(S,) When the median rank was released by the previous step, on the common clock."""
    local_ns: Int64Array
    """(C, S, R) Local time by cause; ``release_skew`` may be negative."""
    lead_ns: Int64Array
    """(S, R, K) How long before its last arrival of the cycle a rank arrives at each all-reduce."""
    arrival_ns: Int64Array
    """(S, R, K) When each rank arrives at each all-reduce."""
    end_ns: Int64Array
    """(S, K) End of each all-reduce on the median rank; never earlier than that of the all-reduce before."""
    broadcast_ns: Int64Array
    """(S, R) Time that the broadcast of buffers takes once rank and root have arrived; 0 in steps without one."""
    clock_error_ns: float
    """Maximum error of a time difference between two ranks."""
    has_inner_waits: bool = False
    """True if ranks wait for each other several times in a step: one all-reduce stands for all collectives."""
    is_serial: bool = False
    """True if each all-reduce that is queued begins when the one before it ends."""

    def of(self, which: npt.NDArray[np.bool_]) -> Cycles:
        """Return the cycles that a mask (S,) selects."""
        return replace(
            self,
            steps=self.steps[which],
            begin_ns=self.begin_ns[which],
            local_ns=self.local_ns[:, which],
            lead_ns=self.lead_ns[which],
            arrival_ns=self.arrival_ns[which],
            end_ns=self.end_ns[which],
            broadcast_ns=self.broadcast_ns[which],
        )

    @property
    def lateness_ns(self) -> Int64Array:
        """Return how long after the median rank each arrives at the last all-reduce (S, R); negative if before it."""
        last_ns = self.arrival_ns[:, :, -1]
        return last_ns - lower_median(last_ns, axis=1)[:, None]

    def lateness_of(self, step: int) -> dict[int, int]:
        """Return the lateness in one step by rank; empty if it has no cycle."""
        index = np.flatnonzero(self.steps == step)
        return dict(zip(self.ranks.tolist(), self.lateness_ns[index[0]].tolist(), strict=True)) if len(index) else {}

    @property
    def transfer_ns(self) -> Int64Array:
        """Return the time of each all-reduce after all ranks have arrived and the previous one is over (S, K)."""
        return self.end_ns - np.maximum(self.arrival_ns.max(axis=1), previous_ends(self.end_ns))


def build_cycles(
    trace: Trace, breakdown: Breakdown, first_step: int = 0, usual: StepKind | None = None
) -> Cycles | None:
    """Arrange a recording in cycles.

    Args:
        breakdown: Breakdown of the recording.
        first_step: Earlier steps are left out as warm-up.
        usual: What the steps of a cycle reduce, from ``find_most_common_kind``. Needed if this is only a part of a
        recording.

    Returns:
        None if there are fewer than two ranks on one clock, or no two consecutive steps with the same all-reduces.
    """
    if len(trace.aligned_ranks) < 2:
        return None
    matched = breakdown.matched
    ranks = matched.ranks
    reduced, broadcast = _select_awaited(matched), matched.of(matched.op == OPS.index("broadcast"))
    kinds = _group_by_kind(reduced)
    usual = find_most_common_kind({kind: len(steps) for kind, steps in kinds.items()}) if usual is None else usual
    has_inner_waits = bool((reduced.op != OPS.index("all_reduce")).any()) or _repeats_buckets(usual)
    steps = kinds.get(usual, np.zeros(0, dtype=np.int64))
    steps = steps[np.isin(steps - 1, reduced.step) & (steps > first_step)]
    if len(ranks) < 2 or not len(steps):
        return None
    latest = reduced.of(np.isin(reduced.step, steps))
    shape = (len(steps), latest.arrival_ns.size // (len(steps) * len(ranks)), len(ranks))
    arrival_ns = latest.arrival_ns.reshape(shape).transpose(0, 2, 1)
    end_ns = latest.end_ns.reshape(shape)
    released_ns = _find_release_ns(reduced, steps - 1)
    begin_ns = lower_median(released_ns, axis=1)
    last_arrival_ns = arrival_ns[:, :, -1]

    local_ns = np.zeros((len(CAUSES), len(steps), len(ranks)), dtype=np.int64)
    local_ns[CAUSES.index("release_skew")] = released_ns - begin_ns[:, None]
    exposed_ns = np.zeros((len(steps), len(ranks)), dtype=np.int64)
    steps_of = RowsByRank(breakdown.rank)
    for index, rank in enumerate(ranks.tolist()):
        timeline, from_ns, until_ns = breakdown.timelines[rank], released_ns[:, index], last_arrival_ns[:, index]
        step_begin_ns = np.clip(_step_begins(breakdown, steps_of[rank], steps), from_ns, until_ns)
        both_ns = timeline.within(np.concatenate([from_ns, step_begin_ns]), np.tile(until_ns, 2))
        since_release_ns, since_begin_ns = np.split(both_ns, 2)
        local_ns[_BLOCK_CAUSES, :, index] = since_release_ns[:, _BLOCKS].T
        if has_inner_waits:
            exposed_ns[:, index] = since_release_ns[:, BLOCKS.index("exposed")]
        # Copies into buckets count as backward here: that is when they happen.
        copied_in_ns = since_begin_ns[:, BLOCKS.index("bucket_copies")]
        local_ns[CAUSES.index("bucket_copies"), :, index] -= copied_in_ns
        local_ns[CAUSES.index("backward"), :, index] += copied_in_ns
    blocked_ns, broadcast_ns = _broadcasts(broadcast, steps, len(ranks))
    blocked_ns += exposed_ns
    local_ns[CAUSES.index("inter_phase")] += last_arrival_ns - begin_ns[:, None] - blocked_ns - local_ns.sum(axis=0)
    if has_inner_waits:
        last = latest.bucket[shape[1] - 1 : shape[1]], latest.bytes[: shape[1]].sum(keepdims=True)
        arrival_ns, end_ns = (last_arrival_ns - exposed_ns)[:, :, None], end_ns[:, -1:]
        last_arrival_ns = arrival_ns[:, :, -1]
    else:
        last = latest.bucket[: shape[1]], latest.bytes[: shape[1]]
    finished_ns = np.maximum.accumulate(lower_median(end_ns, axis=2), axis=1) - begin_ns[:, None]
    return Cycles(
        ranks=ranks,
        steps=steps,
        missing_ranks=max(0, len(trace.expected_ranks) - len(ranks)),
        left_out=max(0, trace.steps["step"].nunique() - len(steps)),
        buckets=last[0],
        bytes=last[1],
        begin_ns=begin_ns,
        local_ns=local_ns,
        lead_ns=last_arrival_ns[:, :, None] - arrival_ns,
        arrival_ns=arrival_ns - begin_ns[:, None, None],
        end_ns=finished_ns,
        broadcast_ns=broadcast_ns,
        clock_error_ns=matched.clock_error_ns,
        has_inner_waits=has_inner_waits,
        is_serial=_is_serial(trace, reduced),
    )


def _is_serial(trace: Trace, reduced: MatchedCollectives) -> bool:
    """Return whether all-reduces run one by one, and when each ends is known.

    So NCCL runs those of one process group. Those of several run beside each other, as do the messages of a strategy.
    """
    backend = str(trace.run.get("backend") or "")
    if not backend or count_lanes(backend) != 1 or trace.run.get("ends_are_bounds") or len(trace.segments):
        return False
    return not len(reduced.rows) or not np.ptp(trace.collectives["group"].to_numpy()[reduced.rows])


def _select_awaited(matched: MatchedCollectives) -> MatchedCollectives:
    """Return the all-reduces or, if parameters are sharded, all collectives of buckets."""
    is_all_reduce = matched.op == OPS.index("all_reduce")
    is_shard = np.isin(matched.op, [OPS.index("reduce_scatter"), OPS.index("all_gather")]) & (matched.bucket >= 0)
    return matched.of(is_all_reduce | is_shard)


def _repeats_buckets(kind: StepKind) -> bool:
    """Return whether a step reduces several times: in each backward, as without ``no_sync()``, or several models.

    Each model has a bucket 0.
    """
    buckets = [bucket for bucket, _ in kind if bucket >= 0]
    return len(set(buckets)) < len(buckets)


def get_cause_indices(group: str) -> list[int]:
    """Return the indices in ``CAUSES`` of the causes of a group."""
    return [CAUSES.index(name) for name in CAUSE_GROUPS[group]]


def find_median_ranks(local_ns: Int64Array, group: str) -> Int64Array:
    """Return the index of the median rank of each cycle (S,) by the time (C, S, R) that ranks take for a group.

    Of an even number of ranks it is the lower of the two in the middle, of two ranks the faster one: a time that one of
    them really took. It is one rank for all causes of the group; the median of each cause separately would be faster
    than any rank.
    """
    total_ns = local_ns[get_cause_indices(group)].sum(axis=0)
    middle = (total_ns.shape[1] - 1) // 2
    return np.argpartition(total_ns, middle, axis=1)[:, middle]


def lower_median(values: Int64Array, axis: int) -> Int64Array:
    """Return the lower median: one of the values even if their number is even; of two, the smaller.

    Example: 20 for the values 40, 10, 20, 30.
    """
    middle = (values.shape[axis] - 1) // 2
    return np.take(np.partition(values, middle, axis=axis), middle, axis=axis)


def previous_ends(end_ns: Int64Array) -> Int64Array:
    """Return the end of the previous all-reduce (S, K); that of the previous step is time 0.

    Example: ends [[30, 50]] give [[0, 30]].
    """
    return np.concatenate([np.zeros_like(end_ns[:, :1]), end_ns[:, :-1]], axis=1)


def _step_begins(breakdown: Breakdown, own: Rows, steps: Int64Array) -> Int64Array:
    """Return when a rank ended the step before each step (S,); 0 if it has not.

    Args:
        own: Rows of the rank in the breakdown.
    """
    index = np.searchsorted(breakdown.step[own], steps - 1)
    is_known = np.append(breakdown.step[own], -1)[index] == steps - 1
    return np.where(is_known, np.append(breakdown.end_ns[own], 0)[index], 0)


def group_steps_by_kind(breakdown: Breakdown) -> dict[StepKind, Int64Array]:
    """Return the steps of each kind, ascending."""
    return _group_by_kind(_select_awaited(breakdown.matched))


def find_most_common_kind(steps: Mapping[StepKind, int]) -> StepKind:
    """Return what most steps reduce; () if there are no steps.

    That is the most frequent number of all-reduces, and of the steps with that many the most frequent buckets and
    sizes.

    Args:
        steps: Number of steps of each kind.
    """
    by_count: dict[int, int] = {}
    for kind, number in steps.items():
        by_count[len(kind)] = by_count.get(len(kind), 0) + number
    count = min(by_count, key=lambda count: (-by_count[count], count), default=0)
    return min((kind for kind in steps if len(kind) == count), key=lambda kind: (-steps[kind], kind), default=())


def _group_by_kind(reduced: MatchedCollectives) -> dict[StepKind, Int64Array]:
    steps, first, counts = np.unique(reduced.step, return_index=True, return_counts=True)
    found: dict[StepKind, Int64Array] = {}
    for count in np.unique(counts).tolist():
        index = first[counts == count][:, None] + np.arange(count)
        contents, which = np.unique(
            np.concatenate([reduced.bucket[index], reduced.bytes[index]], axis=1), axis=0, return_inverse=True
        )
        for number, content in enumerate(contents.tolist()):
            kind = tuple(zip(content[:count], content[count:], strict=True))
            found[kind] = steps[counts == count][which.ravel() == number]
    return found


def _find_release_ns(reduced: MatchedCollectives, steps: Int64Array) -> Int64Array:
    """Return when the last all-reduce of each step ended on each rank (S, R)."""
    known, first = np.unique(reduced.step, return_index=True)
    return np.maximum.reduceat(reduced.end_ns, first, axis=0)[np.searchsorted(known, steps)]


def _broadcasts(broadcasts: MatchedCollectives, steps: Int64Array, ranks: int) -> tuple[Int64Array, Int64Array]:
    """Return how long the broadcasts of a cycle block each rank, and how much of that is transfer, not waiting (S, R).

    Buffers come from the lowest rank; a rank that arrives before it waits.
    """
    index = np.searchsorted(steps, broadcasts.step)
    blocked_ns, transfer_ns = np.zeros((2, len(steps), ranks), dtype=np.int64)
    known = np.isin(broadcasts.step, steps)
    arrival_ns, end_ns = broadcasts.arrival_ns[known], broadcasts.end_ns[known]
    both_ns = np.maximum(arrival_ns, arrival_ns[:, :1])
    np.add.at(blocked_ns, index[known], end_ns - arrival_ns)
    np.add.at(transfer_ns, index[known], np.maximum(end_ns - both_ns, 0))
    return blocked_ns, transfer_ns
