"""Who is told of what the reducer and its lanes do: the recorder of the process, or a meter for some steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from instrumented_ddp.bucket_plan import BucketPlan
from instrumented_ddp.completion import CompletionWatch
from instrumented_ddp.records import BucketRecords, PlanRecords
from instrumented_ddp.timing import Timeline
from overlapscope.trace.environment import Detail
from overlapscope.trace.format import Phase


class Observer(Protocol):
    """Called from the hot path, so what it does must be brief."""

    detail: Detail
    """``parameters`` if the readiness of every gradient is wanted as well."""
    step: int
    completions: CompletionWatch

    @property
    def phase(self) -> Phase | None:
        """The phase that is open."""

    def timeline_on(self, device: torch.device) -> Timeline:
        """Where times on this device are marked."""

    def plan_takes_effect(self, model: int, epoch: int, plan: BucketPlan, reason: str) -> PlanRecords:
        """A plan is in force from here on. Returns the records of its buckets and parameters, packed."""

    def ready_board(self, model: int, parameters: int) -> memoryview[int]:
        """A byte a parameter, for the reducer to say which gradients have come."""

    def readiness_board(self, model: int, parameters: int) -> memoryview[int] | None:
        """Where gradient hooks store the time; None where they have to write a record."""

    def gradients_were_ready(self, indices: Sequence[int], records: Sequence[bytes], ready_ns: Sequence[int]) -> None:
        """The gradients of a bucket, and when they were ready."""

    def gradient_is_not_reduced(self, model: int) -> None:
        """A gradient has come that no reduction waits for."""

    def gradients_are_reduced(self, model: int) -> None:
        """The gradients of a pass are final."""

    def enter(self, phase: Phase, *, no_sync: bool = False) -> None:
        """A phase begins; one that is still open has ended."""

    def leave(self, phase: Phase) -> None:
        """A phase ends, if it is the one that is open."""

    def note_caller(self) -> None:
        """The user's line that is running is behind what follows."""

    def launches(self, records: BucketRecords) -> int:
        """A collective is about to be enqueued. Returns the time, in host nanoseconds."""

    def incident(self) -> None:
        """Something went wrong."""
