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
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import _disable_dynamo, nn  # type: ignore[attr-defined]
from torch.distributed import BuiltinCommHookType  # type: ignore[attr-defined]
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.utils._pytree import tree_leaves

from instrumented_ddp.agreement import agree_on_plan, check_same_parameters
from instrumented_ddp.bucket_plan import NO_LIMIT, BucketPlan, describe_parameters, dtype_name, plan_in_module_order
from instrumented_ddp.c10d_reducer import C10dReducer
from instrumented_ddp.logging_data import Logger
from instrumented_ddp.metadata import rank_of_this_process
from instrumented_ddp.recorder import Recorder, recorder_of_this_process
from instrumented_ddp.records import BucketRecords, buffer_records
from overlapscope.errors import OverlapScopeError
from overlapscope.trace.environment import recording_from_environment
from overlapscope.trace.format import Phase

_TORCH_SIGNATURE: Final = inspect.signature(TorchDDP.__init__)


class DistributedDataParallel(TorchDDP):
    """Data-parallel training of one module: gradients are averaged over a process group during backward.

    Args:
        args: those of ``torch.nn.parallel.DistributedDataParallel``, in its order.
        trace: record into this folder. None records if the process was started by ``overlapscope record``.
        kwargs: those of ``torch.nn.parallel.DistributedDataParallel``, under its names.

    Raises:
        DisagreementError: the ranks' modules differ.

    Example::

        model = DistributedDataParallel(model, device_ids=[local_rank], trace="traces")
    """

    reducer: C10dReducer  # type: ignore[assignment] # it stands in for torch's
    logger: Logger
    recorder: Recorder | None = None
    """Writes the trace of this process, if there is one."""

    def __init__(self, *args: Any, trace: str | Path | None = None, **kwargs: Any) -> None:
        try:
            arguments = _TORCH_SIGNATURE.bind(self, *args, **kwargs)
        except TypeError:
            super().__init__(*args, **kwargs)  # says what is wrong, in its own words
            raise
        arguments.apply_defaults()
        # Torch's constructor calls back, to build the reducer, before it returns.
        self._trace = None if trace is None else str(trace)
        self._arguments = {name: value for name, value in arguments.arguments.items() if _is_plain(value)}
        self._has_to_agree = bool(arguments.arguments["init_sync"])
        with _warnings_about_the_caller():
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
        self._specs = describe_parameters([names[parameter] for parameter in parameters], parameters, is_sparse)
        if self._has_to_agree:
            check_same_parameters(self._specs, self.process_group, self.device)
        return parameters, is_sparse

    def _ddp_init_helper(
        self,
        parameters: list[nn.Parameter],
        expect_sparse_gradient: list[bool],  # noqa: ARG002 - the specs know
        param_to_name_mapping: dict[int, str],  # noqa: ARG002 - the specs know
        static_graph: bool,
    ) -> None:
        self.recorder = _make_recorder(self._trace, self.process_group, self.device)
        self._buffer_records: BucketRecords | None = None
        self._model_number = 0
        if self.recorder is not None:
            self._model_number = self.recorder.add_model(self.module, parameters, self._arguments)
        plan = plan_in_module_order(self._specs, self._first_limits_bytes(static_graph))
        if self._has_to_agree:
            plan = agree_on_plan(plan, self.process_group, self.device)
        self.reducer = C10dReducer(
            parameters,
            plan,
            self.process_group,
            rebuild_limits_bytes=self._rebuild_limits_bytes(),
            bucket_bytes_cap=self.bucket_bytes_cap,
            find_unused_parameters=self.find_unused_parameters,
            gradient_as_bucket_view=self.gradient_as_bucket_view,
            skip_all_reduce_unused_params=getattr(self, "skip_all_reduce_unused_params", False),  # torch 2.8
            batched_grad_copy=getattr(self, "batched_grad_copy", False),  # torch 2.13
            recorder=self.recorder,
            model_number=self._model_number,
        )
        if not getattr(self, "_use_python_reducer", False):  # there torch.compile reduces
            self.reducer.register_hooks()
        # Hooks live as long as the parameters, which may be wrapped again after this wrapper is gone.
        weakref.finalize(self, self.reducer._remove_autograd_hooks).atexit = False
        if self.mixed_precision is not None:  # torch calls our reducer by these numbers
            for index, parameter in enumerate(parameters):
                parameter._idx = index  # type: ignore[attr-defined]
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
        self._passing_sync_batchnorm_handle(self.module)

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
        return state

    # -- forward -------------------------------------------------------------------------------------------------

    @_disable_dynamo
    def _pre_forward(self, *inputs: Any, **kwargs: Any) -> Any:
        recorder = self.recorder
        if recorder is None:
            return super()._pre_forward(*inputs, **kwargs)
        recorder.forward_is_called()
        recorder.note_caller()
        moved = super()._pre_forward(*inputs, **kwargs)
        phase = Phase.FORWARD if torch.is_grad_enabled() else Phase.EVALUATION
        recorder.enter(phase, no_sync=not self.require_backward_grad_sync)
        return moved

    @_disable_dynamo
    def _post_forward(self, output: Any) -> Any:
        recorder = self.recorder
        if recorder is None:
            return super()._post_forward(output)
        is_training = torch.is_grad_enabled()
        recorder.leave(Phase.FORWARD if is_training else Phase.EVALUATION)
        output = super()._post_forward(output)
        if is_training and not getattr(self, "_use_python_reducer", False):  # compiled, the hook can't be called
            _tell_of_backward(recorder, output, no_sync=not self.require_backward_grad_sync)
        return output

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
        recorder.launches(self._buffer_records)
        start = recorder.timeline.mark()
        super()._default_broadcast_coalesced(bufs, bucket_size, authoritative_rank)
        recorder.timeline.write(self._buffer_records.collective, recorder.step, start, recorder.timeline.mark())


