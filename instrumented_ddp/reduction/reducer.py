"""The gradient reducer: hook -> bucket ready -> launch -> finalize. Algorithm 1 of the DDP paper, and the hot path.

(Li et al., "PyTorch Distributed: Experiences on Accelerating Data Parallel Training", VLDB 2020, section 3.3.)

Every parameter has a hook that autograd calls when its gradient is accumulated. The hook counts down its bucket
(``native.countdown``); at zero the bucket's gradients are copied into one flat buffer. Buckets are launched in the
order of the plan, never in the order of readiness: a ready bucket waits for those before it, because ranks match
collectives by order alone. When the last one has been launched, autograd is asked to call ``_finalize`` at the
end of this backward, where the host or the stream waits for what is still in flight.

Listeners are notified of what happens (``recording.events``). The methods that torch's wrapper calls are in
``c10d_reducer.py``, one bucket's memory in ``bucket.py``, and the choice of the next plan in ``plans.schedule``.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch.autograd.graph import get_gradient_edge
from torch.utils.hooks import RemovableHandle

from instrumented_ddp.bucket_plan import BucketPlan
from instrumented_ddp.native import Countdown
from instrumented_ddp.recording.events import ReductionEvents
from instrumented_ddp.reduction import unused_parameters
from instrumented_ddp.reduction.averaging import Averaging
from instrumented_ddp.reduction.bucket import Bucket
from instrumented_ddp.reduction.strategy import PendingUpdates, ReductionStrategy
from instrumented_ddp.reduction.unused_parameters import Usage, UsageMap
from overlapscope.diagnosis.evidence import UnreducedCause
from overlapscope.trace.live_files import READY


class GradientHooks:
    """Hooks that autograd calls for every gradient, after all hooks that users have registered on the parameter.

    They are on the nodes that accumulate gradients, and live as long as the parameters.

    Args:
        parameters: the parameters, each once.
    """

    def __init__(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        self._parameters = parameters
        self.accumulators: list[Any] = [get_gradient_edge(parameter).node for parameter in parameters]
        """Leaf of the graph that accumulates each parameter's gradient."""
        self._spans_devices = len({parameter.device for parameter in parameters}) > 1
        self._handles: list[RemovableHandle] = []

    def register(self, make_hook: Callable[[int], Callable[..., None]]) -> None:
        """Register a hook for each parameter, which is made from its index."""
        hooks = [make_hook(index) for index in range(len(self.accumulators))]
        if self._spans_devices:
            lock = threading.RLock()
            hooks = [_one_at_a_time(hook, lock) for hook in hooks]
        self._handles = [node.register_hook(hook) for node, hook in zip(self.accumulators, hooks, strict=True)]

    def find_lost(self) -> set[int]:
        """Return the trained parameters for which autograd has made another accumulator, without a hook."""
        return {
            index
            for index, (parameter, node) in enumerate(zip(self._parameters, self.accumulators, strict=True))
            if parameter.requires_grad and get_gradient_edge(parameter).node is not node
        }

    def remove(self) -> None:
        """Remove all hooks. May be called twice."""
        for handle in self._handles:
            handle.remove()
        self._handles = []


def _one_at_a_time(hook: Callable[..., None], lock: threading.RLock) -> Callable[..., None]:
    """Serialize calls of a hook, as autograd has a thread for each device of a module that spans several."""

    def locking_hook(*_: object) -> None:
        with lock:
            hook()

    return locking_hook


class GraphHasChangedError(Exception):
    """Error raised when a hook fires more often than in the first iteration."""


