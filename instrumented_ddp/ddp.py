"""torch's ``DistributedDataParallel``, with our reducer in the place of the C++ one, and observed.

It is a subclass, so whatever asks ``isinstance(model, torch.nn.parallel.DistributedDataParallel)`` gets its answer
(accelerate, Lightning, torch.compile), and arguments, ``no_sync``, ``join``, pickling and the rest are torch's own.
"""

from __future__ import annotations

import inspect
import sys
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import _disable_dynamo, nn  # type: ignore[attr-defined]
from torch.distributed import BuiltinCommHookType  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import _get_default_group
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.utils._pytree import tree_leaves

from instrumented_ddp.agreement import agree_on_plan, check_same_parameters
from instrumented_ddp.auto.schedule import AutoBuckets
from instrumented_ddp.bucket_plan import NO_LIMIT, BucketPlan, describe_parameters, dtype_name, plan_in_module_order
from instrumented_ddp.c10d_reducer import C10dReducer
from instrumented_ddp.collective_log.bypass import Bypass
from instrumented_ddp.collective_log.collectives import Collectives, collectives_of_this_process, start_collective_log
from instrumented_ddp.collective_log.purposes import Purpose, launched_for
from instrumented_ddp.logging_data import Logger
from instrumented_ddp.metadata import is_plain, rank_of_this_process
from instrumented_ddp.observer import Observer
from instrumented_ddp.plan_schedule import Wish
from instrumented_ddp.planned_buckets import AUTO, is_auto, plan_for, refuse_caps_beside_plan
from instrumented_ddp.probing import Probing, is_asked_to_probe
from instrumented_ddp.recorder import Recorder, make_recorder
from instrumented_ddp.records import BucketRecords, buffer_records
from overlapscope.errors import OverlapScopeError
from overlapscope.model.plan_file import PlanFile
from overlapscope.trace.environment import OnIncident, recording_from_environment
from overlapscope.trace.format import Phase

_TORCH_SIGNATURE: Final = inspect.signature(TorchDDP.__init__)


