"""The public wrapper: arguments and behaviour of ``torch.nn.parallel.DistributedDataParallel``, observed."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.distributed.distributed_c10d import _get_default_group
from torch.distributed.utils import _sync_module_states, _sync_params_and_buffers, _to_kwargs
from torch.utils._pytree import tree_leaves

from instrumented_ddp.agreement import broadcast_numbers, check_same_parameters
from instrumented_ddp.buckets import BucketPlan, caps_in_bytes, describe_parameters, dtype_name, plan_buckets
from instrumented_ddp.lane import lane_of
from instrumented_ddp.recorder import Recorder, recorder_of_this_process
from instrumented_ddp.records import BucketRecords, PlanRecords, buffer_records
from instrumented_ddp.reducer import Reducer
from overlapscope.errors import OverlapScopeError
from overlapscope.trace.environment import recording_from_environment
from overlapscope.trace.format import Phase

_BROADCAST_BYTES: Final = 250 * 1024 * 1024
"""Tensors are broadcast in portions of this size, as in torch."""


class DistributedDataParallel(nn.Module):
    """Data-parallel training of one module: gradients are averaged over a process group during backward.

    The arguments are those of torch's class, in its order. One that is not served yet is refused, never ignored.

    Args:
        module: the module to train; its state is broadcast from rank 0.
        device_ids: the one CUDA device of the module, to which inputs are moved; None for a CPU module.
        output_device: as in torch: None or that device.
        broadcast_buffers: broadcast rank 0's buffers before each forward that follows a reduced backward.
        process_group: the ranks that train together; None for the default group.
        bucket_cap_mb: size of a bucket in MB of 1024² bytes. None is 25 with a first bucket of 1 MB.
        gradient_as_bucket_view: gradients are views of the buckets: less memory, fewer copies.
        batched_grad_copy: accepted either way: gradients are always copied a bucket at a time.
        forward_sync_buffers: the newer name of ``broadcast_buffers``; it leaves the first broadcast on.
        trace: record into this folder. None records if the process was started by ``overlapscope record``.

    Raises:
        ValueError: an argument that is not served, or does not go with the module.
        DisagreementError: the ranks' modules differ.

    Example::

        model = DistributedDataParallel(model, device_ids=[local_rank], trace="traces")
    """

    def __init__(
        self,
        module: nn.Module,
        device_ids: Sequence[int | torch.device] | None = None,
        output_device: int | torch.device | None = None,
        dim: int = 0,
        broadcast_buffers: bool | None = None,
        init_sync: bool = True,
        process_group: dist.ProcessGroup | None = None,
        bucket_cap_mb: float | None = None,
        find_unused_parameters: bool = False,
        check_reduction: bool = False,
        gradient_as_bucket_view: bool = False,
        static_graph: bool = False,
        delay_all_reduce_named_params: Any = None,
        param_to_hook_all_reduce: Any = None,
        mixed_precision: Any = None,
        device_mesh: Any = None,
        skip_all_reduce_unused_params: bool = False,
        bucket_cap_mb_list: Sequence[int] | None = None,
        batched_grad_copy: bool = False,  # noqa: ARG002 - it is always so
        forward_sync_buffers: bool | None = None,
        *,
        trace: str | Path | None = None,
    ) -> None:
        super().__init__()
        _refuse_unserved(
            dim=dim != 0,
            init_sync=not init_sync,
            find_unused_parameters=find_unused_parameters,
            check_reduction=check_reduction,
            static_graph=static_graph,
            delay_all_reduce_named_params=delay_all_reduce_named_params is not None,
            param_to_hook_all_reduce=param_to_hook_all_reduce is not None,
            mixed_precision=mixed_precision is not None,
            device_mesh=device_mesh is not None,
            skip_all_reduce_unused_params=skip_all_reduce_unused_params,
            bucket_cap_mb_list=bucket_cap_mb_list is not None,
        )
        self.process_group: dist.ProcessGroup = process_group or _get_default_group()
        self.module = module
        self.device = _device_of(module)
        self.device_ids = _checked_device_ids(self.device, device_ids, output_device)
        self.parameters_to_ignore = frozenset(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))
        self.gradient_as_bucket_view = gradient_as_bucket_view
        self.broadcast_buffers = (
            (broadcast_buffers is not False) if forward_sync_buffers is None else forward_sync_buffers
        )
        self.require_backward_grad_sync = True
        self.require_forward_param_sync = True

        trained = _trained_parameters(module, self.parameters_to_ignore)
        self._specs = describe_parameters(trained.items())
        check_same_parameters(self._specs, self.process_group, self.device)
        _sync_module_states(
            module,
            self.process_group,
            _BROADCAST_BYTES,
            src=0,
            params_and_buffers_to_ignore=self.parameters_to_ignore,
            broadcast_buffers=broadcast_buffers is not False or forward_sync_buffers is not None,
        )
        # A cap that differs between ranks is harmless: rank 0's decides, as in torch.
        self._caps_bytes = broadcast_numbers(caps_in_bytes(bucket_cap_mb), self.process_group, self.device)

        arguments = {
            "bucket_cap_mb": bucket_cap_mb,
            "broadcast_buffers": self.broadcast_buffers,
            "gradient_as_bucket_view": gradient_as_bucket_view,
        }
        self.recorder = _make_recorder(trace, self.process_group, self.device)
        self._model_number = self.recorder.add_model(module, list(trained.values()), arguments) if self.recorder else 0
        self._buffer_records: BucketRecords | None = None
        self._plan_epoch = 0
        backward_order = range(len(self._specs) - 1, -1, -1)
        plan = plan_buckets(self._specs, backward_order, *self._caps_bytes)
        self.reducer = Reducer(
            list(trained),
            list(trained.values()),
            plan,
            lane_of(self.device, self.process_group, self.recorder),
            world_size=self.process_group.size(),
            gradient_as_bucket_view=gradient_as_bucket_view,
            recorder=self.recorder,
            plan_records=self._record_plan(plan, "construction"),
            board=self._make_board(),
        )
        # Hooks live as long as the parameters, which may be wrapped again after this wrapper is gone.
        weakref.finalize(self, self.reducer.remove_hooks).atexit = False

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the module; its gradients are averaged in the backward that follows."""
        recorder = self.recorder
        is_training = torch.is_grad_enabled()
        if recorder is not None:
            recorder.forward_is_called()
            recorder.note_caller()
        if is_training:
            self._rebuild_buckets_once()
        if self.require_forward_param_sync and self.broadcast_buffers:
            self._sync_buffers()
        phase = Phase.FORWARD if is_training else Phase.EVALUATION
        if recorder is not None:
            recorder.enter(phase, no_sync=not self.require_backward_grad_sync)
        if self.device_ids:
            moved_inputs, moved_kwargs = _to_kwargs(inputs, kwargs, self.device, True)
            inputs, kwargs = moved_inputs[0], moved_kwargs[0]
        output = self.module(*inputs, **kwargs)
        if recorder is not None:
            recorder.leave(phase)

        will_reduce = is_training and self.require_backward_grad_sync
        if will_reduce:
            self.reducer.prepare_for_backward()
        self.require_forward_param_sync = will_reduce
        if recorder is not None and is_training:
            _tell_of_backward(recorder, output, no_sync=not will_reduce)
        return output

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients instead of averaging them, in passes whose forward is inside."""
        before = self.require_backward_grad_sync
        self.require_backward_grad_sync = False
        try:
            yield
        finally:
            self.require_backward_grad_sync = before

    @property
    def bucket_plan(self) -> BucketPlan:
        """The plan in force: the first one follows the module's parameters, the second the observed order."""
        return self.reducer.plan

    def _rebuild_buckets_once(self) -> None:
        """After the first reduced backward: bucket parameters in the order in which rank 0 saw their gradients."""
        order = self.reducer.gradient_order
        if order is None or len(order) < len(self._specs):
            return
        self.reducer.gradient_order = None
        order = broadcast_numbers(order, self.process_group, self.device)
        self._plan_epoch += 1
        plan = plan_buckets(self._specs, order, *self._caps_bytes)
        self.reducer.adopt(plan, self._record_plan(plan, "rebuild"))

    def _record_plan(self, plan: BucketPlan, reason: str) -> PlanRecords | None:
        if self.recorder is None:
            return None
        return self.recorder.plan_takes_effect(self._model_number, self._plan_epoch, plan, reason)

    def _make_board(self) -> memoryview[int] | None:
        if self.recorder is None or self.recorder.detail == "buckets":
            return None
        return self.recorder.readiness_board(self._model_number, len(self._specs))

    def _sync_buffers(self) -> None:
        # Buffers are looked up anew, because a module may have replaced them.
        buffers = [b for name, b in self.module.named_buffers() if name not in self.parameters_to_ignore]
        if not buffers:
            return
        with torch.no_grad(), _unsafe_preserve_version_counter(tuple(buffers)):
            if self.recorder is None:
                _sync_params_and_buffers(self.process_group, buffers, _BROADCAST_BYTES, 0)
            else:
                self._sync_buffers_recorded(self.recorder, buffers)

    def _sync_buffers_recorded(self, recorder: Recorder, buffers: list[torch.Tensor]) -> None:
        if self._buffer_records is None:
            elements = sum(buffer.numel() for buffer in buffers)
            self._buffer_records = buffer_records(
                recorder.timeline.flags, self._model_number, elements, dtype_name(buffers[0].dtype)
            )
        records = self._buffer_records
        recorder.launches(records)
        start = recorder.timeline.mark()
        _sync_params_and_buffers(self.process_group, buffers, _BROADCAST_BYTES, 0)
        recorder.timeline.write(records.collective, recorder.step, start, recorder.timeline.mark())