class StaticUsage(Usage):
    """Usage with ``static_graph=True``: how often each hook fires is counted once, and expected from then on.

    With re-entrant checkpoints, or a parameter outside the wrapped forward, autograd adds to a gradient several times
    in one backward. Only after the last time may it be reduced, and only for a static graph is that known.

    Args:
        parameters: number of parameters.
        bitmap: which parameters any rank has used, as of the first iteration.
    """

    def __init__(self, parameters: int, bitmap: UsageMap) -> None:
        super().__init__((), bitmap)
        self._fire_counts = [0] * parameters
        self._remaining: list[int] = []
        self.is_known = False
        """True if the first iteration is over."""

    def begin(self, outputs: Sequence[torch.Tensor]) -> None:  # noqa: ARG002 - they are those of the first iteration
        """Expect every hook as often as it fired in the first iteration."""
        self._remaining = self._fire_counts.copy()
        self._unused_to_mark = self.unused

    def is_complete(self, index: int, *, has_gradient: bool, is_expected: bool) -> bool:
        """Count a call of a hook, or count it down; return whether it was the last one.

        Raises:
            GraphHasChangedError: the hook fired less often in the first iteration.
        """
        if not self.is_known:
            if has_gradient:
                self.bitmap.note(index)
            self._fire_counts[index] += 1
            return False
        if not is_expected:
            return False
        self._remaining[index] -= 1
        if self._remaining[index] < 0:
            raise GraphHasChangedError
        return self._remaining[index] == 0

    def finish_count(self) -> None:
        """End the count of the first backward: parameters whose hook never fired are unused."""
        self.unused = [index for index, times in enumerate(self._fire_counts) if times == 0]

    def launch_bitmap(self) -> None:
        """Do nothing: the bitmap of the first iteration holds."""

    def finish_reduction(self) -> None:
        """Wait for the bitmap in the first iteration, after which everything is known."""
        if not self.is_known:
            self.bitmap.finish_reduction()
            self.is_known = True


@dataclass(kw_only=True)
class ReducerHooks:
    """What others have a say in, shared by a reducer and its wrapper. Changed between two backwards only."""

    make_bucket: Callable[..., Bucket] = Bucket
    """Returns a bucket, with the arguments of ``Bucket``."""
    updates: PendingUpdates = field(default_factory=PendingUpdates)
    """What is postponed beyond the end of a backward."""
    buffer_dtype: torch.dtype | None = None
    """Dtype of buckets, if it is not that of their parameters."""
    optimizer_runs_in_backward: bool = False
    """True if gradients are used before they could be copied to ``parameter.grad``."""
    post_backward_futures: list[torch._C.Future[Any]] = field(default_factory=list)
    """Futures to wait for before the backward is over."""