class DistributedDataParallel(TorchDDP):
    """Data-parallel training of one module: gradients are averaged over a process group during backward.

    Args:
        args: those of ``torch.nn.parallel.DistributedDataParallel``, in its order.
        trace: record into this folder. None records if the process was started by ``overlapscope record``.
        on_incident: what the watchdog of a process that records does when the job hangs or its ranks disagree:
            ``report`` it, ``raise`` an ``IncidentError`` on all ranks as well, or ``off``, there is none. None leaves
            it to ``overlapscope record``. What the first instance of a process says holds for all of them.
        bucket_plan: which gradients to reduce together, in the place of ``bucket_cap_mb``: the path of a plan as
            ``overlapscope recommend`` writes it, or a plan already read. Rank 0's decides. It takes effect when stock
            DDP rebuilds its buckets: after the first backward; at once where it doesn't (``find_unused_parameters``).
        kwargs: those of ``torch.nn.parallel.DistributedDataParallel``, under its names. ``bucket_cap_mb="auto"`` has
            the buckets chosen while the model trains: some 60 steps measure and try several plans.

    Raises:
        DisagreementError: the ranks' modules differ.
        OverlapScopeError: the bucket plan can't be read, or is for another module; sizes of buckets are given twice.

    Example::

        model = DistributedDataParallel(model, device_ids=[local_rank], trace="traces")
    """

    reducer: C10dReducer  # type: ignore[assignment] # it stands in for torch's
    logger: Logger
    recorder: Recorder | None = None
    """Writes the trace of this process, if there is one."""
    _bypass: Bypass | None = None

    def __init__(
        self,
        *args: Any,
        trace: str | Path | None = None,
        on_incident: OnIncident | None = None,
        bucket_plan: str | Path | PlanFile | None = None,
        **kwargs: Any,
    ) -> None:
        try:
            arguments = _TORCH_SIGNATURE.bind(self, *args, **kwargs)
        except TypeError:
            super().__init__(*args, **kwargs)  # says what is wrong, in its own words
            raise
        if bucket_plan is not None:
            refuse_caps_beside_plan(arguments.arguments)
        self._is_auto = is_auto(arguments.arguments)
        if self._is_auto:
            arguments.arguments["bucket_cap_mb"] = None
        args, kwargs = arguments.args[1:], arguments.kwargs
        arguments.apply_defaults()
        # Torch's constructor calls back, to build the reducer, before it returns.
        self._arguments = {name: value for name, value in arguments.arguments.items() if is_plain(value)}
        if self._is_auto:
            self._arguments["bucket_cap_mb"] = AUTO
        if bucket_plan is not None:
            self._arguments["bucket_plan"] = str(bucket_plan) if isinstance(bucket_plan, str | Path) else "given"
        self._given_plan = bucket_plan
        self._planned: BucketPlan | None = None
        self._has_to_agree = bool(arguments.arguments["init_sync"]) or bucket_plan is not None
        self._collectives = _start_recording(trace, on_incident, arguments.arguments["process_group"])
        self._model_number = 0
        with _warnings_about_the_caller(), launched_for(Purpose(role="construction")):
            super().__init__(*args, **kwargs)
        self._has_to_agree = False  # unpickling builds a reducer anew, when nobody is there to agree

    @property
    def bucket_plan(self) -> BucketPlan:
        """The plan in force: the first one follows the module's parameters, the second the observed order."""
        return self.reducer.plan

    # -- construction --------------------------------------------------------------------------------------------

    def _build_params_for_reducer(self) -> tuple[list[nn.Parameter], list[bool]]:
        parameters, is_sparse = super()._build_params_for_reducer()
        names = {parameter: name for name, parameter in self.module.named_parameters()}
        self._specs = describe_parameters(
            [names[parameter] for parameter in parameters],
            parameters,
            is_sparse,
            {name: type(module).__name__ for name, module in self.module.named_modules()},
        )
        if self._collectives is not None:
            frozen = [name for name, parameter in self.module.named_parameters() if not parameter.requires_grad]
            self._model_number = self._collectives.add_model(self.module, self._specs, frozen)
        self._wish = Wish.NONE
        if self._is_auto:
            self._wish = Wish.AUTO
        elif self._collectives is not None and is_asked_to_probe(self._collectives.folder):
            self._wish = Wish.PROBE
        self._everybody_would = self._has_to_agree and check_same_parameters(
            self._specs, self.process_group, self.device, wish=self._wish
        )
        return parameters, is_sparse

    def _ddp_init_helper(
        self,
        parameters: list[nn.Parameter],
        expect_sparse_gradient: list[bool],  # noqa: ARG002 - the specs know
        param_to_name_mapping: dict[int, str],  # noqa: ARG002 - the specs know
        static_graph: bool,
    ) -> None:
        self.recorder = make_recorder(self._collectives, self.process_group, self.device)
        self._buffer_records: BucketRecords | None = None
        if self.recorder is not None:
            self._bypass = self.recorder.add_model(self._model_number, self.module, parameters, self._arguments)
        plan = self._first_plan(static_graph)
        self.reducer = C10dReducer(
            parameters,
            plan,
            self.process_group,
            rebuild_limits_bytes=self._rebuild_limits_bytes(),
            rebuild_plan=self._planned,
            bucket_bytes_cap=self.bucket_bytes_cap,
            wish=self._wish,
            find_unused_parameters=self.find_unused_parameters,
            gradient_as_bucket_view=self.gradient_as_bucket_view,
            skip_all_reduce_unused_params=getattr(self, "skip_all_reduce_unused_params", False),  # torch 2.8
            batched_grad_copy=getattr(self, "batched_grad_copy", False),  # torch 2.13
            observer=self.recorder,
            model_number=self._model_number,
        )
        if not getattr(self, "_use_python_reducer", False):  # there torch.compile reduces
            self.reducer.register_hooks()
        # Hooks live as long as the parameters, which may be wrapped again after this wrapper is gone.
        weakref.finalize(self, self.reducer._remove_autograd_hooks).atexit = False
        if self.mixed_precision is not None:  # torch calls our reducer by these numbers
            for index, parameter in enumerate(parameters):
                parameter._idx = index  # type: ignore[attr-defined]
        # Also where nothing can be recorded after all: other ranks have been told that this one takes part.
        if self._wish is Wish.PROBE:
            self.reducer.wished = Probing(self.recorder, self._model_number)
        elif self._wish is Wish.AUTO:
            self.reducer.wished = AutoBuckets(self.reducer, self.recorder, self._model_number, self.device)
        self.logger = Logger(self.reducer, parameters, self.process_group)
        self.reducer.set_logger(self.logger)
        self.logger.set_construction_data_and_log(
            type(self.module).__name__,
            self.device_ids or [],
            -1 if self.output_device is None else self.output_device,
            self.broadcast_buffers,
            any(isinstance(module, nn.SyncBatchNorm) for module in self.module.modules()),
            static_graph,
        )
        if not self.reducer.should_rebuild_buckets and not static_graph:
            with launched_for(Purpose(role="construction")):
                in_module_order = range(len(parameters))
                self.reducer.prepare_schedule(in_module_order[::-1], everybody_would=self._everybody_would)
        self._passing_sync_batchnorm_handle(self.module)

    def _first_plan(self, static_graph: bool) -> BucketPlan:
        """The plan of the first backward."""
        plan, why_not = plan_in_module_order(self._specs, self._first_limits_bytes(static_graph)), ""
        if self._given_plan is not None and self.process_group.rank() == 0:
            try:
                self._planned = plan_for(self._specs, self._given_plan)
            except OverlapScopeError as error:
                why_not = str(error)
        is_final = self.find_unused_parameters and not static_graph
        if is_final and self._planned is not None:
            plan = BucketPlan(self._specs, self._planned.buckets)
        if self._has_to_agree:
            plan = agree_on_plan(plan, self.process_group, self.device, why_not=why_not)
        if is_final and self._given_plan is not None:
            self._planned = plan
        self._given_plan = None  # its file may be gone where the wrapper is unpickled
        return plan

    def _first_limits_bytes(self, static_graph: bool) -> list[int]:
        """Until the order of the gradients is known there is one bucket, unless it will never be known.

        A collective of the user's own in the backward graph would otherwise meet our buckets in an order of its own.
        """
        limits_bytes = self._rebuild_limits_bytes()
        if self._caps_bytes() or (self.find_unused_parameters and not static_graph):
            return limits_bytes
        return [NO_LIMIT]

    def _rebuild_limits_bytes(self) -> list[int]:
        if caps_bytes := self._caps_bytes():
            return caps_bytes
        # Only a cap that is left at its default has a small first bucket.
        if not self.bucket_bytes_cap_default:
            return [self.bucket_bytes_cap]
        return [dist._DEFAULT_FIRST_BUCKET_BYTES, self.bucket_bytes_cap]  # type: ignore[attr-defined]

    def _caps_bytes(self) -> list[int]:
        """One for each bucket, if the user gave them (torch 2.13)."""
        return list(getattr(self, "bucket_bytes_cap_list", ()))

    def __getstate__(self) -> dict[str, Any]:
        state = super().__getstate__()
        state.pop("recorder", None)  # another process has its own
        state.pop("_bypass", None)
        state["_collectives"] = None
        return state

    def __getattr__(self, name: str) -> Any:
        if name == "module" and (bypass := self.__dict__.get("_bypass")) is not None:
            bypass.module_is_taken(sys._getframe(1))
        return super().__getattr__(name)

    # -- forward -------------------------------------------------------------------------------------------------

    @_disable_dynamo
    def _pre_forward(self, *inputs: Any, **kwargs: Any) -> Any:
        recorder = self.recorder
        if recorder is None:
            if self.reducer.plan_schedule is not None:
                self._follow_plan_schedule()
            return super()._pre_forward(*inputs, **kwargs)
        recorder.forward_is_called()
        if self.reducer.plan_schedule is not None:
            self._follow_plan_schedule()
        recorder.note_caller()
        if torch.is_grad_enabled():
            recorder.collectives.training_forward(has_uneven_inputs=self._join_config.enable)
        moved = super()._pre_forward(*inputs, **kwargs)
        phase = Phase.FORWARD if torch.is_grad_enabled() else Phase.EVALUATION
        recorder.enter(phase, no_sync=not self.require_backward_grad_sync)
        return moved

    @_disable_dynamo
    def _post_forward(self, output: Any) -> Any:
        recorder = self.recorder
        if recorder is None:
            output = super()._post_forward(output)
            meter = self.reducer.observer
            if meter is not None and torch.is_grad_enabled() and self.require_backward_grad_sync:
                _tell_of_backward(meter, output, no_sync=False)
            return output
        is_training = torch.is_grad_enabled()
        recorder.leave(Phase.FORWARD if is_training else Phase.EVALUATION)
        output = super()._post_forward(output)
        if is_training and not getattr(self, "_use_python_reducer", False):  # compiled, the hook can't be called
            _tell_of_backward(recorder, output, no_sync=not self.require_backward_grad_sync)
        return output

    def _follow_plan_schedule(self) -> None:
        if torch.is_grad_enabled() and self.require_backward_grad_sync and not self._join_config.enable:
            self.reducer.follow_plan_schedule()

    def _match_all_reduce_for_bwd_pass(self) -> None:
        with self.recorder.collectives.has_joined() if self.recorder is not None else nullcontext():
            super()._match_all_reduce_for_bwd_pass()
        self.reducer.reduction_was_matched()

    def _match_unused_params_allreduce(self) -> None:
        if self.recorder is None:
            super()._match_unused_params_allreduce()
            return
        purpose = Purpose(role="bitmap", model=self._model_number)
        with self.recorder.collectives.has_joined(), launched_for(purpose):
            super()._match_unused_params_allreduce()

    # -- communication that is not a bucket's --------------------------------------------------------------------

    def register_comm_hook(self, state: object, hook: Callable[..., Any]) -> None:
        """Let a hook reduce the buckets, as in torch.

        Args:
            state: passed to the hook.
            hook: called as ``hook(state, bucket)``; returns a future of the tensor that replaces the buffer.

        Raises:
            RuntimeError: there is a hook already.
            TypeError: it can't be called.
            ValueError: its annotations say that it is no hook.
        """
        self._check_comm_hook(hook)
        self.logger._set_comm_hook_name(hook.__qualname__)
        self._comm_hooks.append((hook, state))
        self.reducer.register_comm_hook(state, hook)
        if self.recorder is not None:
            self.recorder.comm_hook_reduces(self._model_number, hook.__qualname__)

    def _register_builtin_comm_hook(self, comm_hook_type: BuiltinCommHookType) -> None:
        self.logger._set_comm_hook_name(str(comm_hook_type))
        self.reducer.register_builtin_comm_hook(comm_hook_type)

    def _default_broadcast_coalesced(
        self, bufs: list[torch.Tensor] | None = None, bucket_size: int | None = None, authoritative_rank: int = 0
    ) -> None:
        recorder = self.recorder
        if recorder is None:
            super()._default_broadcast_coalesced(bufs, bucket_size, authoritative_rank)
            return
        if self._buffer_records is None:
            buffers = self.modules_buffers if bufs is None else bufs
            elements = sum(buffer.numel() for buffer in buffers)
            self._buffer_records = buffer_records(
                recorder.timeline.flags, self._model_number, elements, dtype_name(buffers[0].dtype)
            )
        with recorder.broadcasts(self._buffer_records):
            super()._default_broadcast_coalesced(bufs, bucket_size, authoritative_rank)


