"""Events of the reduction of one model: an interface of no-ops for the reducer, and how the recorder writes them.

Each event is raised in one place: the reducer, its averaging and the wrapper call ``ReductionEvents`` for the model;
``RecordedReduction`` is its implementation for a model that is recorded. It writes to an ``EventSink``, which is the
recorder of the process, or a meter for some steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch.utils._pytree import tree_leaves

from instrumented_ddp.bucket_plan import BucketPlan
from instrumented_ddp.collectives.completion import CompletionWatch
from instrumented_ddp.collectives.log import CollectiveRecorder
from instrumented_ddp.recording.background import never_raise, never_raising
from instrumented_ddp.recording.records import BucketRecords, PlanRecords, SegmentTable, make_bitmap_records
from instrumented_ddp.recording.runtime_stats import RuntimeStats
from instrumented_ddp.recording.steps import Steps
from instrumented_ddp.recording.timing import DeviceTimer, HostTimer, Mark, RecordLog, make_bucket_timer, make_timer
from overlapscope.trace.clocks import host_now_ns
from overlapscope.trace.environment import Detail
from overlapscope.trace.live_files import READY
from overlapscope.trace.schema import Phase


def make_private_ready_times(parameters: int) -> memoryview[int]:
    """Return zeros for the ready times of parameters, in memory that no other process sees."""
    return memoryview(bytearray(8 * parameters)).cast("q")


class ReductionEvents:
    """Listener of one model's passes, from a forward that begins to gradients that are final.

    This class keeps only what stock DDP keeps: the times in ``_get_ddp_logging_data()``. Methods are called on the hot
    path, in about the order in which they are defined here.

    Args:
        stats: runtime statistics of the model.
    """

    sink: EventSink | None = None
    """Sink of what communicators and strategies record themselves, if the model is recorded."""

    def __init__(self, stats: RuntimeStats) -> None:
        self.stats = stats

    @property
    def gradient_times(self) -> Literal["none", "host", "device"]:
        """Return where the ready time of every gradient is taken; on a device ``on_gradient`` is called for each."""
        return "none"

    def allocate_ready_times(self, parameters: int) -> memoryview[int]:
        """Return memory for the reducer, a time by parameter: 0 until the gradient has arrived in this pass."""
        return make_private_ready_times(parameters)

    def on_plan_adopted(self, epoch: int, plan: BucketPlan, reason: str) -> None:
        """Note that a plan is active from now on."""

    def records_of(self, bucket: int) -> BucketRecords | None:  # noqa: ARG002
        """Return the records of a bucket's all-reduce."""
        return None

    def get_gather_records(self, bucket: int) -> BucketRecords | None:  # noqa: ARG002
        """Return the records of the all-gather of its parameters."""
        return None

    @property
    def bitmap_records(self) -> BucketRecords | None:
        """Return the records of the all-reduce of the bitmap of used parameters."""
        return None

    # -- forward and phases --------------------------------------------------------------------------------------

    def on_forward_call(self) -> None:
        """Note that the wrapper was called."""

    def on_forward_start(self, phase: Phase, *, no_sync: bool) -> None:
        """Note that the module's forward begins, in a training or an evaluation."""

    def on_forward_end(self, phase: Phase) -> None:
        """Note that the module's forward has ended."""

    def expect_backward(self, output: Any, *, no_sync: bool) -> None:
        """Expect a backward after a forward has ended: it begins with the first gradient of the output."""

    @contextmanager
    def interrupting_phase(self, *, no_sync: bool) -> Iterator[Callable[[Phase], None]]:  # noqa: ARG002
        """Interrupt the open phase, usually a forward; it continues after the phases that are entered inside."""
        yield lambda _: None

    @contextmanager
    def waiting_for_parameters(self, *, no_sync: bool) -> Iterator[None]:  # noqa: ARG002
        """Wait inside for parameters that are in flight."""
        yield

    # -- backward ------------------------------------------------------------------------------------------------

    def on_gradients_expected(self) -> None:
        """Note that a forward has ended whose backward will be reduced."""
        self.stats.mark("backward_compute_start")

    def on_gradient(self, index: int, *, is_expected: bool) -> int:  # noqa: ARG002
        """Note that a gradient was accumulated. Not called for each one of those that are only counted.

        Args:
            is_expected: false if it is not reduced in this pass.

        Returns:
            The ready time of the gradient, or ``READY`` if only the fact is known.
        """
        return READY

    def on_unexpected_gradient(self, index: int) -> None:
        """Note that a gradient has arrived that no reduction waits for."""

    def on_bucket_ready(self, device: torch.device) -> None:
        """Note that the last gradient of a bucket has arrived."""

    def on_copy_in_end(self, bucket: int, device: torch.device) -> None:
        """Note that the gradients of a bucket that were not yet in its buffer have been copied to it."""

    def on_bucket_launch(self, bucket: int, buffer: torch.Tensor) -> None:
        """Note that a bucket is about to be reduced: its buffer holds the gradients of this rank alone."""

    def on_first_launch(self) -> None:
        """Note that the first bucket of a pass is about to be launched."""
        self.stats.mark("backward_comm_start")

    def on_gradients_launched(self, indices: tuple[int, ...], ready_ns: memoryview[int]) -> None:
        """Note that everything that could be launched when a bucket was ready has been launched.

        Args:
            indices: indices of the bucket's parameters.
            ready_ns: ready times of all parameters.
        """

    def on_backward_over(self) -> None:
        """Note that everything has been launched and autograd has finished; only averages are waited for."""
        self.stats.mark("backward_compute_end")

    def on_copy_out_start(self, device: torch.device) -> None:
        """Note that a bucket's average is available and is about to be copied to the parameters' gradients."""

    def on_copy_out_end(self, bucket: int, device: torch.device) -> None:
        """Note that the average was copied to the parameters' gradients."""

    def on_finalized(self) -> None:
        """Note that the gradients of a pass are final."""
        self.stats.mark("backward_comm_end")

    def failed(self) -> None:
        """Note that an error occurred and is about to be raised in the training."""


