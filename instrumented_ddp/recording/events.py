"""Events of the reduction of one model, and their default listener for a job that is not recorded."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch
from torch.utils._pytree import tree_leaves

from instrumented_ddp.bucket_plan import BucketPlan
from instrumented_ddp.collectives.completion import CompletionWatch
from instrumented_ddp.collectives.log import CollectiveLog
from instrumented_ddp.recording.background import never_raise, never_raising
from instrumented_ddp.recording.records import BucketRecords, PlanRecords, SegmentTable, make_bitmap_records
from instrumented_ddp.recording.runtime_stats import RuntimeStats
from instrumented_ddp.recording.timing import DeviceTimer, HostTimer, Mark, RecordLog
from overlapscope.trace.environment import Detail
from overlapscope.trace.live_files import READY
from overlapscope.trace.schema import Phase

# Interface of objects that receive the events of the reducer and its communicators: the recorder, or a meter.


class ReductionObserver(Protocol):
    """Receiver of reducer events. Called on the hot path, so methods must be brief."""

    detail: Detail
    """``parameters`` if the ready time of every gradient is wanted as well."""
    completions: CompletionWatch

    @property
    def collectives(self) -> CollectiveLog | None:
        """Return the collective log, if there is one."""

    @property
    def segments(self) -> SegmentTable | None:
        """Return the table of segments of bucket sums, if they are recorded."""

    @property
    def log(self) -> RecordLog:
        """Return the log that receives the records."""

    @property
    def step(self) -> int:
        """Return the step that records belong to."""

    @property
    def phase(self) -> Phase | None:
        """Return the open phase."""

    def get_timer(self, device: torch.device) -> DeviceTimer:
        """Return the timer for work on a device."""

    def activate_plan(self, model: int, epoch: int, plan: BucketPlan, reason: str) -> PlanRecords:
        """Activate a plan, and return the packed records of its buckets and parameters."""

    def board(self, model: int, parameters: int) -> memoryview[int]:
        """Return the board of ready times by parameter, see ``trace.board``."""

    def on_unreduced_gradient(self, model: int) -> None:
        """Note that a gradient has arrived that no reduction waits for."""

    def on_gradients_reduced(self, model: int) -> None:
        """Note that the gradients of a pass are final."""

    def enter(self, phase: Phase, *, no_sync: bool = False) -> None:
        """Begin a phase, and end the one that is open."""

    def leave(self, phase: Phase) -> None:
        """End a phase, if it is the open one."""

    def on_interrupted_backward(self, step: int) -> None:
        """Note that an exception has come out of the latest backward, in this step, and training continues."""

    def update_call_site(self) -> None:
        """Use the running line of user code as the call site of what follows."""

    def launches(self, records: BucketRecords) -> int:
        """Record that a collective is about to be enqueued, and return the time, in host nanoseconds."""

    def incident(self) -> None:
        """Note that an incident occurred in the training."""

    def disable_recording(self, error: Exception) -> None:
        """Report an internal error once, and stop observing."""


# Start and end of each backward: from the first gradient of a forward's output until autograd is done.


class BackwardTracker:
    """Reports the backwards of one model to an observer.

    Args:
        observer: receives the events.
        on_end: called when autograd has finished a backward, with whether it was under ``no_sync()``.
    """

    def __init__(self, observer: ReductionObserver, on_end: Callable[[bool], None] | None = None) -> None:
        self._observer = observer
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
        self._observer.disable_recording(error)

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
        observer = self._observer
        self._is_running, self._step = True, observer.step
        if observer.phase is not Phase.BACKWARD:
            observer.update_call_site()
            observer.enter(Phase.BACKWARD, no_sync=no_sync)

        def end() -> None:
            self._is_running = False
            observer.leave(Phase.BACKWARD)
            if self._on_end is not None:
                self._on_end(no_sync)

        torch.autograd.Variable._execution_engine.queue_callback(never_raising(end, self.disable_recording))

    @never_raise
    def on_forward_start(self) -> None:
        """Report a backward that autograd has not finished: an exception came out of it and was caught."""
        if self._is_running:
            self._is_running = False
            self._observer.on_interrupted_backward(self._step)


def computed(output: Any) -> Iterator[torch.Tensor]:
    """Yield the output's tensors that have a backward; a hook on a parameter would be kept from every step."""
    for leaf in [output] if isinstance(output, torch.Tensor) else tree_leaves(output):
        if isinstance(leaf, torch.Tensor) and leaf.grad_fn is not None:
            yield leaf