DistributedDataParallel.__init__.__signature__ = _TORCH_SIGNATURE.replace(  # type: ignore[attr-defined]
    parameters=[
        *_TORCH_SIGNATURE.parameters.values(),
        inspect.Parameter("trace", inspect.Parameter.KEYWORD_ONLY, default=None, annotation="str | Path | None"),
        inspect.Parameter("on_incident", inspect.Parameter.KEYWORD_ONLY, default=None, annotation="OnIncident | None"),
        inspect.Parameter(
            "bucket_plan", inspect.Parameter.KEYWORD_ONLY, default=None, annotation="str | Path | PlanFile | None"
        ),
    ]
)


@contextmanager
def _warnings_about_the_caller() -> Iterator[None]:
    """Torch's constructor warns of its caller's line, which is one of ours: pass its warnings on to our caller's."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    for warning in caught:
        warnings.warn(warning.message, warning.category, stacklevel=4)


def _start_recording(
    trace: str | Path | None, on_incident: OnIncident | None, group: dist.ProcessGroup | None
) -> Collectives | None:
    """The collective log of this process, if a recording is asked for and can be had."""
    existing = collectives_of_this_process()
    if trace is None and existing is not None:  # by attach(), or by a model before
        return existing
    try:
        recording = recording_from_environment(trace)
        if recording is None or (group is None and not dist.is_initialized()):  # torch says so in its own words
            return None
        rank = rank_of_this_process(group or _get_default_group())
        return start_collective_log(recording.folder, rank, on_incident or recording.on_incident)
    except OverlapScopeError as error:
        rank = dist.get_rank() if dist.is_initialized() else 0
        print(f"overlapscope: rank {rank} trains on, unrecorded: {error}", file=sys.stderr)
        return None


def _tell_of_backward(observer: Observer, output: Any, *, no_sync: bool) -> None:
    """Have the recorder told when the first gradient of the output arrives, and when autograd is done."""
    begin = _backward_hook(observer, no_sync=no_sync)
    leaves = [output] if isinstance(output, torch.Tensor) else tree_leaves(output)
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor) and leaf.requires_grad:
            leaf.register_hook(begin)


def _backward_hook(observer: Observer, *, no_sync: bool) -> Callable[[torch.Tensor], None]:
    def end() -> None:
        observer.leave(Phase.BACKWARD)

    def begin(_: torch.Tensor) -> None:
        if observer.phase is not Phase.BACKWARD:
            observer.note_caller()
            observer.enter(Phase.BACKWARD, no_sync=no_sync)
            torch.autograd.Variable._execution_engine.queue_callback(end)

    return begin