class EventSink:
    """Destination of the records of all models: log, timers, steps. What is not overridden records timings alone.

    Args:
        log: receives the records.
        device: device on which the modules compute; phases and steps are timed on it.
        completions: reports when collectives end.
    """

    detail: Detail = "parameters"
    """``parameters`` if the ready time of every gradient is wanted as well, in full steps."""
    is_on: bool = True
    """False while recording is off; then ``is_full`` is false too. Changes between steps only."""
    is_full: bool = True
    """True if this step is recorded in full: also what costs, such as copies. A light step has phases, and when buckets
    are ready, launched and over. Changes between steps only."""
    collectives: CollectiveRecorder | None = None
    """Log of all collectives, if there is one."""
    segments: SegmentTable | None = None
    """Table of segments of bucket sums, if they are recorded."""
    steps: Steps
    """Step and phase that records belong to."""

    def __init__(self, log: RecordLog, device: torch.device, completions: CompletionWatch) -> None:
        self.log = log
        self.completions = completions
        self.timer = make_timer(device, log)
        self.timers = {device: make_bucket_timer(device, self.timer)}

    def get_timer(self, device: torch.device) -> DeviceTimer:
        """Return the timer of one of the devices that modules span."""
        timer = self.timers.get(device)
        if timer is None:
            timer = self.timers[device] = make_bucket_timer(device, make_timer(device, self.log))
        return timer

    def activate_plan(self, model: int, epoch: int, plan: BucketPlan, reason: str) -> PlanRecords:  # noqa: ARG002
        """Return the packed records of a plan's buckets and parameters, as it becomes active."""
        return PlanRecords(self.timer.flags, model, epoch, plan)

    def map_ready_times(self, model: int, parameters: int) -> memoryview[int]:  # noqa: ARG002
        """Return memory for a model's ready times by parameter."""
        return make_private_ready_times(parameters)

    def record_launch(self, records: BucketRecords) -> int:  # noqa: ARG002
        """Record that a collective is about to be enqueued, and return the time, in host nanoseconds."""
        return host_now_ns()

    def update_call_site(self) -> None:
        """Use the running line of user code as the call site of what follows."""

    def on_backward(self, model: int, *, no_sync: bool) -> None:
        """Note that a backward has reached the output of a model."""

    def on_unreduced_gradient(self, model: int, index: int) -> None:
        """Note that a gradient has arrived that no reduction waits for."""

    def on_gradients_reduced(self, model: int) -> None:
        """Note that the gradients of a pass are final."""

    def check_gradients(self, model: int, bucket: int, buffer: torch.Tensor) -> None:
        """Look at the gradients of a bucket that is about to be reduced."""

    def on_interrupted_backward(self, step: int) -> None:
        """Note that an exception has come out of the latest backward, in this step, and training continues."""

    def incident(self) -> None:
        """Note that an incident occurred in the training."""

    def disable_recording(self, error: Exception) -> None:
        """Report an internal error once, and stop recording."""
        raise NotImplementedError


