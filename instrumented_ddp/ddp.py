"""Instrumented subclass of torch's ``DistributedDataParallel`` with a Python reducer in place of the C++ one.

Because it is a subclass, ``isinstance(model, torch.nn.parallel.DistributedDataParallel)`` holds (accelerate,
Lightning, torch.compile rely on it), and arguments, ``no_sync``, ``join``, pickling and the rest are torch's.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path
from typing import Any

import torch
from torch import _disable_dynamo, nn  # type: ignore[attr-defined]
from torch.distributed import BuiltinCommHookType  # type: ignore[attr-defined]

from instrumented_ddp.arguments import SIGNATURE, TORCH_SIGNATURE, DDPArguments
from instrumented_ddp.bucket_plan import BucketPlan, describe_parameters
from instrumented_ddp.collectives.roles import CollectiveRole, collective_context
from instrumented_ddp.plans.auto import AutoBuckets
from instrumented_ddp.plans.initial_plan import Caps, first_plan
from instrumented_ddp.plans.probing import Probing, is_asked_to_probe
from instrumented_ddp.plans.schedule import PlanController, RequestedSchedule
from instrumented_ddp.recording.console import reattribute_warnings
from instrumented_ddp.recording.coverage import ReductionCoverage
from instrumented_ddp.recording.events import make_reduction_events
from instrumented_ddp.recording.metadata import collect_reduction_settings, is_reduced_in_python
from instrumented_ddp.recording.recorder import Recorder
from instrumented_ddp.reduction.agreement import PlanRequest, check_same_parameters
from instrumented_ddp.reduction.c10d_reducer import C10dReducer
from instrumented_ddp.reduction.logging_data import Logger
from instrumented_ddp.reduction.reducer import Reducer, ReducerHooks
from instrumented_ddp.replicas.replica import FingerprintedReplica
from instrumented_ddp.session import get_or_open_session
from instrumented_ddp.strategies.deferral import DeferredUpdatesDDP
from instrumented_ddp.strategies.parameter_averaging import ParameterAveraging
from instrumented_ddp.strategies.sharded.layout import sharded_buckets
from instrumented_ddp.strategies.sharded.shards import ParameterShards
from instrumented_ddp.strategies.strategy import Strategy
from instrumented_ddp.trial import get_trial
from overlapscope.bucket_model.plan_file import PlanFile
from overlapscope.trace.environment import OnIncident
from overlapscope.trace.schema import Phase


class DistributedDataParallel(DeferredUpdatesDDP):
    """Data-parallel training of one module: gradients are averaged over a process group during backward.

    Args:
        args: those of ``torch.nn.parallel.DistributedDataParallel``, in its order.
        trace: record into this folder. None records if the process was started by ``overlapscope record``.
        on_incident: what the watchdog of a recorded process does when the job hangs or its ranks disagree: ``report``
            it, additionally ``raise`` an ``IncidentError`` on all ranks, or ``off`` for no watchdog. None uses the
            setting of ``overlapscope record``. The first instance of a process decides for all of them.
        bucket_plan: which gradients to reduce together, in place of ``bucket_cap_mb``: the path of a plan written by
            ``overlapscope recommend``, or a loaded plan. Rank 0's plan is used. It takes effect when stock DDP would
            rebuild its buckets: after the first backward, or immediately where stock DDP doesn't rebuild
            (``find_unused_parameters``).
        kwargs: keyword arguments of ``torch.nn.parallel.DistributedDataParallel``. ``bucket_cap_mb="auto"`` chooses the
            buckets while the model trains: about 60 steps measure and try several plans.
        strategy: how and when gradients are summed: a name from ``strategies.registry`` or a custom ``Strategy``, the
            same on all ranks. None is ``overlapped``, which is what stock DDP does.

    Raises:
        DisagreementError: the ranks' modules differ.
        OverlapScopeError: the bucket plan can't be read, or is for another module; bucket sizes are given twice; or the
            strategy is unknown.

    Example::

        model = DistributedDataParallel(model, device_ids=[local_rank], trace="traces")
    """

    reducer: C10dReducer  # type: ignore[assignment] # it replaces torch's
    logger: Logger
    recorder: Recorder | None = None
    """Recorder of this process, if it is recorded."""
    _coverage: ReductionCoverage | None = None
    _replica: FingerprintedReplica | None = None
    shards: ParameterShards | None = None

    def __init__(
        self,
        *args: Any,
        trace: str | Path | None = None,
        on_incident: OnIncident | None = None,
        bucket_plan: str | Path | PlanFile | None = None,
        strategy: str | Strategy | None = None,
        **kwargs: Any,
    ) -> None:
        try:
            bound = TORCH_SIGNATURE.bind(self, *args, **kwargs)
        except TypeError:
            super().__init__(*args, **kwargs)  # raises torch's own error message
            raise
        trial = get_trial()
        tried = trial.change(bound) if trial is not None else {}
        given = DDPArguments.of(bound, bucket_plan, strategy)
        # Torch's constructor calls back to build the reducer before it returns.
        self._strategy = given.strategy
        self._is_auto = given.is_auto
        self._settings, self._arguments = given.settings, given.described
        self._given_plan = bucket_plan
        self._planned: BucketPlan | None = None
        self._needs_agreement = bool(given.all["init_sync"]) or bucket_plan is not None
        self._session = get_or_open_session(trace, on_incident, given.all["process_group"])
        self._model_number = 0
        with reattribute_warnings(callers=1), collective_context(CollectiveRole(role="construction")):
            super().__init__(*given.args, **given.kwargs)
        self._needs_agreement = False  # unpickling rebuilds the reducer, when no other rank takes part
        if trial is not None:
            trial.compress(self)
            if self.recorder is not None:
                self.recorder.set_model_info(self._model_number, "trial", tried)

    @property
    def bucket_plan(self) -> BucketPlan:
        """Return the active plan: the first follows the module's parameters, the second the observed gradient order."""
        return self._reducer.plan

    # -- construction --------------------------------------------------------------------------------------------

    def _build_params_for_reducer(self) -> tuple[list[nn.Parameter], list[bool]]:
        parameters, is_sparse = super()._build_params_for_reducer()
        self._specs = describe_parameters(self.module, parameters, is_sparse)
        if self._session is not None:
            settings = self._settings | collect_reduction_settings(self)
            self._model_number = self._session.add_model(self.module, self._specs, settings)
        self._plan_request = PlanRequest.NONE
        if self._is_auto:
            self._plan_request = PlanRequest.AUTO
        elif self._session is not None and is_asked_to_probe(self._session.folder):
            self._plan_request = PlanRequest.PROBE
        self._all_ranks_agree = self._needs_agreement and check_same_parameters(
            self._specs, self.process_group, self.device, plan_request=self._plan_request
        )
        return parameters, is_sparse

    def _ddp_init_helper(
        self,
        parameters: list[nn.Parameter],
        expect_sparse_gradient: list[bool],  # noqa: ARG002 - the specs have it
        param_to_name_mapping: dict[int, str],  # noqa: ARG002 - the specs have it
        static_graph: bool,
    ) -> None:
        self.recorder = self._session.record(self.process_group, self.device) if self._session is not None else None
        if self.recorder is not None:
            self.recorder.add_model(self._model_number, self.module, parameters, self._arguments)
            self._coverage = self.recorder.get_coverage(self._model_number)
        caps = Caps(
            cap_bytes=self.bucket_bytes_cap,
            is_default=self.bucket_bytes_cap_default,
            listed_bytes=tuple(getattr(self, "bucket_bytes_cap_list", ())),  # torch 2.13
        )
        is_final = self._strategy.pads_to is not None or (self.find_unused_parameters and not static_graph)
        plan = self._make_first_plan(parameters, caps, is_final=is_final)
        self._reducer = self._make_reducer(parameters, plan)
        if self._coverage is not None:
            self._coverage.find_unfinished = weakref.WeakMethod(self._reducer.find_unfinished)
        self._plans = self._make_plan_controller(caps)
        self.reducer = C10dReducer(self._reducer, self._plans)
        self.logger = self._make_logger(static_graph=static_graph)
        if self._strategy.averages_parameters:
            self._parameter_averaging = ParameterAveraging(parameters, self.process_group)
        self._register_hooks(parameters)
        if is_final:
            in_module_order = range(len(parameters))
            self._plans.begin_schedule(in_module_order[::-1], all_ranks_agree=self._all_ranks_agree)
        self._passing_sync_batchnorm_handle(self.module)

    def _make_first_plan(self, parameters: list[nn.Parameter], caps: Caps, *, is_final: bool) -> BucketPlan:
        """Return the first plan, after parameters have moved into shards if the strategy has any."""
        pads_to, ranks = self._strategy.pads_to, self.process_group.size()
        plan, self._planned = first_plan(
            self._specs,
            caps,
            self._given_plan,
            self._planned,
            buckets=None if pads_to is None else sharded_buckets(self.module, parameters, self._specs, caps, ranks),
            is_final=is_final,
            has_to_agree=self._needs_agreement,
            group=self.process_group,
            device=self.device,
        )
        self._given_plan = None  # its file may no longer exist where the wrapper is unpickled
        if pads_to is None:
            return plan
        self.shards = ParameterShards(self.module, parameters, plan, self.process_group, pads_to)
        return self.shards.layout

    def _make_reducer(self, parameters: list[nn.Parameter], plan: BucketPlan) -> Reducer:
        return Reducer(
            parameters,
            plan,
            self.process_group,
            find_unused_parameters=self.find_unused_parameters,
            gradient_as_bucket_view=self.gradient_as_bucket_view,
            skip_all_reduce_unused_params=getattr(self, "skip_all_reduce_unused_params", False),  # torch 2.8
            batched_grad_copy=getattr(self, "batched_grad_copy", False),  # torch 2.13
            events=make_reduction_events(self.recorder, self._model_number, parameters),
            strategy=self._strategy,
            hooks=None
            if self.shards is None
            else ReducerHooks(make_bucket=self.shards.make_bucket, updates=self.shards),
        )

    def _make_plan_controller(self, caps: Caps) -> PlanController:
        plans = PlanController(
            self._reducer,
            self._model_number,
            limits_bytes=caps.rebuilt_bytes,
            given=self._planned,
            plan_request=self._plan_request,
            requested_schedule=self._make_requested_schedule(),
            order=self._strategy.order,
            has_rebuilt=self.shards is not None,
        )
        if self._strategy.keeps_state:
            plans.keep_plan(f"strategy {self._strategy.name} keeps something of each bucket")
        return plans

    def _make_logger(self, *, static_graph: bool) -> Logger:
        logger = Logger(self._reducer, self.bucket_bytes_cap, self._plans)
        logger.set_construction_data_and_log(
            type(self.module).__name__,
            self.device_ids or [],
            -1 if self.output_device is None else self.output_device,
            self.broadcast_buffers,
            any(isinstance(module, nn.SyncBatchNorm) for module in self.module.modules()),
            static_graph,
        )
        return logger

    def _register_hooks(self, parameters: list[nn.Parameter]) -> None:
        if not is_reduced_in_python(self):  # otherwise Python hooks reduce
            self._reducer.register_hooks()
            if self._session is not None and self.recorder is not None:
                self._replica = self._session.replicas.add(self._model_number, self, self._reducer)
        if self.shards is not None:
            self.shards.reduce_with(self._reducer, self)
        # Hooks live as long as the parameters, which may be wrapped again after this wrapper is gone.
        weakref.finalize(self, self._reducer.remove_hooks).atexit = False
        if self.mixed_precision is not None:  # torch passes these indices to our reducer
            for index, parameter in enumerate(parameters):
                parameter._idx = index  # type: ignore[attr-defined]

    def defer(self, optimizer: torch.optim.Optimizer) -> None:  # noqa: D102 - documented in the base class
        super().defer(optimizer)
        if self.recorder is not None:
            self.recorder.set_model_info(self._model_number, "updates", "deferred")

    def _make_requested_schedule(self) -> RequestedSchedule | None:
        """Return the requested schedule, even if recording failed: other ranks expect this rank to follow it."""
        if self._plan_request is PlanRequest.PROBE:
            return Probing(self.recorder, self._model_number)
        if self._plan_request is PlanRequest.AUTO:
            return AutoBuckets(self._reducer, self.recorder, self._model_number, self.device)
        return None

    def __getstate__(self) -> dict[str, Any]:
        of_this_process = {
            "recorder",
            "_coverage",
            "_replica",
            "_reducer",
            "_plans",
            "_parameter_averaging",
            "shards",
        }
        state = {name: value for name, value in super().__getstate__().items() if name not in of_this_process}
        state["_session"] = None
        return state

    def __getattr__(self, name: str) -> Any:
        if name == "module" and (coverage := self.__dict__.get("_coverage")) is not None:
            with suppress(Exception):  # an error in the call site file must not break access to the module
                coverage.on_module_access(sys._getframe(1))
        return super().__getattr__(name)

    # -- forward -------------------------------------------------------------------------------------------------

    @_disable_dynamo
    def _pre_forward(self, *inputs: Any, **kwargs: Any) -> Any:
        if self.shards is not None:
            self.shards.on_forward_start(
                no_sync=not self.require_backward_grad_sync, is_joined=self._join_config.enable
            )
        self._reducer.events.on_forward_call()
        self._follow_schedule()
        if self._deferral is None:
            self._take_fingerprints()
        if torch.is_grad_enabled() and self.recorder is not None and self._session is not None:
            self._session.on_training_forward(has_uneven_inputs=self._join_config.enable)
            self.recorder.on_training_forward(self._model_number, inputs, kwargs)
        moved = super()._pre_forward(*inputs, **kwargs)
        no_sync = not self.require_backward_grad_sync
        self._reducer.events.on_forward_start(_phase_of_forward(), no_sync=no_sync)  # the schedule may change listeners
        return moved

    @_disable_dynamo
    def _post_forward(self, output: Any) -> Any:
        events = self._reducer.events
        events.on_forward_end(_phase_of_forward())
        output = super()._post_forward(output)
        if self._deferral is not None:  # all updates are complete only now
            self._take_fingerprints()
        if torch.is_grad_enabled() and not is_reduced_in_python(self):  # hooks on a compiled output can't be called
            events.expect_backward(output, no_sync=not self.require_backward_grad_sync)
        return output

    @_disable_dynamo
    def _inside_ddp_forward(self) -> Any:
        forward = super()._inside_ddp_forward()
        return forward if self._session is None else self._session.caught.watching_forward(forward)

    def _take_fingerprints(self) -> None:
        replica, reducer = self._replica, self._reducer
        if replica is None or self.recorder is None or not torch.is_grad_enabled():
            return
        if self.require_backward_grad_sync or replica.unreduced_updates:
            replica.on_forward_start(reducer.reductions, self.recorder.steps.step, reducer.hooks.updates.finish)
        else:
            replica.on_accumulating_forward(reducer.reductions)

    def _will_be_reduced(self) -> bool:
        """Return whether the forward that begins will be reduced, on all ranks."""
        return torch.is_grad_enabled() and self.require_backward_grad_sync and not self._join_config.enable

    def _follow_schedule(self) -> None:
        if self._will_be_reduced():
            self._plans.follow_schedule()

    def _match_all_reduce_for_bwd_pass(self) -> None:
        with self._shadowing_joined_rank():
            super()._match_all_reduce_for_bwd_pass()
        self._reducer.reductions += 1

    def _match_unused_params_allreduce(self) -> None:
        with self._shadowing_joined_rank(), collective_context(CollectiveRole(role="bitmap", model=self._model_number)):
            super()._match_unused_params_allreduce()

    def _shadowing_joined_rank(self) -> AbstractContextManager[None]:
        """Mark collectives launched inside as issued on behalf of a rank that has joined."""
        return self._session.position.has_joined() if self._session is not None else nullcontext()

    # -- communication other than buckets ------------------------------------------------------------------------

    def register_comm_hook(self, state: object, hook: Callable[..., Any]) -> None:
        """Register a hook that reduces the buckets, as in torch.

        Args:
            state: passed to the hook.
            hook: called as ``hook(state, bucket)``; returns a future of the tensor that replaces the buffer.

        Raises:
            RuntimeError: a hook is already registered.
            TypeError: the hook is not callable.
            ValueError: its annotations don't match those of a communication hook.
        """
        self._check_comm_hook(hook)
        self.logger._set_comm_hook_name(hook.__qualname__)
        self._comm_hooks.append((hook, state))
        self.reducer.register_comm_hook(state, hook)
        if self.recorder is not None:
            self.recorder.record_comm_hook(self._model_number, hook.__qualname__)

    def _register_builtin_comm_hook(self, comm_hook_type: BuiltinCommHookType) -> None:
        self.logger._set_comm_hook_name(str(comm_hook_type))
        self.reducer.register_builtin_comm_hook(comm_hook_type)
        if self.recorder is not None:
            self.recorder.record_comm_hook(self._model_number, str(comm_hook_type))

    def _default_broadcast_coalesced(
        self, bufs: list[torch.Tensor] | None = None, bucket_size: int | None = None, authoritative_rank: int = 0
    ) -> None:
        recorder = self.recorder
        if recorder is None:
            super()._default_broadcast_coalesced(bufs, bucket_size, authoritative_rank)
            return
        with recorder.broadcasts(self._model_number, self.modules_buffers if bufs is None else bufs):
            super()._default_broadcast_coalesced(bufs, bucket_size, authoritative_rank)


def _phase_of_forward() -> Phase:
    return Phase.FORWARD if torch.is_grad_enabled() else Phase.EVALUATION


DistributedDataParallel.__init__.__signature__ = SIGNATURE  # type: ignore[attr-defined]
