"""The time of a step: a program run again with the times of a recording.

A collective begins when the last rank of its group has arrived and the one before it in the group is over. Over gloo a
rank stands still from the launch of a collective to its end, unless it was launched asynchronously: then only from
where it is waited for. On a device, gathers and reductions are queued on streams while the module computes. A gather
may begin once the module has got to the unit before the last one that was waited for, a reduction once the backward of
its unit is over, and the backward of a unit is followed by the wait for the reduction before its own. The host is taken
to be ahead of the device.

On hosts, what runs at the same time slows each other down (``Contention``). A recording in which ranks wait for each
collective where they launch it doesn't show by how much, so it is assumed.

Example, over gloo: ranks that have computed for 10 and 30 ns gather for 20 ns, and then compute for 40 ns. Both end at
90 ns. If they don't wait for the gather until that compute is over, they end at 50 and 70 ns, as the gather ends at 50.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np

from overlapscope.sharded_model.model import Settings, Unit
from overlapscope.sharded_model.program import Op
from overlapscope.sharded_model.times import Float64Array, ShardedTimes


class Contention(NamedTuple):
    """How much collectives and compute slow each other down while they run at the same time on a host."""

    compute_slowdown: float = 1.0
    """Factor by which compute and a collective take longer while both run."""
    lanes: int = 1
    """Number of collectives that run at a time: 1 or 2."""
    lane_slowdown: float = 1.0
    """Factor by which each of two collectives takes longer while both run."""


NO_CONTENTION: Final = Contention()


def simulate(
    times: ShardedTimes, program: Sequence[Op], settings: Settings, contention: Contention = NO_CONTENTION
) -> Float64Array:
    """Return the time of each step, the mean over ranks, in nanoseconds (S,).

    Args:
        contention: That of hosts; a device's streams are taken to have none.
    """
    run = _Run(times, contention) if times.blocks_host else _StreamRun(times)
    for op in program:
        run.perform(op, is_async=settings.is_async)
    return run.finish()


class _Run:
    """Ranks whose host waits for what it launches."""

    def __init__(self, times: ShardedTimes, contention: Contention = NO_CONTENTION) -> None:
        self.times = times
        self.contention = contention
        self.now_ns = times.start_ns + times.before_ns
        """(S, R) Until when each rank is busy."""
        self.lanes_ns = [np.zeros_like(self.now_ns) for _ in range(contention.lanes)]
        """(S, R) When each lane is free, the first one first."""
        self.done_ns: dict[Unit, Float64Array] = {}
        """(S, R) When the gathers under way end."""

    def perform(self, op: Op, *, is_async: bool) -> None:
        """Perform one thing."""
        times = self.times
        if op.kind == "compute":
            segments_ns = times.forward_ns if op.during == "forward" else times.backward_ns
            self.compute(segments_ns[:, :, op.segment])
        elif op.kind == "gather":
            self.gather(op, is_async=is_async)
        elif op.kind == "wait":
            self.wait(op)
        elif op.kind == "reduce":
            self.reduce(op)

    def compute(self, taken_ns: Float64Array) -> None:
        busy_ns = np.maximum(self.lanes_ns[-1] - self.now_ns, 0)
        delay_ns = (self.contention.compute_slowdown - 1) * np.minimum(busy_ns, taken_ns)
        self.delay_after(self.now_ns, delay_ns)
        self.now_ns = self.now_ns + taken_ns + delay_ns

    def gather(self, op: Op, *, is_async: bool) -> None:
        gathers = self.times.gathers[op.during]
        end_ns = self.transfer(self.now_ns, gathers.transfer_of(op.unit), self.times.shard_groups)
        self.done_ns[op.unit] = end_ns
        if not is_async:
            self.now_ns = end_ns

    def wait(self, op: Op) -> None:
        overhead_ns = self.times.gathers[op.during].overhead_of(op.unit)
        self.now_ns = np.maximum(self.now_ns, self.done_ns.pop(op.unit)) + overhead_ns

    def reduce(self, op: Op) -> None:
        self.now_ns = self.reduced_from(self.now_ns, op.unit) + self.times.reduces.overhead_of(op.unit)

    def reduced_from(self, arrival_ns: Float64Array, unit: Unit) -> Float64Array:
        """Return when the gradients of a unit are reduced, of shards and then of replicas."""
        times = self.times
        is_sharded = any(len(group) > 1 for group in times.shard_groups)
        groups = times.shard_groups if is_sharded else times.replica_groups
        end_ns = self.transfer(arrival_ns, times.reduces.transfer_of(unit), groups)
        if times.replica_reduces is not None:
            end_ns = self.transfer(end_ns, times.replica_reduces.transfer_of(unit), times.replica_groups)
        return end_ns

    def transfer(
        self, arrival_ns: Float64Array, transfer_ns: Float64Array | float, groups: Sequence[Sequence[int]]
    ) -> Float64Array:
        """Return when a collective ends on each rank (S, R), and keep a lane busy until then."""
        ready_ns = np.maximum(arrival_ns, self.lanes_ns[0])
        begin_ns = np.empty_like(ready_ns)
        for group in groups:
            ranks = list(group)
            begin_ns[:, ranks] = ready_ns[:, ranks].max(axis=1, keepdims=True)
        delay_ns = (self.contention.lane_slowdown - 1) * np.clip(self.lanes_ns[-1] - begin_ns, 0, transfer_ns)
        self.delay_after(begin_ns, delay_ns)
        end_ns = begin_ns + transfer_ns + delay_ns
        last_ns = self.lanes_ns[-1]
        self.lanes_ns = [np.minimum(last_ns, end_ns), np.maximum(last_ns, end_ns)][-len(self.lanes_ns) :]
        return end_ns

    def delay_after(self, begin_ns: Float64Array, delay_ns: Float64Array) -> None:
        """Delay what is still under way at a time."""
        for done_ns in (*self.lanes_ns, *self.done_ns.values()):
            done_ns += np.where(done_ns > begin_ns, delay_ns, 0)

    def finish(self) -> Float64Array:
        step_ns: Float64Array = (self.now_ns + self.times.after_ns - self.times.start_ns).mean(axis=1)
        return step_ns


class _StreamRun(_Run):
    """Ranks whose device has a stream for the module, and others for collectives."""

    def __init__(self, times: ShardedTimes) -> None:
        super().__init__(times)
        self.allowed_ns = self.now_ns
        """(S, R) From when on gathers may begin."""
        self.reached_ns = self.now_ns
        """(S, R) When the module got to the unit that was last waited for."""
        self.last_reduced_ns: Float64Array | None = None

    def gather(self, op: Op, *, is_async: bool) -> None:  # noqa: ARG002
        transfer_ns = self.times.gathers[op.during].transfer_of(op.unit)
        self.done_ns[op.unit] = self.transfer(self.allowed_ns, transfer_ns, self.times.shard_groups)

    def wait(self, op: Op) -> None:
        super().wait(op)
        self.allowed_ns = self.reached_ns if op.during == "forward" else self.now_ns
        self.reached_ns = self.now_ns

    def reduce(self, op: Op) -> None:
        if self.last_reduced_ns is not None:
            self.now_ns = np.maximum(self.now_ns, self.last_reduced_ns)
        self.last_reduced_ns = self.reduced_from(self.now_ns, op.unit)

    def finish(self) -> Float64Array:
        if self.last_reduced_ns is not None:
            self.now_ns = np.maximum(self.now_ns, self.last_reduced_ns)
        return super().finish()