class BackwardTracker:
    """Reports the backwards of one model: each from the first gradient of a forward's output until autograd is done.

    Args:
        sink: receives the events.
        model: number of the model.
        on_end: called when autograd has finished a backward, with whether it was under ``no_sync()``.
    """

    def __init__(self, sink: EventSink, model: int, on_end: Callable[[bool], None] | None = None) -> None:
        self._sink = sink
        self._model = model
        self._on_end = on_end
        self._is_running = False
        self._step = 0
        """Step in which the latest backward began; a caller that catches its exception may still update."""

    @property
    def is_running(self) -> bool:
        """Return whether autograd has begun a backward and has not finished it."""
        return self._is_running

    def disable_recording(self, error: Exception) -> None:
        """Disable recording after an internal error."""
        self._sink.disable_recording(error)

    @never_raise
    def expect(self, output: Any, *, no_sync: bool) -> None:
        """Expect a backward after a forward has ended: it begins with the first gradient of the output.

        Args:
            output: output of the forward, of any structure.
            no_sync: whether its gradients will not be reduced.
        """

        def begin(_: torch.Tensor) -> None:
            self.begin(no_sync=no_sync)

        for tensor in computed(output):
            tensor.register_hook(begin)

    @never_raise
    def begin(self, *, no_sync: bool) -> None:
        """Note that autograd has reached the model; does nothing if that is known."""
        if self._is_running:
            return
        sink = self._sink
        self._is_running, self._step = True, sink.steps.step
        if sink.steps.phase is not Phase.BACKWARD:
            sink.update_call_site()
            sink.steps.enter(Phase.BACKWARD, no_sync=no_sync)
        sink.on_backward(self._model, no_sync=no_sync)

        def end() -> None:
            self._is_running = False
            sink.steps.leave(Phase.BACKWARD)
            if self._on_end is not None:
                self._on_end(no_sync)

        torch.autograd.Variable._execution_engine.queue_callback(never_raising(end, self.disable_recording))

    @never_raise
    def on_forward_start(self) -> None:
        """Report a backward that autograd has not finished: an exception came out of it and was caught."""
        if self._is_running:
            self._is_running = False
            self._sink.on_interrupted_backward(self._step)


def computed(output: Any) -> Iterator[torch.Tensor]:
    """Yield the output's tensors that have a backward; a hook on a parameter would be kept from every step."""
    for leaf in [output] if isinstance(output, torch.Tensor) else tree_leaves(output):
        if isinstance(leaf, torch.Tensor) and leaf.grad_fn is not None:
            yield leaf


def make_reduction_events(
    sink: EventSink | None, model: int, parameters: Sequence[torch.nn.Parameter]
) -> ReductionEvents:
    """Return the listener for a model's reducer, which writes records only if the model is recorded.

    Args:
        model: number of the model in the recording.
        parameters: parameters of the reducer.
    """
    device = parameters[0].device
    stats = RuntimeStats(device)
    return ReductionEvents(stats) if sink is None else RecordedReduction(sink, model, device, stats, len(parameters))


