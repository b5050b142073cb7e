"""What the reducer of one model tells -> records of its buckets and gradients."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from instrumented_ddp.bucket_plan import BucketPlan
from instrumented_ddp.recording.backward_phase import Backwards
from instrumented_ddp.recording.guard import survived
from instrumented_ddp.recording.observer import Observer
from instrumented_ddp.recording.records import BucketRecords, PlanRecords, all_reduce_records
from instrumented_ddp.recording.reduction_events import ReductionEvents
from instrumented_ddp.recording.runtime_stats import RuntimeStats
from instrumented_ddp.recording.timing import HostTimer, Mark
from overlapscope.trace.board import HAS_COME
from overlapscope.trace.format import Phase


def events_of(observer: Observer | None, model: int, parameters: Sequence[torch.nn.Parameter]) -> ReductionEvents:
    """Who listens to the reducer of a model that is recorded, or that nobody records.

    Args:
        model: its number in the recording.
        parameters: of the reducer.
    """
    device = parameters[0].device
    stats = RuntimeStats(device)
    if observer is None:
        return ReductionEvents(stats, len(parameters))
    return ModelEvents(observer, model, device, stats, len(parameters))


class ModelEvents(ReductionEvents):
    """Writes down what one reducer does. What goes wrong here ends the recording, and never the training.

    Args:
        observer: the recorder of the process, or a meter for some steps.
        model: its number in the recording.
        device: of its first parameter.
        stats: of the model.
        parameters: how many it has.
    """

    def __init__(
        self, observer: Observer, model: int, device: torch.device, stats: RuntimeStats, parameters: int
    ) -> None:
        super().__init__(stats, parameters)
        self.observer: Observer = observer
        self.backwards: Backwards = Backwards(observer)
        self.wants_gradients = observer.detail != "buckets"
        self._model = model
        self._log = observer.log
        self._plan: PlanRecords | None = None
        self._mark: Mark = None
        self._bitmap: BucketRecords | None = None
        self._begin(device, parameters)

    @survived
    def _begin(self, device: torch.device, parameters: int) -> None:
        observer = self.observer
        self._bitmap = all_reduce_records(observer.timer_on(device).flags, self._model, parameters, "int32")
        self.board = observer.board(self._model, parameters)  # seen by others when this process is dead

    @survived
    def plan_adopted(self, epoch: int, plan: BucketPlan, reason: str) -> None:
        """Write the plan down, and pack what will be written of its buckets."""
        self._plan = None  # should this fail, the records of the plan before are of other buckets
        self._plan = self.observer.plan_takes_effect(self._model, epoch, plan, reason)

    def records_of(self, bucket: int) -> BucketRecords | None:
        """What is written of a bucket, packed with the plan."""
        return None if self._plan is None else self._plan.buckets[bucket]

    def gather_records_of(self, bucket: int) -> BucketRecords | None:
        """What is written of the all-gather of its parameters, packed with the plan."""
        return None if self._plan is None else self._plan.gathers[bucket]

    @property
    def bitmap_records(self) -> BucketRecords | None:
        """What is written of the bitmap, packed with the model."""
        return self._bitmap

    @survived
    def gradient_ready(self, index: int, *, is_expected: bool) -> None:
        """Have the time put on the board: packing a record here, with cold caches, would cost several times as much."""
        observer, plan = self.observer, self._plan
        assert plan is not None
        timer = observer.timer_on(plan.devices[index])
        now = timer.mark()
        if is_expected and isinstance(timer, HostTimer):
            self.stamp = now
        else:
            self.stamp = HAS_COME
            timer.write(plan.gradient_ready[index], observer.step, now, now)

    @survived
    def gradient_not_reduced(self) -> None:
        """Perhaps the module was called and not its wrapper."""
        self.observer.gradient_is_not_reduced(self._model)

    @survived
    def bucket_ready(self, device: torch.device) -> None:
        """The last gradient of a bucket has come: written with the copy."""
        observer = self.observer
        if observer.phase is not Phase.BACKWARD:  # no output of the module was seen to get a gradient
            observer.note_caller()
            observer.enter(Phase.BACKWARD)
        self._mark = observer.timer_on(device).mark()

    @survived
    def copied_in(self, bucket: int, device: torch.device) -> None:
        """Write when it was ready, and how long it took to copy."""
        observer, timer, records = self.observer, self.observer.timer_on(device), self._records(bucket)
        timer.write(records.ready, observer.step, self._mark, self._mark)
        timer.write(records.copy_in, observer.step, self._mark, timer.mark())

    @survived
    def gradients_launched(self, indices: tuple[int, ...]) -> None:
        """Write when each gradient was ready: after the launch, which must not wait for that."""
        if not self.wants_gradients or self._plan is None:
            return
        append, step, records = self._log.append, self.observer.step, self._plan.gradient_ready
        for index in indices:
            ready_ns = self.board[index]
            if ready_ns != HAS_COME:
                append(records[index], step, ready_ns, ready_ns)

    @survived
    def backward_over(self) -> None:
        """What remains of the backward is the wait for averages."""
        super().backward_over()
        self.observer.enter(Phase.FINALISE)

    @survived
    def copying_out(self, device: torch.device) -> None:
        """Mark when the average is handed on."""
        self._mark = self.observer.timer_on(device).mark()

    @survived
    def copied_out(self, bucket: int, device: torch.device) -> None:
        """Write how long it took."""
        timer = self.observer.timer_on(device)
        timer.write(self._records(bucket).copy_out, self.observer.step, self._mark, timer.mark())

    @survived
    def finalised(self) -> None:
        """The pass is over."""
        super().finalised()
        self.observer.leave(Phase.FINALISE)
        self.observer.gradients_are_reduced(self._model)

    @survived
    def failed(self) -> None:
        """Keep the newest records where nothing overwrites them."""
        self.observer.incident()

    def gives_up(self, error: Exception) -> None:
        """Something of ours went wrong: the recording ends here."""
        self.observer.gives_up(error)

    def _records(self, bucket: int) -> BucketRecords:
        assert self._plan is not None
        return self._plan.buckets[bucket]
