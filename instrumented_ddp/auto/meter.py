"""What a recorder writes of the buckets, kept in memory for some steps: for jobs that are not recorded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import torch

from instrumented_ddp.bucket_plan import BucketPlan
from instrumented_ddp.completion import CompletionWatch
from instrumented_ddp.records import BucketRecords, PlanRecords, phase_records
from instrumented_ddp.timing import HostTimeline, Mark, Timeline, host_now_ns, timeline_of
from overlapscope.trace.environment import Detail
from overlapscope.trace.format import RECORD, RECORD_BYTES, Phase
from overlapscope.trace.log import RECORD_DTYPE, Records

_BYTES_OF_TIME: Final = 8


class MemoryLog:
    """Takes the place of an ``EventLog``, and forgets everything with the meter."""

    def __init__(self) -> None:
        self._rows: list[tuple[bytes, int, int, int, int]] = []

    def append(self, body: bytes, step: int, start_ns: int, end_ns: int, end_uncertainty_ns: int = 0) -> None:
        """As in ``EventLog``."""
        self._rows.append((body, step, start_ns, end_ns, end_uncertainty_ns))

    def records(self) -> Records:
        """Everything, as a log that is read back."""
        packed = bytearray(len(self._rows) * RECORD_BYTES)
        for place, (body, step, start_ns, end_ns, uncertainty_ns) in enumerate(self._rows):
            RECORD.pack_into(
                packed, place * RECORD_BYTES, place + 1, start_ns, end_ns, step, uncertainty_ns, body, place + 1
            )
        return np.frombuffer(packed, dtype=RECORD_DTYPE)


class Meter:
    """Watches one model; an ``Observer``.

    Args:
        device: where the module computes. On CUDA this waits for the device once, to tie its clock to the host's.
    """

    detail: Detail = "parameters"

    def __init__(self, device: torch.device) -> None:
        self._log = MemoryLog()
        self.completions = CompletionWatch(self._log)
        self._timeline = timeline_of(device, self._log)
        self._timelines = {device: self._timeline}
        self._backward = phase_records(self._timeline.flags, no_sync=False)[Phase.BACKWARD]
        self._backward_start: Mark | None = None
        self.phase: Phase | None = None
        self.step = 0
        """How many passes it has seen reduced."""

    def records(self) -> Records:
        """What has been seen so far, but for what the device has not come to yet."""
        for timeline in self._timelines.values():
            timeline.step_begins()
        return self._log.records()

    def close(self) -> None:
        """Watch no more."""
        self.completions.close()

    # -- as the reducer calls it ---------------------------------------------------------------------------------

    def timeline_on(self, device: torch.device) -> Timeline:
        """See ``Observer``."""
        timeline = self._timelines.get(device)
        if timeline is None:
            timeline = self._timelines[device] = timeline_of(device, self._log)
        return timeline

    def plan_takes_effect(self, model: int, epoch: int, plan: BucketPlan, reason: str) -> PlanRecords:  # noqa: ARG002
        """See ``Observer``."""
        return PlanRecords(self._timeline.flags, model, epoch, plan)

    def ready_board(self, model: int, parameters: int) -> memoryview[int]:  # noqa: ARG002
        """Seen by nobody else."""
        return memoryview(bytearray(parameters))

    def readiness_board(self, model: int, parameters: int) -> memoryview[int] | None:  # noqa: ARG002
        """See ``Observer``."""
        if not isinstance(self._timeline, HostTimeline):
            return None
        return memoryview(bytearray(parameters * _BYTES_OF_TIME)).cast("q")

    def gradients_were_ready(self, indices: Sequence[int], records: Sequence[bytes], ready_ns: Sequence[int]) -> None:
        """See ``Observer``."""
        append, step = self._log.append, self.step
        for index in indices:
            append(records[index], step, ready_ns[index], ready_ns[index])

    def gradient_is_not_reduced(self, model: int) -> None:
        """No matter."""

    def gradients_are_reduced(self, model: int) -> None:  # noqa: ARG002
        """See ``Observer``."""
        self.step += 1
        for timeline in self._timelines.values():
            timeline.step_begins()

    def enter(self, phase: Phase, *, no_sync: bool = False) -> None:  # noqa: ARG002
        """Backward is timed, and nothing else."""
        now = self._timeline.mark()
        if self.phase is Phase.BACKWARD:
            self._timeline.write(self._backward, self.step, self._backward_start, now)
        self.phase, self._backward_start = phase, now

    def leave(self, phase: Phase) -> None:
        """See ``Observer``."""
        if self.phase is phase:
            if phase is Phase.BACKWARD:
                self._timeline.write(self._backward, self.step, self._backward_start, self._timeline.mark())
            self.phase = None

    def note_caller(self) -> None:
        """No matter."""

    def launches(self, records: BucketRecords) -> int:  # noqa: ARG002
        """When the collective ends, this is told with it."""
        return host_now_ns()

    def incident(self) -> None:
        """Nobody reads what is kept here."""
