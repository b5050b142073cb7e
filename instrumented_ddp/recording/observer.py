"""Who is told of what the reducer and its communicators do: the recorder of the process, or a meter for some steps."""

from __future__ import annotations

from typing import Protocol

import torch

from instrumented_ddp.bucket_plan import BucketPlan
from instrumented_ddp.collective_log.collectives import Collectives
from instrumented_ddp.collective_log.completion import CompletionWatch
from instrumented_ddp.recording.records import BucketRecords, PlanRecords
from instrumented_ddp.recording.segment_table import SegmentTable
from instrumented_ddp.recording.timing import DeviceTimer, RecordLog
from overlapscope.trace.environment import Detail
from overlapscope.trace.format import Phase


class Observer(Protocol):
    """Called from the hot path, so what it does must be brief."""

    detail: Detail
    """``parameters`` if the readiness of every gradient is wanted as well."""
    completions: CompletionWatch

    @property
    def collectives(self) -> Collectives | None:
        """The collective log, if there is one."""

    @property
    def segments(self) -> SegmentTable | None:
        """What the sums of buckets are made of, if that is written down."""

    @property
    def log(self) -> RecordLog:
        """Where records go."""

    @property
    def step(self) -> int:
        """That records belong to."""

    @property
    def phase(self) -> Phase | None:
        """The phase that is open."""

    def timer_on(self, device: torch.device) -> DeviceTimer:
        """Where times on this device are marked."""

    def plan_takes_effect(self, model: int, epoch: int, plan: BucketPlan, reason: str) -> PlanRecords:
        """A plan is in force from here on. Returns the records of its buckets and parameters, packed."""

    def board(self, model: int, parameters: int) -> memoryview[int]:
        """Where it is kept which gradients have come and when, see ``trace.board``."""

    def gradient_is_not_reduced(self, model: int) -> None:
        """A gradient has come that no reduction waits for."""

    def gradients_are_reduced(self, model: int) -> None:
        """The gradients of a pass are final."""

    def enter(self, phase: Phase, *, no_sync: bool = False) -> None:
        """A phase begins; one that is still open has ended."""

    def leave(self, phase: Phase) -> None:
        """A phase ends, if it is the one that is open."""

    def backward_was_left(self, step: int) -> None:
        """An exception has come out of the newest backward, which was of this step, and the training goes on."""

    def note_caller(self) -> None:
        """The user's line that is running is behind what follows."""

    def launches(self, records: BucketRecords) -> int:
        """A collective is about to be enqueued. Returns the time, in host nanoseconds."""

    def incident(self) -> None:
        """Something went wrong in the training."""

    def gives_up(self, error: Exception) -> None:
        """Something of ours went wrong: say so once, and watch no more."""
