"""Replay of a step with other buckets.

While an all-reduce is in flight, compute runs at 1/s of its rate (``compute_slowdown``), and while the last rank still
computes, an all-reduce progresses at 1/c (``communication_slowdown``). So time is counted in *compute time*:
nanoseconds that backward would have taken without traffic. In compute time a rank's gradients become ready at fixed
moments whatever the network does, a transfer of T takes T c/s, and only the last rank to launch a bucket matters; the
result is then stretched back to wall time. That makes a replay exact with a few array operations and no simulation.
Example: with s = 1.25 and c = 1, a transfer of 100 ns takes 80 ns of compute time, and 80 x 1.25 = 100 ns of wall time.

A replay begins when a rank has the averaged gradients of the previous step (time 0), and ends when it has the next
ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from overlapscope.bucket_model.cost import ZERO_COST, CollectiveCost, CostLine
from overlapscope.bucket_model.partition import Buckets, Float64Array, Int64Array, PlanTable, build_table
from overlapscope.bucket_model.work import ComputeTimes

# All-reduces launched one after the other on a shared link, with one or two lanes.
#
# NCCL runs the all-reduces of a communicator one at a time. Gloo runs two at a time, and they share the bandwidth
# like TCP streams: two large ones that begin together also end together, and a small one overtakes a large one. Each
# waits for its latency separately, so the second lane hides it. Their mutual slowdown is between 1 and 2: 2 where one
# alone saturates the link, less where it can't, as with a long round trip that limits the bytes in flight.


def schedule_one_lane(ready: Float64Array, transfer: Float64Array) -> tuple[Float64Array, Float64Array]:
    """Compute when all-reduces begin and end that run one at a time.

    Example: ready at 0, 1, 10 and transfers of 4, 3, 2 give begins 0, 4, 10 and ends 4, 7, 12.

    Args:
        ready: (B, ...) time at which the last rank launches each; never decreasing along the first axis.
        transfer: (B, ...) duration of each alone; broadcasts to the shape of ``ready``.
    """
    sent = np.cumsum(transfer, axis=0)
    end = np.maximum.accumulate(ready - (sent - transfer), axis=0) + sent
    return end - transfer, end


def schedule_two_lanes(
    ready: Float64Array, transfer: Float64Array, latency: Float64Array, slowdown: float
) -> tuple[Float64Array, Float64Array]:
    """Compute when all-reduces begin and end of which two run at a time.

    At any moment one is running that began before the latest one: the *older*. The first of the two to end frees its
    lane for the next.

    Example: all ready at 0, transfers of 4, 2, 1 without latency and a slowdown of 2. The first two share the link
    until 4, when the second ends and the third begins; the third and the rest of the first share it until 6, and the
    first ends at 7. Begins are 0, 0, 4 and ends 7, 4, 6.

    Args:
        ready: (B, ...) time at which the last rank launches each; never decreasing along the first axis.
        transfer: (B, ...) duration of each alone; broadcasts to the shape of ``ready``.
        latency: (B, ...) part of ``transfer``, at its beginning, during which the link is free for others.
        slowdown: Factor for each of two that are both past their latency.
    """
    shape = ready.shape[1:]
    begin, end = np.empty(ready.shape), np.empty(ready.shape)
    older: Int64Array = np.zeros(shape, dtype=np.int64)
    older_sends = np.full(shape, -np.inf)  # when its latency is over
    first_end, last_end = np.full(shape, -np.inf), np.full(shape, -np.inf)  # of the two that are running
    for number in range(len(ready)):
        begin[number] = now = np.maximum(ready[number], first_end)
        is_under_way = last_end > now
        older_sends = np.where(is_under_way, np.maximum(older_sends, now), now)
        older_left = np.where(is_under_way, last_end - older_sends, 0.0)
        sends = now + latency[number]
        older_end, newer_end = _shared_ends(
            older_sends, older_left, sends, transfer[number] - latency[number], slowdown
        )
        if number:
            np.put_along_axis(end, older[None], np.where(is_under_way, older_end, last_end)[None], axis=0)
        end[number] = newer_end
        first_end, last_end = np.minimum(older_end, newer_end), np.maximum(older_end, newer_end)
        is_overtaken = older_end > newer_end
        older = np.where(is_overtaken, older, number)
        older_sends = np.where(is_overtaken, older_sends, sends)
    return begin, end


def _shared_ends(
    one_sends: Float64Array,
    one_left: Float64Array,
    other_sends: Float64Array,
    other_left: Float64Array,
    slowdown: float,
) -> tuple[Float64Array, Float64Array]:
    """Compute when two all-reduces end that share the link once both are sending, if no other begins."""
    is_first = one_sends <= other_sends
    early, late = np.minimum(one_sends, other_sends), np.maximum(one_sends, other_sends)
    early_left, late_left = np.where(is_first, one_left, other_left), np.where(is_first, other_left, one_left)
    shared = np.maximum(early_left - (late - early), 0.0)  # what the early one has left when the late one sends
    lost = (slowdown - 1) * np.minimum(shared, late_left)
    early_end = np.where(shared > 0, late + shared + lost, early + early_left)
    late_end = late + late_left + lost
    return np.where(is_first, early_end, late_end), np.where(is_first, late_end, early_end)


_PLANS_AT_ONCE: Final = 32
"""Plans per batch, such that the arrays fit into the processor's caches."""


