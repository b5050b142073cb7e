"""The reducer as torch's wrapper drives it: the methods of ``torch.distributed.Reducer``, under their names there.

(torch/csrc/distributed/c10d/init.cpp; who calls what: torch/nn/parallel/distributed.py.)
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import BuiltinCommHookType  # type: ignore[attr-defined]

from instrumented_ddp.agreement import agree_on_plan, check_same_parameters
from instrumented_ddp.bucket_plan import BucketPlan, plan_buckets
from instrumented_ddp.collective_log.purposes import Purpose, launched_for
from instrumented_ddp.comm_hooks import GradBucket, builtin_hook, python_hook
from instrumented_ddp.completion import NO_TIMEOUT, Collective
from instrumented_ddp.lane import Lane, lane_of
from instrumented_ddp.logging_data import Logger
from instrumented_ddp.plan_schedule import PlanSchedule, Wish, WishedSchedule
from instrumented_ddp.reducer import Reducer
from instrumented_ddp.static_graph import StaticGraph


class Shadow:
    """What a rank that has joined launches to match a bucket of the others.

    Args:
        lane: of the bucket.
        collective: that has been launched on it.
    """

    def __init__(self, lane: Lane, collective: Collective) -> None:
        self._lane = lane
        self._collective = collective

    def wait(self) -> None:
        """Wait for it; there is no result to use."""
        self._lane.wait(self._collective)


class C10dReducer(Reducer):
    """See the module's docstring.

    Args:
        parameters: that require a gradient, in the module's order, each once.
        plan: the first bucket plan.
        group: the ranks whose gradients are averaged.
        rebuild_limits_bytes: of the buckets of the second plan, which follows the order of the gradients.
        rebuild_plan: the second plan, if it is known already.
        wish: what this process was asked to do with its plans. A schedule for that is set as ``wished``.
        bucket_bytes_cap: for the logging data.
        others: as in ``Reducer``.
    """

    def __init__(
        self,
        parameters: Sequence[torch.nn.Parameter],
        plan: BucketPlan,
        group: dist.ProcessGroup,
        *,
        rebuild_limits_bytes: Sequence[int],
        rebuild_plan: BucketPlan | None,
        bucket_bytes_cap: int,
        wish: Wish,
        **others: Any,
    ) -> None:
        super().__init__(parameters, plan, group, **others)
        self._rebuild_limits_bytes = rebuild_limits_bytes
        self._rebuild_plan = rebuild_plan
        self._wish = wish
        self.wished: WishedSchedule | None = None
        """To be followed as soon as ranks agree on it."""
        self.plan_schedule: PlanSchedule | None = None
        """Followed from one backward to the next, as long as there is one."""
        self._reductions_when_asked = -1
        self.bucket_bytes_cap = bucket_bytes_cap
        self._count: dist.Work | None = None
        """Under way, where the ranks that still have inputs are counted."""

    # -- forward and backward ------------------------------------------------------------------------------------

    def prepare_for_forward(self) -> None:
        """A forward begins whose gradients are to be reduced."""
        self.stats.begin_iteration()

    def prepare_for_backward(self, outputs: list[torch.Tensor]) -> None:
        """It has ended, with these outputs; none are given where unused parameters are not to be found."""
        if _is_within_rpc_autograd():
            self._fail(
                "instrumented_ddp does not serve distributed autograd over RPC, which keeps gradients where no hook "
                "sees them. Use torch.nn.parallel.DistributedDataParallel for this model."
            )
        self.expect_gradients(outputs)

    def _autograd_hook(self, index: int) -> None:
        self.on_gradient(index)

    def _delay_all_reduce(self) -> None:
        self.reduce_all_at_once()

    def _check_reducer_finalized(self) -> None:
        self.ensure_prior_reduction_finished()

    def _install_post_backward_futures(self, futures: list[torch._C.Future[Any]]) -> None:
        self._futures += futures

    # -- plans ---------------------------------------------------------------------------------------------------

    def _rebuild_buckets(self) -> bool:
        """After the first reduced backward: follow the order in which rank 0 saw its gradients."""
        self.ensure_prior_reduction_finished()
        if not self.should_rebuild_buckets or not self.observed_order:
            return False
        with launched_for(Purpose(role="plan", model=self._model_number)):
            device = self._parameters[0].device
            # Construction may have left it out (init_sync=False), and a plan is rank 0's numbers of parameters.
            is_possible = self.wished is not None and self.wished.is_possible
            wish = self._wish if is_possible else Wish.NONE
            is_same = check_same_parameters(self.plan.parameters, self._group, device, wish=wish)
            plan = agree_on_plan(self._rebuild_plan or self._plan_from_observed_order(), self._group, device)
            self.adopt(plan, "rebuild")
            self.prepare_schedule(self.observed_order, everybody_would=is_same and is_possible)
        self.has_rebuilt_buckets = True
        return True

    def prepare_schedule(self, order: Sequence[int], *, everybody_would: bool) -> None:
        """Agree on the schedule of plans, on ranks that were asked for it, if all were. Called on all ranks.

        Args:
            order: of the gradients, as far as it is known; rank 0's counts.
            everybody_would: whether all ranks were asked for the same.
        """
        if self.wished is None:
            return
        self.wished.agree(self.plan, order, self._group, after=self.reductions, everybody_would=everybody_would)
        self.plan_schedule = self.wished

    def follow_plan_schedule(self) -> None:
        """Take another plan if it is time. Called at the beginning of a forward that is to be reduced."""
        schedule = self.plan_schedule
        if schedule is None or self.reductions == self._reductions_when_asked:
            return
        self._reductions_when_asked = self.reductions
        self.ensure_prior_reduction_finished()
        change = schedule.change_after(self.reductions)
        if change is not None and (change.plan.buckets, change.reason) != (self.plan.buckets, self.plan_reason):
            self.adopt(change.plan, change.reason)
            for bucket in self.buckets:
                bucket.touch()
        if schedule.is_over:
            self.plan_schedule = None

    def _plan_from_observed_order(self) -> BucketPlan:
        specs, limits_bytes = self.plan.parameters, self._rebuild_limits_bytes
        if os.environ.get("DDP_SET_LAST_BUCKET_CAP") != "1":
            return plan_buckets(specs, self.observed_order, limits_bytes)
        # The small limit is for the last bucket: fill from the end.
        plan = plan_buckets(specs, self.observed_order[::-1], limits_bytes)
        return BucketPlan(plan.parameters, plan.buckets[::-1])

    def _push_all_rebuilt_params(self) -> None:
        if self.should_rebuild_buckets and not self.observed_order:
            self.observed_order = list(range(len(self._parameters)))

    def _reset_state(self) -> None:
        self.has_rebuilt_buckets = False
        self.plan_schedule = None  # ranks of another group have not agreed on it
        self.observed_order = []
        self._expects_gradients = self._must_finalise = False
        self._participants = None
        if self._usage is not None:
            self._usage.clear()

    def _update_process_group(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._lanes = {device: lane_of(device, group, self.observer) for device in self._lanes}
        for bucket in self.buckets:
            bucket.lane = self._lanes[bucket.parameters[0].device]
        if self._usage is not None:
            self._usage = self._make_usage_map()

    # -- static graph, mixed precision, optimizers in backward ---------------------------------------------------

    def _set_static_graph(self) -> None:
        if self.stats.iterations > 0:
            self._fail(
                "set_static_graph() should be called before training loop starts and after DistributedDataParallel is "
                "constructed."
            )
        self._static_graph = StaticGraph(len(self._parameters))
        self._usage = self._make_usage_map()

    def _ddp_graph_static(self) -> bool:
        return self.graph_is_static

    def _set_mixed_precision_param_dtype(self, dtype: torch.dtype) -> None:
        self._buffer_dtype = dtype
        self.gradients_are_views = False  # those in low precision are replaced before the optimizer sees them
        self.adopt(self.plan, "mixed_precision")

    def _set_optimizer_in_backward(self) -> None:
        self._optimizer_runs_in_backward = True

    def _set_sparse_metadata(self, global_unique_ids: object) -> None:
        raise NotImplementedError(
            "instrumented_ddp reduces sparse gradients as they are: sparse metadata needs an all-reduce that no public "
            "build of torch has. Use torch.nn.parallel.DistributedDataParallel for this model."
        )

    # -- communication hooks -------------------------------------------------------------------------------------

    def register_comm_hook(self, state: object, hook: Callable[..., Any]) -> None:
        """Let a hook of the user's reduce the buckets."""
        if self._comm_hook is not None:
            self._fail("register_comm_hook or register_builtin_comm_hook can only be called once.")
        self._comm_hook = python_hook(state, hook)
        self._keep_plan()

    def register_builtin_comm_hook(self, kind: BuiltinCommHookType) -> None:
        """Let one of torch's hooks reduce the buckets."""
        if self._comm_hook is not None:
            self._fail("register_builtin_comm_hook or register_comm_hook can only be called once.")
        self._comm_hook = builtin_hook(kind, self._group)
        self._keep_plan()

    def _keep_plan(self) -> None:
        if self.wished is not None:
            self.wished.is_impossible("a communication hook may keep a state for each bucket, so the plan must stay")

    def _run_comm_hook(self, bucket: GradBucket) -> Shadow:
        return Shadow(bucket.bucket.lane, self.reduce(bucket))

    def _run_allreduce_hook(self, bucket: GradBucket) -> torch._C.Future[Any]:
        return self._group.allreduce([bucket.buffer()], dist.AllreduceOptions()).get_future()

    # -- join ----------------------------------------------------------------------------------------------------

    def _set_forward_pass_work_handle(self, work: dist.Work, use_static_world_size: bool) -> None:
        self._count = None if use_static_world_size else work

    def count_participants(self) -> int:
        """Under ``join()``: the ranks that still have inputs, unless gradients are divided by all."""
        if self._count is None:
            return self._group.size()
        self._count.wait(NO_TIMEOUT)
        participants = int(self._count.get_future().value()[0].item())
        self._count = None
        return participants

    def reduction_was_matched(self) -> None:
        """This rank has joined, and others have reduced a backward pass."""
        self.reductions += 1

    def _get_zeros_like_grad_buckets(self) -> list[GradBucket]:
        return [self.as_hooks_see_it(bucket, torch.zeros_like(bucket.buffer)) for bucket in self.buckets]

    def _get_local_used_map(self) -> torch.Tensor:
        assert self._usage is not None, "asked for with find_unused_parameters or static_graph only"
        return self._usage.reduced

    # -- logging -------------------------------------------------------------------------------------------------

    def set_logger(self, logger: Logger) -> None:
        """Where errors are noted."""
        self._logger = logger

    def _set_ddp_runtime_logging_sample_rate(self, sample_rate: int) -> None:
        self.stats.sample_rate = sample_rate


def _is_within_rpc_autograd() -> bool:
    if not dist.rpc.is_available():
        return False
    from torch.distributed import autograd, rpc

    if not rpc._is_current_rpc_agent_set():  # type: ignore[attr-defined]
        return False
    try:
        autograd._current_context()  # type: ignore[attr-defined]
    except RuntimeError:  # there is none
        return False
    return True
