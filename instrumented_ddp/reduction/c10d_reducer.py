"""Adapter with the methods of ``torch.distributed.Reducer``, through which torch's DDP wrapper drives our reducer.

(torch/csrc/distributed/c10d/init.cpp; who calls what: torch/nn/parallel/distributed.py.)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, Protocol

import torch
import torch.distributed as dist
from torch.distributed import BuiltinCommHookType  # type: ignore[attr-defined]

from instrumented_ddp.collectives.completion import NO_TIMEOUT
from instrumented_ddp.recording.records import BucketCollective
from instrumented_ddp.reduction.averaging import Averaging, GradBucket, builtin_hook, python_hook
from instrumented_ddp.reduction.bucket import Bucket
from instrumented_ddp.reduction.reducer import Reducer

_HOOKS_KEEP_STATE: Final = "a communication hook may keep per-bucket state, so the plan can't change"


class Plans(Protocol):
    """Interface of the plan controller, see ``plans.schedule``."""

    has_rebuilt: bool
    """True if the buckets were rebuilt."""

    @property
    def should_rebuild(self) -> bool:
        """Return whether buckets are still to be rebuilt."""

    def rebuild(self) -> bool:
        """Rebuild the buckets, if it is time, and return whether they were."""

    def keep_plan(self, why: str) -> None:
        """Keep the active plan from now on."""

    def discard(self) -> None:
        """Reset, as if nothing had been agreed on."""


class ShadowCollective:
    """A collective that a joined rank launches to match a bucket of the other ranks.

    Args:
        averaging: launched the collective.
        bucket: the bucket that it matches.
        buffer: buffer in place of the bucket's.
        collective: the launched collective.
    """

    def __init__(
        self, averaging: Averaging, bucket: Bucket, buffer: torch.Tensor, collective: BucketCollective
    ) -> None:
        self._averaging = averaging
        self._bucket = bucket
        self._buffer = buffer
        self._collective = collective

    def launch_rest(self) -> None:
        """Launch what strategies defer until the backward is over."""
        self._collective = self._averaging.launch_second_part(self._bucket, self._buffer, self._collective)

    def wait(self) -> None:
        """Wait for the collective, and discard its result."""
        self._averaging.wait(self._bucket, self._collective)


class C10dReducer:
    """Adapter between torch's wrapper and our reducer.

    Args:
        reducer: the reducer that does the work.
        plans: controls the bucket plans of the reducer.
    """

    def __init__(self, reducer: Reducer, plans: Plans) -> None:
        self.reducer = reducer
        self._plans = plans
        self._count: dist.Work | None = None
        """Collective in flight that counts the ranks that still have inputs."""
        self._shadows: list[ShadowCollective] = []
        """Collectives launched so far for the current backward of the other ranks."""

    # -- forward and backward ------------------------------------------------------------------------------------

    def prepare_for_forward(self) -> None:
        """Begin an iteration, at the start of a forward whose gradients are to be reduced."""
        self.reducer.events.stats.begin_iteration()

    def prepare_for_backward(self, outputs: list[torch.Tensor]) -> None:
        """Expect gradients, at the end of a forward. No outputs are given unless unused parameters are to be found."""
        if _is_within_rpc_autograd():
            self.reducer.fail(
                "instrumented_ddp doesn't support distributed autograd over RPC, which keeps gradients where no hook "
                "sees them. Use torch.nn.parallel.DistributedDataParallel for this model."
            )
        self.reducer.expect_gradients(outputs)

    def _autograd_hook(self, index: int) -> None:
        self.reducer.on_gradient(index)

    def _delay_all_reduce(self) -> None:
        self.reducer.reduce_all_at_once()

    def _check_reducer_finalized(self) -> None:
        self.reducer.ensure_prior_reduction_finished()

    def _install_post_backward_futures(self, futures: list[torch._C.Future[Any]]) -> None:
        self.reducer.hooks.post_backward_futures += futures

    def _remove_autograd_hooks(self) -> None:
        self.reducer.remove_hooks()

    # -- plans and groups ----------------------------------------------------------------------------------------

    def _rebuild_buckets(self) -> bool:
        return self._plans.rebuild()

    def _push_all_rebuilt_params(self) -> None:
        if self._plans.should_rebuild and not self.reducer.observed_order:
            self.reducer.observed_order = list(range(len(self.reducer.parameters)))

    def _reset_state(self) -> None:
        self._plans.discard()
        self.reducer.discard()

    def _update_process_group(self, group: dist.ProcessGroup) -> None:
        self.reducer.reduce_over(group)

    # -- static graph, mixed precision, optimizers in backward ---------------------------------------------------

    def _set_static_graph(self) -> None:
        if self.reducer.events.stats.iterations > 0:
            self.reducer.fail(
                "set_static_graph() should be called before training loop starts and after DistributedDataParallel is "
                "constructed."
            )
        self.reducer.expect_static_graph()

    def _ddp_graph_static(self) -> bool:
        return self.reducer.usage is None or self.reducer.usage.is_static

    def _set_mixed_precision_param_dtype(self, dtype: torch.dtype) -> None:
        reducer = self.reducer
        reducer.hooks.buffer_dtype = dtype
        reducer.gradients_are_views = False  # those in low precision are replaced before the optimizer sees them
        reducer.adopt(reducer.plan, "mixed_precision")

    def _set_optimizer_in_backward(self) -> None:
        self.reducer.hooks.optimizer_runs_in_backward = True

    def _set_sparse_metadata(self, global_unique_ids: object) -> None:
        raise NotImplementedError(
            "instrumented_ddp reduces sparse gradients as they are: sparse metadata needs an all-reduce that no public "
            "build of torch has. Use torch.nn.parallel.DistributedDataParallel for this model."
        )

    # -- communication hooks -------------------------------------------------------------------------------------

    def register_comm_hook(self, state: object, hook: Callable[..., Any]) -> None:
        """Register a hook of the user's that reduces the buckets."""
        if self.reducer.averaging.comm_hook is not None:
            self.reducer.fail("register_comm_hook or register_builtin_comm_hook can only be called once.")
        self.reducer.averaging.comm_hook = python_hook(state, hook)
        self._plans.keep_plan(_HOOKS_KEEP_STATE)

    def register_builtin_comm_hook(self, kind: BuiltinCommHookType) -> None:
        """Register one of torch's built-in hooks to reduce the buckets."""
        if self.reducer.averaging.comm_hook is not None:
            self.reducer.fail("register_builtin_comm_hook or register_comm_hook can only be called once.")
        self.reducer.averaging.comm_hook = builtin_hook(kind, self.reducer.averaging.group)
        self._plans.keep_plan(_HOOKS_KEEP_STATE)

    def _run_comm_hook(self, bucket: GradBucket) -> ShadowCollective:
        averaging = self.reducer.averaging
        collective = averaging.launch(bucket.bucket, bucket.buffer(), is_last=bucket.is_last())
        self._shadows.append(ShadowCollective(averaging, bucket.bucket, bucket.buffer(), collective))
        shadow = self._shadows[-1]
        if bucket.is_last():
            for each in reversed(self._shadows):
                each.launch_rest()
            self._shadows = []
        return shadow

    def _run_allreduce_hook(self, bucket: GradBucket) -> torch._C.Future[Any]:
        return self.reducer.averaging.group.allreduce([bucket.buffer()], dist.AllreduceOptions()).get_future()

    # -- join ----------------------------------------------------------------------------------------------------

    def _set_forward_pass_work_handle(self, work: dist.Work, use_static_world_size: bool) -> None:
        self._count = None if use_static_world_size else work
        self.reducer.averaging.count_participants = self._count_participants

    def _count_participants(self) -> int:
        """Count the ranks that still have inputs under ``join()``, unless gradients are divided by all."""
        if self._count is None:
            return self.reducer.averaging.group.size()
        self._count.wait(NO_TIMEOUT)
        participants = int(self._count.get_future().value()[0].item())
        self._count = None
        return participants

    def _get_zeros_like_grad_buckets(self) -> list[GradBucket]:
        buckets = self.reducer.buckets
        return [
            GradBucket(bucket, torch.zeros_like(bucket.buffer), is_last=bucket is buckets[-1]) for bucket in buckets
        ]

    def _get_local_used_map(self) -> torch.Tensor:
        assert self.reducer.usage is not None, "asked for with find_unused_parameters or static_graph only"
        return self.reducer.usage.bitmap.reduced

    # -- logging -------------------------------------------------------------------------------------------------

    def _set_ddp_runtime_logging_sample_rate(self, sample_rate: int) -> None:
        self.reducer.events.stats.sample_rate = sample_rate


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