@dataclass(frozen=True, kw_only=True)
class Costs:
    """Costs of a step besides the work of its ranks."""

    collective: CollectiveCost
    copy_in: CostLine = ZERO_COST
    """Copy into a bucket, before it is launched."""
    copy_out: CostLine = ZERO_COST
    """Copy of a bucket back to the gradients."""
    compute_slowdown: float = 1.0
    communication_slowdown: float = 1.0
    lanes: int = 1
    """Number of all-reduces that run at a time: 1 with NCCL, 2 with gloo."""
    lane_slowdown: float = 2.0
    """Factor l: two concurrent all-reduces each progress at 1/l of the rate of one alone."""


@dataclass(frozen=True, eq=False, kw_only=True)
class ReplayResult:
    """Replayed times of Q plans in S recorded cycles."""

    cycle_ns: Float64Array
    """(Q, S) step time."""
    backward_end_ns: Float64Array
    """(Q, S) end of backward on the last rank."""
    exposed_ns: Float64Array
    """(Q, S) time from there to the end of the last all-reduce."""

    @property
    def typical_ns(self) -> Float64Array:
        """Return (Q,) the median step times of the cycles."""
        return np.median(self.cycle_ns, axis=1)


@dataclass(frozen=True, eq=False, kw_only=True)
class DrawnStep:
    """One step of R ranks with B buckets; times are relative to the end of the previous step's averaging."""

    plan: Buckets
    ranks: Int64Array
    """(R,) rank numbers."""
    bytes: Int64Array
    """(B,) bytes of each bucket."""
    backward_start_ns: Float64Array
    """(R,) start of backward."""
    backward_end_ns: Float64Array
    """(R,) end of backward."""
    ready_ns: Float64Array
    """(R, B) time at which a bucket's last gradient is ready."""
    launch_ns: Float64Array
    """(R, B) launch of each bucket."""
    start_ns: Float64Array
    """(R, B) start of each transfer, once all ranks have launched it and a lane is free."""
    end_ns: Float64Array
    """(R, B) end of each all-reduce."""
    cycle_ns: float

    @property
    def exposed_ns(self) -> Float64Array:
        """Return (R,) the time from the end of backward to the end of the last all-reduce."""
        return np.maximum(self.end_ns.max(axis=1) - self.backward_end_ns, 0.0)


def replay(plans: PlanTable | Sequence[Buckets], work: ComputeTimes, costs: Costs) -> ReplayResult:
    """Replay plans in every recorded cycle.

    Args:
        plans: Q plans.
        work: Work of the S cycles.
    """
    table = plans if isinstance(plans, PlanTable) else build_table(plans, work.gradients)
    shape = len(table), len(work.end_ns)
    replayed = ReplayResult(cycle_ns=np.empty(shape), backward_end_ns=np.empty(shape), exposed_ns=np.empty(shape))
    by_width = np.argsort(table.is_bucket.sum(axis=1), kind="stable")
    for begin in range(0, len(by_width), _PLANS_AT_ONCE):
        rows = by_width[begin : begin + _PLANS_AT_ONCE]
        run = _Replay(table.select(rows), work.last_ready_ns, work.last_end_ns, costs)
        replayed.backward_end_ns[rows] = run.backward_end_ns
        replayed.exposed_ns[rows] = run.exposed_ns
        replayed.cycle_ns[rows] = run.cycle_ns
    return replayed


