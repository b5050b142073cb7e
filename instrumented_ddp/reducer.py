"""Gradient hooks -> bucket ready -> launch -> finalise: Algorithm 1 of the DDP paper, and the hot path.

(Li et al., "PyTorch Distributed: Experiences on Accelerating Data Parallel Training", VLDB 2020, section 3.3.)

Every parameter has a hook that autograd calls when its gradient is accumulated. The hook counts down its
bucket; at zero the bucket's gradients are copied into one flat buffer. Buckets are launched in the order of
the plan, never in the order of readiness: a ready bucket waits for those before it, because ranks match
collectives by order alone. When the last one has been launched, autograd is asked to call ``finalise`` at the
end of this backward, where the host or the stream waits for what is still on the wire.

Hooks hold recording code only where the readiness of every gradient is recorded, and then store no more than the
time: the records are written when the bucket is ready.

What the wrapper calls is in ``c10d_reducer.py``, one bucket's memory in ``bucket.py``.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch.autograd.graph import get_gradient_edge
from torch.utils.hooks import RemovableHandle

from instrumented_ddp import complaints
from instrumented_ddp.bucket import Bucket
from instrumented_ddp.bucket_plan import BucketPlan
from instrumented_ddp.comm_hooks import GradBucket, Hook, result_of
from instrumented_ddp.completion import Collective
from instrumented_ddp.lane import Lane, lane_of
from instrumented_ddp.logging_data import Logger, RuntimeStats
from instrumented_ddp.observer import Observer
from instrumented_ddp.records import all_reduce_records
from instrumented_ddp.static_graph import StaticGraph
from instrumented_ddp.unused_parameters import UsageMap, find_unused
from overlapscope.trace.format import Phase

_said_that_none_is_unused = False


class Reducer:
    """Averages the gradients of one module over a process group while autograd computes them.

    Args:
        parameters: that require a gradient, in the module's order, each once.
        plan: the first bucket plan; ``adopt`` replaces it.
        group: the ranks whose gradients are averaged.
        find_unused_parameters: look for parameters that have no part in a forward's outputs.
        gradient_as_bucket_view: ``parameter.grad`` is a view of the bucket instead of a copy.
        skip_all_reduce_unused_params: a bucket of which no parameter is used is not reduced.
        batched_grad_copy: divide a bucket as a whole; gradients are copied a bucket at a time either way.
        observer: told of everything that happens, if there is one.
        model_number: of the module, in the recording.
    """

    def __init__(
        self,
        parameters: Sequence[torch.nn.Parameter],
        plan: BucketPlan,
        group: dist.ProcessGroup,
        *,
        find_unused_parameters: bool,
        gradient_as_bucket_view: bool,
        skip_all_reduce_unused_params: bool,
        batched_grad_copy: bool,
        observer: Observer | None,
        model_number: int,
    ) -> None:
        self._names = [parameter.name for parameter in plan.parameters]
        self._parameters = parameters
        self._group = group
        self.find_unused_parameters = find_unused_parameters
        self.gradient_as_bucket_view = self.gradients_are_views = gradient_as_bucket_view
        self._skip_all_reduce_unused_params = skip_all_reduce_unused_params
        self._batched_grad_copy = batched_grad_copy
        self.observer = observer
        self._model_number = model_number
        self._board = observer.readiness_board(model_number, len(parameters)) if observer is not None else None
        self._none_is_ready = bytes(len(parameters))
        self._is_ready = (  # where others can look for what is missing when this process hangs or is dead
            observer.ready_board(model_number, len(parameters))
            if observer is not None
            else memoryview(bytearray(len(parameters)))
        )
        self._lanes = {device: lane_of(device, group, observer) for device in {p.device for p in parameters}}
        self._static_graph: StaticGraph | None = None
        self._usage = self._make_usage_map() if find_unused_parameters else None
        self.unused: list[int] = []
        """Parameters without a part in the newest iteration's outputs, as far as they were looked for."""
        self._unused_before: list[int] | None = None
        self._unused_are_marked = False
        self._comm_hook: Hook | None = None
        self._buffer_dtype: torch.dtype | None = None
        self._optimizer_runs_in_backward = False
        self._futures: list[torch._C.Future[Any]] = []
        self._logger: Logger | None = None
        self.stats = RuntimeStats(parameters[0].device)
        self._participants: int | None = None
        self._expects_gradients = False
        self._must_finalise = False
        self._gradient_records: list[bytes] = []  # refilled in place: hooks hold on to it
        self.plans: list[BucketPlan] = []
        """All so far, by epoch."""
        self.reductions = 0
        """How many backward passes have been reduced so far; equal on all ranks between two of them."""
        self.buckets_reduced = 0
        """How many were launched in the newest backward; as in torch, 0 in the first one of a static graph."""
        self.graph_is_static = True
        """Whether every forward so far has left the same parameters unused."""
        self.has_rebuilt_buckets = False
        self.ready_order: list[int] = []
        """Parameters in the order of their gradients in the newest backward."""
        self.observed_order: list[int] = []
        """All parameters in the order in which buckets are to be rebuilt; empty before the first reduction."""
        self.adopt(plan, "construction")
        self._accumulators = [get_gradient_edge(parameter).node for parameter in parameters]
        self._hooks: list[RemovableHandle] = []

    # -- plans ---------------------------------------------------------------------------------------------------

    def adopt(self, plan: BucketPlan, reason: str) -> None:
        """Take a bucket plan from here on. Not during a backward.

        Args:
            reason: for the recording: ``construction``, ``rebuild``, ``mixed_precision``, ``probe`` (to measure it),
                ``return`` (to the plan before) or ``auto`` (it is the fastest).
        """
        self.plan, self.plan_reason = plan, reason
        observer, records = self.observer, None
        if observer is not None:
            records = observer.plan_takes_effect(self._model_number, len(self.plans), plan, reason)
            self._gradient_records[:] = records.gradient_ready
        self.plans.append(plan)
        self.buckets = []
        for number, indices in enumerate(plan.buckets):
            device = self._parameters[indices[0]].device
            self.buckets.append(
                Bucket(
                    number,
                    indices,
                    [self._parameters[index] for index in indices],
                    dtype=self._buffer_dtype,
                    is_sparse=plan.parameters[indices[0]].is_sparse,
                    gradients_are_views=self.gradients_are_views,
                    is_divided_as_a_whole=self._batched_grad_copy,
                    lane=self._lanes[device],
                    timeline=observer.timeline_on(device) if observer is not None else None,
                    records=records.buckets[number] if records is not None else None,
                )
            )
        self._bucket_of = {index: bucket for bucket in self.buckets for index in bucket.indices}
        self._is_ready[:] = self._none_is_ready
        self._next_bucket = 0

    def observe_by(self, observer: Observer | None) -> None:
        """Tell somebody else of what happens from here on. Not during a backward; ``adopt`` a plan afterwards."""
        self.observer = observer
        self._board = observer.readiness_board(self._model_number, len(self._parameters)) if observer else None
        self._lanes = {device: lane_of(device, self._group, observer) for device in self._lanes}
        if self._hooks:  # they hold the observer before
            self._remove_autograd_hooks()
            self.register_hooks()

    @property
    def should_rebuild_buckets(self) -> bool:
        """Buckets are rebuilt once, unless gradients may come in another order each time."""
        return not self.has_rebuilt_buckets and (self._static_graph is not None or not self.find_unused_parameters)

    # -- before the backward -------------------------------------------------------------------------------------

    def expect_gradients(self, outputs: Sequence[torch.Tensor]) -> None:
        """Expect every gradient. Called at the end of each forward whose backward is to be reduced.

        Args:
            outputs: of the forward, if unused parameters are to be found.
        """
        self.stats.mark("backward_compute_start")
        for bucket in self.buckets:
            bucket.reset()
        self._is_ready[:] = self._none_is_ready
        self._next_bucket = self.buckets_reduced = 0
        self._expects_gradients = True
        self._unused_are_marked = False
        self.ready_order = []
        if self._static_graph is not None:
            self._static_graph.begin_iteration()
        elif self._usage is not None:
            self._search_unused(outputs)

    def _search_unused(self, outputs: Sequence[torch.Tensor]) -> None:
        global _said_that_none_is_unused
        self.unused = find_unused(outputs, self._accumulators)
        if not self.unused and not _said_that_none_is_unused:
            _said_that_none_is_unused = True
            warnings.warn(complaints.NO_UNUSED_FOUND, stacklevel=4)
        if self._unused_before not in (None, self.unused):
            self.graph_is_static = False
        self._unused_before = self.unused

    # -- during the backward: Algorithm 1 ------------------------------------------------------------------------

    def register_hooks(self) -> None:
        """Have autograd call us for every gradient, after all hooks that users have put on the parameter."""
        hooks = [self._make_hook(index) for index in range(len(self._parameters))]
        if len(self._lanes) > 1:
            lock = threading.RLock()
            hooks = [_one_at_a_time(hook, lock) for hook in hooks]
        self._hooks = [node.register_hook(hook) for node, hook in zip(self._accumulators, hooks, strict=True)]

    def _remove_autograd_hooks(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def _make_hook(self, index: int) -> Callable[..., None]:
        observer, on_gradient = self.observer, self.on_gradient
        if observer is not None and observer.detail != "buckets":
            return self._make_recording_hook(observer, index)

        def hook(*_: object) -> None:
            on_gradient(index)

        return hook

    def _make_recording_hook(self, observer: Observer, index: int) -> Callable[..., None]:
        on_gradient = self.on_gradient
        timeline = observer.timeline_on(self._parameters[index].device)
        mark, write, records, board = timeline.mark, timeline.write, self._gradient_records, self._board

        def recording_hook(*_: object) -> None:
            now = mark()
            if board is None or not self._expects_gradients:
                write(records[index], observer.step, now, now)
            else:
                board[index] = now
            on_gradient(index)

        return recording_hook

    def on_gradient(self, index: int) -> None:
        """A gradient has been accumulated."""
        if not self._expects_gradients and self.observer is not None:
            self.observer.gradient_is_not_reduced(self._model_number)
        if self._usage is not None and not self._is_complete(index, self._usage):
            return
        if self._expects_gradients:
            self.ready_order.append(index)
            self._mark_parameter_as_ready(index)

    def _is_complete(self, index: int, usage: UsageMap) -> bool:
        """Keep the account of used parameters, and tell whether autograd will add nothing more to a gradient."""
        static_graph = self._static_graph
        if (static_graph is None or not static_graph.is_known) and self._parameters[index].grad is not None:
            usage.note(index)
        if static_graph is not None and not static_graph.is_known:
            static_graph.count(index)
            return False
        if not self._expects_gradients:
            return False
        if not self._unused_are_marked:
            self._unused_are_marked = True
            for unused in self.unused:
                self._mark_parameter_as_ready(unused)
        if static_graph is None:
            return True
        left = static_graph.fires_left(index)
        if left < 0:
            self._fail(complaints.graph_has_changed(self._names[index]))
        return left == 0

    def _mark_parameter_as_ready(self, index: int) -> None:
        if self._is_ready[index]:
            self._fail(complaints.marked_twice(self._names[index], index))
        self._is_ready[index] = 1
        self._must_finalise = True
        bucket = self._bucket_of[index]
        if bucket.holds_large(index):
            bucket.copy_in_large(index, self._divisor())
        bucket.pending -= 1
        if bucket.pending == 0:
            self._mark_bucket_as_ready(bucket)

    def _mark_bucket_as_ready(self, bucket: Bucket) -> None:
        self._copy_in_small(bucket)
        bucket.is_ready = True
        self._launch_ready_buckets()
        if self.observer is not None and self._board is not None:  # after the launch, which must not wait for them
            self.observer.gradients_were_ready(bucket.indices, self._gradient_records, self._board)

    def _copy_in_small(self, bucket: Bucket) -> None:
        observer, records, timeline = self.observer, bucket.records, bucket.timeline
        if observer is None or records is None or timeline is None:
            bucket.copy_in_small(self._divisor())
            return
        if observer.phase is not Phase.BACKWARD:  # no output of the module was seen to get a gradient
            observer.note_caller()
            observer.enter(Phase.BACKWARD)
        ready = timeline.mark()
        bucket.copy_in_small(self._divisor())
        timeline.write(records.ready, observer.step, ready, ready)
        timeline.write(records.copy_in, observer.step, ready, timeline.mark())

    def _launch_ready_buckets(self) -> None:
        """Launch what is ready and has no predecessor that is not."""
        buckets = self.buckets
        while self._next_bucket < len(buckets) and buckets[self._next_bucket].is_ready:
            if self._next_bucket == 0:
                self.stats.mark("backward_comm_start")
            self._launch(buckets[self._next_bucket])
            self.buckets_reduced += buckets[self._next_bucket].collective is not None
            self._next_bucket += 1
            if self._next_bucket == len(buckets):
                if self._usage is not None and self._static_graph is None:
                    self._usage.all_reduce()
                torch.autograd.Variable._execution_engine.queue_callback(self._finalise)

    def _launch(self, bucket: Bucket) -> None:
        if self._skip_all_reduce_unused_params and set(bucket.indices) <= set(self.unused):
            return
        bucket.collective = self.reduce(self.as_hooks_see_it(bucket))

    def reduce(self, bucket: GradBucket) -> Collective:
        """Sum a bucket over all ranks, or do with it what a communication hook does."""
        lane, records, hook = bucket.bucket.lane, bucket.bucket.records, self._comm_hook
        if hook is None:
            return lane.all_reduce(bucket.buffer(), records)
        return lane.run_hook(lambda: hook(bucket), records)

    def _divisor(self) -> int | None:
        """What gradients are divided by; None if that is left to a communication hook."""
        if self._comm_hook is not None:
            return None
        if self._participants is None:
            self._participants = self.count_participants()
        return self._participants

    def count_participants(self) -> int:
        """How many ranks' gradients are summed in this backward."""
        return self._group.size()

    # -- at the end of the backward ------------------------------------------------------------------------------

    def _finalise(self) -> None:
        """Wait for every bucket in order and hand the averages to the parameters."""
        observer = self.observer
        self.stats.mark("backward_compute_end")
        if self.should_rebuild_buckets and (self._static_graph is None or self._static_graph.is_known):
            self.observed_order = self.ready_order + (self.unused if self._static_graph is not None else [])
        self._expects_gradients = False
        self._must_finalise = False
        self._participants = None
        if observer is not None:
            observer.enter(Phase.FINALISE)
        try:
            for bucket in self.buckets:
                if bucket.collective is not None:  # else it was skipped, because no rank has used it
                    self._finalise_bucket(bucket)
            for future in self._futures:
                future.wait()
        except Exception:  # of the backend, or of a communication hook
            if observer is not None:
                observer.incident()
            raise
        self._futures = []
        self._settle_usage()
        self.reductions += 1
        self.stats.mark("backward_comm_end")
        if observer is not None:
            observer.leave(Phase.FINALISE)
            observer.gradients_are_reduced(self._model_number)

    def _finalise_bucket(self, bucket: Bucket) -> None:
        observer, collective, timeline = self.observer, bucket.collective, bucket.timeline
        assert collective is not None
        bucket.lane.wait(collective)
        result = result_of(collective.work) if isinstance(collective.work, torch._C.Future) else bucket.buffer
        if self._optimizer_runs_in_backward:  # it has used the gradients already
            return
        is_used_anywhere = self._usage.is_used_anywhere if self._usage is not None else None
        if observer is None or bucket.records is None or timeline is None:
            bucket.copy_out(result, is_used_anywhere)
            return
        start = timeline.mark()
        bucket.copy_out(result, is_used_anywhere)
        timeline.write(bucket.records.copy_out, observer.step, start, timeline.mark())

    def _settle_usage(self) -> None:
        if self._usage is None:
            return
        if self._static_graph is None:
            self._usage.settle()
            self._usage.clear()
        elif not self._static_graph.is_known:
            self._usage.settle()
            self._static_graph.is_known = True

    def reduce_all_at_once(self) -> None:
        """Reduce everything after the backward: the first iteration of a static graph, which only counts hooks."""
        static_graph, usage = self._static_graph, self._usage
        assert static_graph is not None
        assert usage is not None
        if not self._expects_gradients:
            self._fail("static_graph=True needs its first backward to be reduced: enter no_sync() after it.")
        usage.all_reduce()
        self.unused = static_graph.unused
        self._must_finalise = True
        for bucket in self.buckets:
            for index in bucket.indices:
                if bucket.holds_large(index):
                    bucket.copy_in_large(index, self._divisor())
            self._copy_in_small(bucket)
        self.stats.mark("backward_comm_start")
        for bucket in self.buckets:
            self._launch(bucket)
        self._finalise()

    # -- trouble -------------------------------------------------------------------------------------------------

    def ensure_prior_reduction_finished(self) -> None:
        """Look whether the backward before came to its end.

        Raises:
            RuntimeError: it left parameters without a gradient, and other ranks waiting.
        """
        if not self._must_finalise:
            return
        missing = [index for index, ready in enumerate(self._is_ready) if not ready]
        self._fail(
            complaints.unfinished_reduction(
                self._names,
                missing,
                self._group.rank(),
                find_unused_parameters=self.find_unused_parameters,
                static_graph=self._static_graph is not None,
            )
        )

    def _fail(self, message: str) -> NoReturn:
        if self._logger is not None:
            self._logger.set_error_and_log(message)
        if self.observer is not None:
            self.observer.incident()
        raise RuntimeError(message)

    # -- small parts ---------------------------------------------------------------------------------------------

    def as_hooks_see_it(self, bucket: Bucket, buffer: torch.Tensor | None = None) -> GradBucket:
        """A bucket for a communication hook, with its own buffer or another."""
        return GradBucket(
            bucket, bucket.buffer if buffer is None else buffer, is_last=bucket.number == len(self.buckets) - 1
        )

    def _make_usage_map(self) -> UsageMap:
        first = self._parameters[0].device
        lane: Lane = self._lanes[first]
        records = None
        if self.observer is not None:
            flags = self.observer.timeline_on(first).flags
            records = all_reduce_records(flags, self._model_number, len(self._parameters), "int32")
        return UsageMap(len(self._parameters), first, lane, records)


def _one_at_a_time(hook: Callable[..., None], lock: threading.RLock) -> Callable[..., None]:
    """For a module that spans several devices: autograd has a thread for each."""

    def locking_hook(*_: object) -> None:
        with lock:
            hook()

    return locking_hook