def _refuse_unserved(**is_wanted: bool) -> None:
    for name, wanted in is_wanted.items():
        if wanted:
            raise ValueError(
                f"instrumented_ddp.DistributedDataParallel does not serve the argument {name} yet: leave it at its "
                "default, or use torch.nn.parallel.DistributedDataParallel for this model."
            )


def _trained_parameters(module: nn.Module, ignored: frozenset[str]) -> dict[str, nn.Parameter]:
    """The parameters to reduce, by name, each once however many modules share it."""
    trained = {name: p for name, p in module.named_parameters() if p.requires_grad and name not in ignored}
    if not trained:
        raise ValueError(
            "DistributedDataParallel is not needed when a module doesn't have any parameter that requires a gradient."
        )
    for name, submodule in module.named_modules():
        if getattr(submodule, "sparse", False) and isinstance(submodule, nn.Embedding | nn.EmbeddingBag):
            raise ValueError(
                f"instrumented_ddp.DistributedDataParallel does not serve sparse gradients yet: {name or 'the module'} "
                "is an embedding with sparse=True."
            )
    return trained


def _device_of(module: nn.Module) -> torch.device:
    devices = {parameter.device for parameter in module.parameters()}
    if len(devices) > 1:
        raise ValueError(
            "instrumented_ddp.DistributedDataParallel does not serve modules that span several devices yet, but the "
            f"parameters are on {', '.join(sorted(map(str, devices)))}."
        )
    if not devices:
        raise ValueError(
            "DistributedDataParallel is not needed when a module doesn't have any parameter that requires a gradient."
        )
    return devices.pop()


def _checked_device_ids(
    device: torch.device,
    device_ids: Sequence[int | torch.device] | None,
    output_device: int | torch.device | None,
) -> list[int] | None:
    """The CUDA device number in a list, or None, as torch keeps it."""
    if device_ids is not None and len(device_ids) > 1:
        raise ValueError("device_ids can only be None or contain a single element.")
    if not device_ids and output_device is None:
        return None
    given = [torch.device("cuda", d) if isinstance(d, int) else torch.device(d) for d in device_ids or ()]
    if output_device is not None:
        given.append(torch.device("cuda", output_device) if isinstance(output_device, int) else output_device)
    if device.type == "cpu" or any(d != device for d in given):
        raise ValueError(
            "DistributedDataParallel device_ids and output_device must name the CUDA device of the module, and be "
            f"None for a CPU module, but got device_ids {device_ids}, output_device {output_device}, and module "
            f"parameters on {device}."
        )
    return [device.index]


def _make_recorder(trace: str | Path | None, group: dist.ProcessGroup, device: torch.device) -> Recorder | None:
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
        print(f"overlapscope: rank {dist.get_rank()} trains on, unrecorded: {error}", file=sys.stderr)
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