class Reducer:
    """Averages the gradients of one module over a process group while autograd computes them.

    Args:
        parameters: parameters that require a gradient, in the module's order, each once.
        plan: the first bucket plan; ``adopt`` replaces it.
        group: the ranks whose gradients are averaged.
        find_unused_parameters: look for parameters that a forward's outputs don't depend on.
        gradient_as_bucket_view: ``parameter.grad`` is a view of the bucket.
        skip_all_reduce_unused_params: a bucket without a used parameter is not reduced.
        batched_grad_copy: divide a bucket as a whole; gradients are copied a bucket at a time either way.
        events: notified of everything that happens.
        strategy: how buckets are summed, and when.
        hooks: what others have a say in; None for nothing.
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
        events: ReductionEvents,
        strategy: ReductionStrategy,
        hooks: ReducerHooks | None = None,
    ) -> None:
        self.parameters = parameters
        self.events = events
        self.hooks = hooks or ReducerHooks()
        self.averaging = Averaging(group, {parameter.device for parameter in parameters}, events, strategy)
        self.find_unused_parameters = find_unused_parameters
        self.gradient_as_bucket_view = gradient_as_bucket_view
        self.gradients_are_views = gradient_as_bucket_view
        """False if gradients are replaced before the optimizer sees them, as with mixed precision."""
        self._skip_all_reduce_unused_params = skip_all_reduce_unused_params
        self._batched_grad_copy = batched_grad_copy
        self._overlaps = strategy.overlaps
        self._leaves_gradients = strategy.averages_parameters
        self._names = [parameter.name for parameter in plan.parameters]
        self._ready_ns = events.allocate_ready_times(len(parameters))
        """Time of each gradient in this backward, or the fact that it has arrived; 0 before."""
        self._countdown = Countdown(
            self._ready_ns,
            on_bucket_ready=self._mark_bucket_as_ready,
            on_large=self._copy_in_large,
            on_other=self.on_gradient,
            on_repeated=self._fail_on_repeated,
        )
        self._gradient_hooks = GradientHooks(parameters)
        self.usage = Usage(self._gradient_hooks.accumulators, self._usage_map()) if find_unused_parameters else None
        """Usage of parameters, where they need not all be used, or may be used more than once."""
        self.failure: tuple[str, int] | None = None
        """Message of the latest error that was raised here, and the iteration; for ``_get_ddp_logging_data()``."""
        self.plans: list[BucketPlan] = []
        """All plans so far, by epoch."""
        self.reductions = 0
        """Number of backward passes reduced so far; equal on all ranks between two of them."""
        self.buckets_reduced = 0
        """Number of buckets launched in the latest backward; as in torch, 0 in the first one of a static graph."""
        self.observed_order: list[int] = []
        """The same order in the latest reduced backward, for buckets to follow; empty before there was one."""
        self.adopt(plan, "construction")

    # -- plans ---------------------------------------------------------------------------------------------------

    def adopt(self, plan: BucketPlan, reason: str) -> None:
        """Use a bucket plan from now on. Not during a backward.

        Args:
            reason: ``construction``, ``rebuild``, ``mixed_precision``, ``probe`` (to measure it), ``return`` (to the
                previous plan) or ``auto`` (it is the fastest).
        """
        self.hooks.updates.before_bucket_reuse()
        self.plan, self.plan_reason = plan, reason
        self.events.on_plan_adopted(len(self.plans), plan, reason)
        self.plans.append(plan)
        self.buckets: list[Bucket] = []  # frees their memory before that of the next ones is allocated
        self.bucket_of: dict[int, Bucket] = {}
        """Bucket of each parameter, by the parameter's index."""
        self.buckets = [
            self.hooks.make_bucket(
                number,
                indices,
                [self.parameters[index] for index in indices],
                dtype=self.hooks.buffer_dtype,
                is_sparse=plan.parameters[indices[0]].is_sparse,
                gradients_are_views=self.gradients_are_views,
                is_divided_as_a_whole=self._batched_grad_copy,
            )
            for number, indices in enumerate(plan.buckets)
        ]
        self.bucket_of = {index: bucket for bucket in self.buckets for index in bucket.indices}
        large = [index for index, bucket in self.bucket_of.items() if bucket.is_large(index)]
        self._countdown.adopt([bucket.indices for bucket in self.buckets], large)
        self._next_bucket = 0

    def set_listener(self, events: ReductionEvents) -> None:
        """Notify another listener from now on. Not during a backward; ``adopt`` a plan afterwards."""
        self.events = events
        self.averaging.set_listener(events)

    def reduce_over(self, group: dist.ProcessGroup) -> None:
        """Average over another group from now on."""
        self.averaging.reduce_over(group)
        if self.usage is not None:
            self.usage.bitmap = self._usage_map()

    def expect_static_graph(self) -> None:
        """Expect every iteration to use the same parameters, as often as the first one does."""
        self.usage = StaticUsage(len(self.parameters), self._usage_map())

    def _usage_map(self) -> UsageMap:
        return self.averaging.usage_map(len(self.parameters), self.parameters[0].device)

    @property
    def settled_reductions(self) -> int | None:
        """Return ``reductions``; None while an update of the parameters is pending."""
        return self.reductions if self.hooks.updates.are_complete else None

    @property
    def order_may_change(self) -> bool:
        """Return whether the order of gradients may change from one backward to the next."""
        return self.find_unused_parameters and not self.graph_is_static

    @property
    def graph_is_static(self) -> bool:
        """Return whether the user has promised that each backward has the same gradients."""
        return isinstance(self.usage, StaticUsage)

    # -- before the backward -------------------------------------------------------------------------------------

    def expect_gradients(self, outputs: Sequence[torch.Tensor]) -> None:
        """Expect every gradient. Called at the end of each forward whose backward is to be reduced.

        Args:
            outputs: outputs of the forward, if unused parameters are to be found.
        """
        self.hooks.updates.before_bucket_reuse()
        self.events.on_gradients_expected()
        for bucket in self.buckets:
            bucket.reset()
        countdown = self._countdown
        countdown.reset()
        countdown.stamps = self.events.gradient_times == "host"
        countdown.is_direct = self.usage is None and self.events.gradient_times != "device"
        countdown.is_expecting = True
        self._next_bucket, self.buckets_reduced = 0, 0
        if self.usage is not None:
            self.usage.begin(outputs)

    # -- during the backward: Algorithm 1 ------------------------------------------------------------------------

    def register_hooks(self) -> None:
        """Register a hook for every gradient."""
        self._gradient_hooks.register(self._countdown.make_hook)

    def remove_hooks(self) -> None:
        """Remove all hooks from the parameters. May be called twice."""
        self._gradient_hooks.remove()

    @property
    def ready_order(self) -> list[int]:
        """Return the parameters in the order of their gradients in the latest backward."""
        return self._countdown.order

    def on_gradient(self, index: int) -> None:
        """Count a gradient that was accumulated, unless more is to come, or nothing is expected."""
        is_expected = self._countdown.is_expecting
        ready_ns = self.events.on_gradient(index, is_expected=is_expected)
        if not is_expected:
            self.events.on_unexpected_gradient(index)
        if self.usage is not None and not self._is_complete(index, self.usage):
            return
        if is_expected:
            self._countdown.mark(index, ready_ns, True)

    def _is_complete(self, index: int, usage: Usage) -> bool:
        """Return whether autograd will add nothing more to a gradient."""
        is_expected, has_gradient = self._countdown.is_expecting, self.parameters[index].grad is not None
        if is_expected:
            for unused in usage.take_unused():
                self._countdown.mark(unused, READY, False)
        try:
            return usage.is_complete(index, has_gradient=has_gradient, is_expected=is_expected)
        except GraphHasChangedError:
            self.fail(unused_parameters.graph_has_changed(self._names[index]))

    def _fail_on_repeated(self, index: int) -> None:
        self.fail(unused_parameters.marked_twice(self._names[index], index))

    def _copy_in_large(self, index: int) -> None:
        self.bucket_of[index].copy_in_large(index, self.averaging.divisor())

    def _mark_bucket_as_ready(self, number: int) -> None:
        bucket = self.buckets[number]
        self._copy_in_small(bucket)
        bucket.is_ready = True
        self._launch_ready_buckets()
        self.events.on_gradients_launched(bucket.indices, self._ready_ns)

    def _copy_in_small(self, bucket: Bucket) -> None:
        self.events.on_bucket_ready(bucket.device)
        bucket.copy_in_small(self.averaging.divisor())
        self.events.on_copy_in_end(bucket.number, bucket.device)

    def _launch_ready_buckets(self) -> None:
        """Launch the ready buckets whose predecessors are ready, unless the strategy waits for autograd."""
        buckets = self.buckets
        while self._next_bucket < len(buckets) and buckets[self._next_bucket].is_ready:
            if self._overlaps:
                self._launch(buckets[self._next_bucket])
            self._next_bucket += 1
            if self._next_bucket == len(buckets):
                if self._overlaps and self.usage is not None:
                    self.usage.launch_bitmap()
                then = self._finalize if self._overlaps else self._launch_and_finalize
                torch.autograd.Variable._execution_engine.queue_callback(then)

    def _launch(self, bucket: Bucket) -> None:
        if bucket is self.buckets[0]:
            self.events.on_first_launch()
        unused = self.usage.unused if self.usage is not None else ()
        if self._leaves_gradients or (self._skip_all_reduce_unused_params and set(bucket.indices) <= set(unused)):
            return
        self.events.on_bucket_launch(bucket.number, bucket.buffer)
        bucket.collective = self.averaging.launch(bucket, bucket.buffer, is_last=bucket is self.buckets[-1])
        self.buckets_reduced += 1

    # -- at the end of the backward ------------------------------------------------------------------------------

    def _launch_and_finalize(self) -> None:
        for bucket in self.buckets:
            self._launch(bucket)
        if self.usage is not None:
            self.usage.launch_bitmap()
        self._finalize()

    def _finalize(self) -> None:
        """Finish the reduction at the end of the backward, except for the wait if that is deferred."""
        self.events.on_backward_over()
        self.observed_order = self.ready_order
        if isinstance(self.usage, StaticUsage):  # in the first iteration nothing was observed yet
            self.observed_order = self.observed_order + self.usage.unused if self.usage.is_known else []
        self._stop_expecting()
        self.averaging.launch_rest(self.buckets)
        if not self.hooks.updates.defers_wait():
            self.finish(self.buckets)
        if self.usage is not None:
            self.usage.finish_reduction()
        self.reductions += 1
        self.events.on_finalized()

    def finish(self, buckets: Sequence[Bucket]) -> None:
        """Wait for some buckets in order and copy the averages to the parameters' gradients."""
        try:
            used = self.usage.bitmap.is_used_anywhere if self.usage is not None else None
            self.averaging.copy_to_grads(buckets, used, copies=not self.hooks.optimizer_runs_in_backward)
            for future in self.hooks.post_backward_futures:
                future.wait()
        except Exception:  # of the backend, or of a communication hook
            self.events.failed()
            raise
        finally:  # no work outlives its process group, which may be gone before the next forward
            for bucket in buckets:
                bucket.collective = None
        self.hooks.post_backward_futures.clear()

    def _stop_expecting(self) -> None:
        self._countdown.is_expecting = self._countdown.has_begun = False
        self.averaging.reset_divisor()

    def discard(self) -> None:
        """Abandon the backward in progress, if there is one, and discard the observed order, which no longer holds."""
        self._stop_expecting()
        self.observed_order = []
        if self.usage is not None:
            self.usage.bitmap.clear()

    def reduce_all_at_once(self) -> None:
        """Reduce everything after the backward, in the first iteration of a static graph, which only counts hooks."""
        usage = self.usage
        assert isinstance(usage, StaticUsage)
        if not self._countdown.is_expecting:
            self.fail("static_graph=True needs its first backward to be reduced: enter no_sync() after it.")
        usage.bitmap.all_reduce()
        usage.finish_count()
        self._countdown.has_begun = True
        for bucket in self.buckets:
            for index in bucket.indices:
                if bucket.is_large(index):
                    self._copy_in_large(index)
            self._copy_in_small(bucket)
            self._launch(bucket)
        self.buckets_reduced = 0
        self._finalize()

    def find_unfinished(self) -> tuple[UnreducedCause, list[int]]:
        """Return why the reduction that was expected has not ended, and the parameters whose gradients wait for it.

        Casting or moving a module makes autograd replace the accumulators of its parameters, and our hooks with them.
        With mixed precision the wrapper does so itself.
        """
        waiting = {index for index, ready in enumerate(self._ready_ns) if ready} if self._countdown.has_begun else set()
        lost = set() if self.hooks.buffer_dtype is not None else self._gradient_hooks.find_lost()
        return ("hooks lost", sorted(waiting | lost)) if lost else ("incomplete", sorted(waiting))

    # -- errors --------------------------------------------------------------------------------------------------

    def ensure_prior_reduction_finished(self) -> None:
        """Check that the previous backward was completed.

        Raises:
            RuntimeError: it left parameters without a gradient, and other ranks waiting.
        """
        if not self._countdown.has_begun:
            return
        missing = [index for index, ready in enumerate(self._ready_ns) if not ready]
        settings = {"find_unused_parameters": self.find_unused_parameters, "static_graph": self.graph_is_static}
        rank = self.averaging.group.rank()
        self.fail(unused_parameters.unfinished_reduction(self._names, missing, rank, **settings))

    def fail(self, message: str) -> NoReturn:
        """Record an error, and raise it.

        Raises:
            RuntimeError: with this message.
        """
        self.failure = message, self.events.stats.iterations
        self.events.failed()
        raise RuntimeError(message)