DistributedDataParallel.__init__.__signature__ = _TORCH_SIGNATURE.replace(  # type: ignore[attr-defined]
    parameters=[
        *_TORCH_SIGNATURE.parameters.values(),
        inspect.Parameter("trace", inspect.Parameter.KEYWORD_ONLY, default=None, annotation="str | Path | None"),
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


def _is_plain(value: object) -> bool:
    """Whether it can be shown in a recording as it is."""
    if isinstance(value, list | tuple):
        return all(_is_plain(item) for item in value)
    return value is None or isinstance(value, bool | int | float | str)


def _make_recorder(trace: str | None, group: dist.ProcessGroup, device: torch.device) -> Recorder | None:
    """The recorder that is asked for, if it can be had. A recording that fails never stops a training run."""
    try:
        recording = recording_from_environment(trace)
        if recording is None:
            return None
        return recorder_of_this_process(
            recording.folder,
            group=group,
            device=device,
            detail=recording.detail,
            limit_bytes=recording.limit_bytes,
        )
    except OverlapScopeError as error:
        print(f"overlapscope: rank {rank_of_this_process(group)} trains on, unrecorded: {error}", file=sys.stderr)
        return None


def _tell_of_backward(recorder: Recorder, output: Any, *, no_sync: bool) -> None:
    """Have the recorder told when the first gradient of the output arrives, and when autograd is done."""
    begin = _backward_hook(recorder, no_sync=no_sync)
    leaves = [output] if isinstance(output, torch.Tensor) else tree_leaves(output)
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor) and leaf.requires_grad:
            leaf.register_hook(begin)


def _backward_hook(recorder: Recorder, *, no_sync: bool) -> Callable[[torch.Tensor], None]:
    def end() -> None:
        recorder.leave(Phase.BACKWARD)

    def begin(_: torch.Tensor) -> None:
        if recorder.phase is not Phase.BACKWARD:
            recorder.note_caller()
            recorder.enter(Phase.BACKWARD, no_sync=no_sync)
            torch.autograd.Variable._execution_engine.queue_callback(end)

    return begin
