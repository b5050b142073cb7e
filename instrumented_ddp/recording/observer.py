"""Interface of objects that receive the events of the reducer and its communicators: the recorder, or a meter."""

from __future__ import annotations

from typing import Protocol

import torch

from instrumented_ddp.bucket_plan import BucketPlan
from instrumented_ddp.collective_log.collectives import CollectiveLog
from instrumented_ddp.collective_log.completion import CompletionWatch
from instrumented_ddp.recording.records import BucketRecords, PlanRecords
from instrumented_ddp.recording.segment_table import SegmentTable
from instrumented_ddp.recording.timing import DeviceTimer, RecordLog
from overlapscope.trace.environment import Detail
from overlapscope.trace.format import Phase


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