def make_private_ready_times(parameters: int) -> memoryview[int]:
    """Return a board like that of ``trace.board``, in the memory of this process alone."""
    return memoryview(bytearray(8 * parameters)).cast("q")


class ReductionEvents:
    """Listener of one reducer, from a gradient that is ready to gradients that are final.

    This class keeps only what stock DDP keeps: the times in ``_get_ddp_logging_data()``. Methods are called on the hot
    path, in about the order in which they are defined here.

    Args:
        stats: runtime statistics of the model.
        parameters: number of its parameters.
    """

    needs_gradient_events = False
    """True if ``gradient_ready`` should be called."""
    observer: ReductionObserver | None = None
    """Observer whose timers mark the events, if any."""
    backwards: BackwardTracker | None = None
    """Tracker of when autograd runs, if it is reported."""

    def __init__(self, stats: RuntimeStats, parameters: int) -> None:
        self.stats = stats
        self.board = make_private_ready_times(parameters)
        """Stamps by parameter, read by the reducer: 0 until the gradient has arrived in this pass, then ``stamp``."""
        self.stamp = READY
        """Stamp for the gradient that arrives now: its time, or only the fact that it has arrived."""

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

    def on_gradients_expected(self) -> None:
        """Note that a forward has ended whose backward will be reduced."""
        self.stats.mark("backward_compute_start")

    def gradient_ready(self, index: int, *, is_expected: bool) -> None:
        """Note that a gradient was accumulated; if it is not expected, it is not reduced in this pass."""

    def on_unexpected_gradient(self) -> None:
        """Note that a gradient has arrived that no reduction waits for."""

    def on_bucket_ready(self, device: torch.device) -> None:
        """Note that the last gradient of a bucket has arrived."""

    def on_copy_in_end(self, bucket: int, device: torch.device) -> None:
        """Note that the gradients of a bucket that were not yet in its buffer have been copied to it."""

    def on_first_launch(self) -> None:
        """Note that the first bucket of a pass is about to be launched."""
        self.stats.mark("backward_comm_start")

    def on_gradients_launched(self, indices: tuple[int, ...]) -> None:
        """Note that everything that could be launched when a bucket was ready has been launched.

        Args:
            indices: indices of the bucket's parameters.
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


# Records of a model's buckets and gradients, made from the events of its reducer.


def make_reduction_events(
    observer: ReductionObserver | None, model: int, parameters: Sequence[torch.nn.Parameter]
) -> ReductionEvents:
    """Return the listener for a model's reducer, which writes records only if the model is recorded.

    Args:
        model: number of the model in the recording.
        parameters: parameters of the reducer.
    """
    device = parameters[0].device
    stats = RuntimeStats(device)
    if observer is None:
        return ReductionEvents(stats, len(parameters))
    return ModelEvents(observer, model, device, stats, len(parameters))


class ModelEvents(ReductionEvents):
    """Recorder of the events of one reducer. An error here ends the recording, never the training.

    Args:
        observer: the recorder of the process, or a meter for some steps.
        model: number of the model in the recording.
        device: device of its first parameter.
        stats: runtime statistics of the model.
        parameters: number of its parameters.
    """

    def __init__(
        self, observer: ReductionObserver, model: int, device: torch.device, stats: RuntimeStats, parameters: int
    ) -> None:
        super().__init__(stats, parameters)
        self.observer: ReductionObserver = observer
        self.backwards: BackwardTracker = BackwardTracker(observer)
        self.needs_gradient_events = observer.detail != "buckets"
        self._model = model
        self._log = observer.log
        self._plan: PlanRecords | None = None
        self._mark: Mark = None
        self._bitmap: BucketRecords | None = None
        self._begin(device, parameters)

    @never_raise
    def _begin(self, device: torch.device, parameters: int) -> None:
        observer = self.observer
        self._bitmap = make_bitmap_records(observer.get_timer(device).flags, self._model, parameters, "int32")
        self.board = observer.board(self._model, parameters)  # stays readable for others when this process is dead

    @never_raise
    def on_plan_adopted(self, epoch: int, plan: BucketPlan, reason: str) -> None:
        """Write the plan, and pack the records of its buckets."""
        self._plan = None  # if this fails, the previous plan's records would belong to other buckets
        self._plan = self.observer.activate_plan(self._model, epoch, plan, reason)

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

    @never_raise
    def gradient_ready(self, index: int, *, is_expected: bool) -> None:
        """Provide the time for the board: packing a record here, with cold caches, would cost several times as much."""
        observer, plan = self.observer, self._plan
        assert plan is not None
        timer = observer.get_timer(plan.devices[index])
        now = timer.mark()
        if is_expected and isinstance(timer, HostTimer):
            self.stamp = now
        else:
            self.stamp = READY
            timer.write(plan.gradient_ready[index], observer.step, now, now)

    @never_raise
    def on_unexpected_gradient(self) -> None:
        """Report a gradient outside of any pass: perhaps the module was called and not its wrapper."""
        self.observer.on_unreduced_gradient(self._model)

    @never_raise
    def on_bucket_ready(self, device: torch.device) -> None:
        """Note that the last gradient of a bucket is ready; its record is written with the copy."""
        observer = self.observer
        if observer.phase is not Phase.BACKWARD:  # no output of the module was seen to get a gradient
            observer.update_call_site()
            observer.enter(Phase.BACKWARD)
        self._mark = observer.get_timer(device).mark()

    @never_raise
    def on_copy_in_end(self, bucket: int, device: torch.device) -> None:
        """Write when the bucket was ready, and how long the copy took."""
        observer, timer, records = self.observer, self.observer.get_timer(device), self._records(bucket)
        timer.write(records.ready, observer.step, self._mark, self._mark)
        timer.write(records.copy_in, observer.step, self._mark, timer.mark())

    @never_raise
    def on_gradients_launched(self, indices: tuple[int, ...]) -> None:
        """Write when each gradient was ready: after the launch, which must not be delayed by that."""
        if not self.needs_gradient_events or self._plan is None:
            return
        append, step, records = self._log.append, self.observer.step, self._plan.gradient_ready
        for index in indices:
            ready_ns = self.board[index]
            if ready_ns != READY:
                append(records[index], step, ready_ns, ready_ns)

    @never_raise
    def on_backward_over(self) -> None:
        """Enter the phase in which the rest of the backward waits for averages."""
        super().on_backward_over()
        self.observer.enter(Phase.FINALIZE)

    @never_raise
    def on_copy_out_start(self, device: torch.device) -> None:
        """Mark the time at which the average begins to be copied out."""
        self._mark = self.observer.get_timer(device).mark()

    @never_raise
    def on_copy_out_end(self, bucket: int, device: torch.device) -> None:
        """Write how long the copy took."""
        timer = self.observer.get_timer(device)
        timer.write(self._records(bucket).copy_out, self.observer.step, self._mark, timer.mark())

    @never_raise
    def on_finalized(self) -> None:
        """Note that the pass is complete."""
        super().on_finalized()
        self.observer.leave(Phase.FINALIZE)
        self.observer.on_gradients_reduced(self._model)

    @never_raise
    def failed(self) -> None:
        """Preserve the latest records so that nothing overwrites them."""
        self.observer.incident()

    def disable_recording(self, error: Exception) -> None:
        """Disable recording after an internal error."""
        self.observer.disable_recording(error)

    def _records(self, bucket: int) -> BucketRecords:
        assert self._plan is not None
        return self._plan.buckets[bucket]