def replay_step(plan: Buckets, work: ComputeTimes, costs: Costs) -> DrawnStep:
    """Replay one plan in the first cycle of ``work``, with all intermediate times."""
    table = build_table([plan], work.gradients)
    run = _Replay(table, work.last_ready_ns[:1], work.last_end_ns[:1], costs)
    copied = run.copied[:, 0]
    ready_ns = work.ready_ns[0][:, table.last[0]]
    return DrawnStep(
        plan=plan,
        ranks=work.ranks,
        bytes=table.bytes[0],
        backward_start_ns=run.wall_ns(work.start_ns[0]),
        backward_end_ns=run.wall_ns(work.end_ns[0] + copied[-1]),
        ready_ns=run.wall_ns(ready_ns + np.concatenate([[0.0], copied[:-1]])),
        launch_ns=run.wall_ns(ready_ns + copied),
        start_ns=np.broadcast_to(run.wall_ns(run.begin[:, 0, 0]), ready_ns.shape),
        end_ns=np.broadcast_to(run.wall_ns(run.end[:, 0, 0]), ready_ns.shape),
        cycle_ns=float(run.cycle_ns[0, 0]),
    )


class _Replay:
    """Replay of some plans in all cycles: arrays of buckets × plans × cycles (B, Q, S), mostly in compute time."""

    def __init__(self, table: PlanTable, last_ready_ns: Float64Array, last_end_ns: Float64Array, costs: Costs) -> None:
        relative_slowdown = costs.communication_slowdown / costs.compute_slowdown
        self._wall_per_compute_after_backward = 1 / relative_slowdown
        self._extra_wall_per_busy = costs.compute_slowdown - 1
        is_bucket, bytes_ = table.is_bucket.T, table.bytes.T
        transfer = np.where(is_bucket, costs.collective.time_ns(bytes_), 0.0) * relative_slowdown
        latency = np.minimum(costs.collective.alpha_ns * relative_slowdown, transfer)
        copy_in = np.where(is_bucket, costs.copy_in.time_ns(bytes_), 0.0)
        copy_out = np.where(is_bucket, costs.copy_out.time_ns(bytes_), 0.0)
        self.copied = np.cumsum(copy_in, axis=0)
        """(B, Q) time of all copies in up to each bucket."""
        launch = last_ready_ns.T[table.last.T] + self.copied[:, :, None]
        # Plans of fewer buckets are padded with empty ones, which come last.
        np.maximum.accumulate(launch, axis=0, out=launch)
        self.begin, self.end = (
            schedule_two_lanes(launch, transfer[:, :, None], latency[:, :, None], costs.lane_slowdown)
            if costs.lanes > 1
            else schedule_one_lane(launch, transfer[:, :, None])
        )
        self._all_ended = np.maximum.accumulate(self.end, axis=0)
        before = np.concatenate([np.zeros_like(self.end[:1]), self._all_ended[:-1]])
        self._flight_begin = np.maximum(self.begin, before)
        """Start of each interval in which something is in flight, without overlaps; it ends when all so far have
        ended."""
        self._computed = last_end_ns + self.copied[-1][:, None]
        self.backward_end_ns = self._computed + self._extra_wall_per_busy * self._busy_until(self._computed)
        """(Q, S) end of backward, in wall time, like the times that follow."""
        late = np.maximum(self._all_ended - self._computed, 0.0) * self._wall_per_compute_after_backward
        self.exposed_ns = late[-1]
        still_to_copy = np.cumsum(copy_out[::-1], axis=0)[::-1]
        self.cycle_ns = self.backward_end_ns + (late + still_to_copy[:, :, None]).max(axis=0)

    def _busy_until(self, moment: Float64Array) -> Float64Array:
        """Compute (Q, S) for how long something is in flight before a moment."""
        flights = np.minimum(self._all_ended, moment) - self._flight_begin
        total: Float64Array = np.maximum(flights, 0.0).sum(axis=0)
        return total

    def wall_ns(self, moments: Float64Array) -> Float64Array:
        """Convert moments of a single plan and cycle, an array of any shape, to wall time."""
        edges = np.stack([self._flight_begin[:, 0, 0], self._all_ended[:, 0, 0]], axis=1)
        flown = np.cumsum(edges[:, 1] - edges[:, 0])
        busy = np.interp(moments, edges.ravel(), np.stack([np.concatenate([[0.0], flown[:-1]]), flown], axis=1).ravel())
        computed = self._computed[0, 0]
        return np.where(
            moments <= computed,
            moments + self._extra_wall_per_busy * busy,
            self.backward_end_ns[0, 0] + (moments - computed) * self._wall_per_compute_after_backward,
        )
