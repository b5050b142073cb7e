"""Records of a model's buckets and gradients, made from the events of its reducer."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from instrumented_ddp.bucket_plan import BucketPlan
from instrumented_ddp.recording.backward_phase import BackwardTracker
from instrumented_ddp.recording.guard import never_raise
from instrumented_ddp.recording.observer import ReductionObserver
from instrumented_ddp.recording.records import BucketRecords, PlanRecords, make_bitmap_records
from instrumented_ddp.recording.reduction_events import ReductionEvents
from instrumented_ddp.recording.runtime_stats import RuntimeStats
from instrumented_ddp.recording.timing import HostTimer, Mark
from overlapscope.trace.board import READY
from overlapscope.trace.format import Phase


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