class RecordedReduction(ReductionEvents):
    """Recorder of the events of one model. An error here ends the recording, never the training.

    Args:
        sink: the recorder of the process, or a meter for some steps.
        model: number of the model in the recording.
        device: device of its first parameter.
        stats: runtime statistics of the model.
        parameters: number of its parameters.
    """

    def __init__(self, sink: EventSink, model: int, device: torch.device, stats: RuntimeStats, parameters: int) -> None:
        super().__init__(stats)
        self.sink: EventSink = sink
        self._backwards = BackwardTracker(sink, model)
        self._model = model
        self._log = sink.log
        self._plan: PlanRecords | None = None
        self._is_on_host = True
        self._mark: Mark = None
        self._bitmap: BucketRecords | None = None
        self._pack_bitmap(device, parameters)

    @never_raise
    def _pack_bitmap(self, device: torch.device, parameters: int) -> None:
        self._bitmap = make_bitmap_records(self.sink.get_timer(device).flags, self._model, parameters, "int32")

    def disable_recording(self, error: Exception) -> None:
        """Disable recording after an internal error."""
        self.sink.disable_recording(error)

    def allocate_ready_times(self, parameters: int) -> memoryview[int]:
        """Return memory that is readable for others when this process is dead."""
        try:
            return self.sink.map_ready_times(self._model, parameters)
        except Exception as error:
            self.disable_recording(error)
            return super().allocate_ready_times(parameters)

    @never_raise
    def on_plan_adopted(self, epoch: int, plan: BucketPlan, reason: str) -> None:
        """Write the plan, and pack the records of its buckets."""
        self._plan = None  # if this fails, the previous plan's records would belong to other buckets
        self._plan = self.sink.activate_plan(self._model, epoch, plan, reason)
        self._is_on_host = all(device.type == "cpu" for device in self._plan.devices)

    @property
    def gradient_times(self) -> Literal["none", "host", "device"]:
        """Return where gradients are timed: nowhere unless the step is full, and this detail is wanted."""
        if self._plan is None or self.sink.detail == "buckets" or not self.sink.is_full:
            return "none"
        return "host" if self._is_on_host else "device"

    def records_of(self, bucket: int) -> BucketRecords | None:
        """Return the records of a bucket, packed with the plan."""
        return None if self._plan is None else self._plan.buckets[bucket]

    def get_gather_records(self, bucket: int) -> BucketRecords | None:
        """Return the records of the all-gather of its parameters, packed with the plan."""
        return None if self._plan is None else self._plan.gathers[bucket]

    @property
    def bitmap_records(self) -> BucketRecords | None:
        """Return the records of the bitmap, packed with the model."""
        return self._bitmap

    # -- forward and phases --------------------------------------------------------------------------------------

    @never_raise
    def on_forward_call(self) -> None:
        """Begin a step if the previous one is over; the wait for the batch has ended."""
        self._backwards.on_forward_start()
        self.sink.steps.on_forward_call()

    @never_raise
    def on_forward_start(self, phase: Phase, *, no_sync: bool) -> None:
        """Enter the phase, on behalf of the line of user code that has called the wrapper."""
        self.sink.steps.enter(phase, no_sync=no_sync)

    @never_raise
    def on_forward_end(self, phase: Phase) -> None:
        """End the phase, if it is the open one."""
        self.sink.steps.leave(phase)

    def expect_backward(self, output: Any, *, no_sync: bool) -> None:
        """Enter the backward with the first gradient of the output."""
        self._backwards.expect(output, no_sync=no_sync)

    @contextmanager
    def interrupting_phase(self, *, no_sync: bool) -> Iterator[Callable[[Phase], None]]:
        """Interrupt the open phase by those that are entered inside, which are part of a finalization."""
        before = self.sink.steps.phase
        yield self._enter
        for phase in (Phase.FINALIZE, Phase.OPTIMIZER):
            self._leave(phase)
        if before is not None:
            self._enter(before, no_sync=no_sync)

    @contextmanager
    def waiting_for_parameters(self, *, no_sync: bool) -> Iterator[None]:
        """Mark the wait as a phase within a forward. Elsewhere, as for a checkpoint, only watchdogs are informed."""
        phase = self.sink.steps.phase
        if phase in (Phase.FORWARD, Phase.EVALUATION):
            self._enter(Phase.FINALIZE, no_sync=no_sync)
            yield
            self._enter(phase, no_sync=no_sync)
        elif self.sink.collectives is not None:
            with self.sink.collectives.position.waiting_for_parameters():
                yield
        else:
            yield

    @never_raise
    def _enter(self, phase: Phase, *, no_sync: bool = False) -> None:
        self.sink.steps.enter(phase, no_sync=no_sync)

    @never_raise
    def _leave(self, phase: Phase) -> None:
        self.sink.steps.leave(phase)

    # -- backward ------------------------------------------------------------------------------------------------

    def on_gradient(self, index: int, *, is_expected: bool) -> int:
        """Return the time: packing a record here, with cold caches, would cost several times as much."""
        if self.gradient_times == "none":
            return READY
        try:
            sink, plan = self.sink, self._plan
            assert plan is not None
            timer = sink.get_timer(plan.devices[index])
            now = timer.mark()
            if is_expected and isinstance(timer, HostTimer):
                return now
            timer.write(plan.gradient_ready[index], sink.steps.step, now, now)
        except Exception as error:
            self.disable_recording(error)
        return READY

    @never_raise
    def on_unexpected_gradient(self, index: int) -> None:
        """Report a gradient that is not reduced: under ``no_sync()``, or the module was called and not its wrapper."""
        self.sink.on_unreduced_gradient(self._model, index)

    @never_raise
    def on_bucket_ready(self, device: torch.device) -> None:
        """Note that the last gradient of a bucket is ready; its record is written with the copy."""
        sink = self.sink
        if sink.steps.phase is not Phase.BACKWARD:  # no output of the module was seen to get a gradient
            sink.update_call_site()
            sink.steps.enter(Phase.BACKWARD)
        if sink.is_on:
            self._mark = sink.get_timer(device).mark()

    @never_raise
    def on_copy_in_end(self, bucket: int, device: torch.device) -> None:
        """Write when the bucket was ready and, in a full step, how long the copy took."""
        sink = self.sink
        if not sink.is_on:
            return
        timer, records, step = sink.get_timer(device), self._records(bucket), sink.steps.step
        timer.write(records.ready, step, self._mark, self._mark)
        if sink.is_full:
            timer.write(records.copy_in, step, self._mark, timer.mark())

    @never_raise
    def on_bucket_launch(self, bucket: int, buffer: torch.Tensor) -> None:
        """Look at the gradients, which others will soon be added to."""
        self.sink.check_gradients(self._model, bucket, buffer)

    @never_raise
    def on_gradients_launched(self, indices: tuple[int, ...], ready_ns: memoryview[int]) -> None:
        """Write when each gradient was ready: after the launch, which must not be delayed by that."""
        if self.gradient_times == "none" or self._plan is None:
            return
        append, step, records = self._log.append, self.sink.steps.step, self._plan.gradient_ready
        for index in indices:
            time_ns = ready_ns[index]
            if time_ns != READY:
                append(records[index], step, time_ns, time_ns)

    @never_raise
    def on_backward_over(self) -> None:
        """Enter the phase in which the rest of the backward waits for averages."""
        super().on_backward_over()
        self.sink.steps.enter(Phase.FINALIZE)

    @never_raise
    def on_copy_out_start(self, device: torch.device) -> None:
        """Mark the time at which the average begins to be copied out, in a full step."""
        if self.sink.is_full:
            self._mark = self.sink.get_timer(device).mark()

    @never_raise
    def on_copy_out_end(self, bucket: int, device: torch.device) -> None:
        """Write how long the copy took, in a full step."""
        if not self.sink.is_full:
            return
        timer = self.sink.get_timer(device)
        timer.write(self._records(bucket).copy_out, self.sink.steps.step, self._mark, timer.mark())

    @never_raise
    def on_finalized(self) -> None:
        """Note that the pass is complete."""
        super().on_finalized()
        self.sink.steps.leave(Phase.FINALIZE)
        self.sink.on_gradients_reduced(self._model)

    @never_raise
    def failed(self) -> None:
        """Preserve the latest records so that nothing overwrites them."""
        self.sink.incident()

    def _records(self, bucket: int) -> BucketRecords:
        assert self._plan is not None
        return self._plan.buckets[bucket]
