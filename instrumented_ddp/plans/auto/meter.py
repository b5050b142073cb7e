"""An in-memory recorder of bucket timings over some steps, for jobs that are not recorded."""

from __future__ import annotations

import logging

import numpy as np
import torch

from instrumented_ddp.bucket_plan import BucketPlan
from instrumented_ddp.collective_log.completion import CompletionWatch
from instrumented_ddp.recording.guard import never_raise
from instrumented_ddp.recording.records import BucketRecords, PlanRecords, make_phase_records
from instrumented_ddp.recording.reduction_events import make_private_ready_times
from instrumented_ddp.recording.timing import DeviceTimer, Mark, make_bucket_timer, make_timer
from overlapscope.trace.environment import Detail
from overlapscope.trace.format import CHECKED_RECORD, RECORD, Phase
from overlapscope.trace.host import host_now_ns
from overlapscope.trace.log import RECORD_DTYPE, Records

_log = logging.getLogger(__name__)


class MemoryLog:
    """An in-memory replacement of an ``EventLog``."""

    def __init__(self) -> None:
        self._rows: list[tuple[bytes, int, int, int, int]] = []

    def append(self, body: bytes, step: int, start_ns: int, end_ns: int, end_uncertainty_ns: int = 0) -> None:
        """Store a record, with the arguments of ``EventLog.append``."""
        self._rows.append((body, step, start_ns, end_ns, end_uncertainty_ns))

    def records(self) -> Records:
        """Return all records, in the form of a log that is read back."""
        rows = self._rows.copy()  # threads may append meanwhile
        packed = b"".join(
            CHECKED_RECORD.pack(0, RECORD.pack(start_ns, end_ns, step, uncertainty_ns, body, number))
            for number, (body, step, start_ns, end_ns, uncertainty_ns) in enumerate(rows, start=1)
        )
        return np.frombuffer(packed, dtype=RECORD_DTYPE)


class Meter:
    """Recorder of one model's timings in memory; an ``Observer``.

    Args:
        device: where the module computes. On CUDA this waits for the device once, to tie its clock to the host's.
    """

    detail: Detail = "parameters"
    collectives = None
    segments = None

    def __init__(self, device: torch.device) -> None:
        self.log = MemoryLog()
        self.completions = CompletionWatch(self.disable_recording)
        self._timer = make_timer(device, self.log)
        self._timers = {device: make_bucket_timer(device, self._timer)}
        self._backward = make_phase_records(self._timer.flags, no_sync=False)[Phase.BACKWARD]
        self._backward_start: Mark | None = None
        self.phase: Phase | None = None
        self._has_failed = False
        self.step = 0
        """Number of passes that were reduced so far."""

    def records(self) -> Records:
        """Return what was recorded so far, except for what the device has not reached yet."""
        for timer in self._timers.values():
            timer.on_step_start()
        return self.log.records()

    def close(self) -> None:
        """Stop recording."""
        self.completions.close()

    # -- called by the reducer -----------------------------------------------------------------------------------

    def get_timer(self, device: torch.device) -> DeviceTimer:
        """Return the timer of one of the devices that the module spans."""
        timer = self._timers.get(device)
        if timer is None:
            timer = self._timers[device] = make_bucket_timer(device, make_timer(device, self.log))
        return timer

    def activate_plan(self, model: int, epoch: int, plan: BucketPlan, reason: str) -> PlanRecords:  # noqa: ARG002
        """Pack the records of a plan."""
        return PlanRecords(self._timer.flags, model, epoch, plan)

    def board(self, model: int, parameters: int) -> memoryview[int]:  # noqa: ARG002
        """Return a board that nobody else sees."""
        return make_private_ready_times(parameters)

    def on_unreduced_gradient(self, model: int) -> None:
        """Do nothing: the user's lines and other gradients are not measured."""

    def on_gradients_reduced(self, model: int) -> None:  # noqa: ARG002
        """Note that a pass is over, and with it a step of the meter."""
        self.step += 1
        for timer in self._timers.values():
            timer.on_step_start()

    @never_raise
    def enter(self, phase: Phase, *, no_sync: bool = False) -> None:
        """Time a backward that is reduced, and nothing else."""
        if no_sync:
            return
        now = self._timer.mark()
        if self.phase is Phase.BACKWARD:
            self._timer.write(self._backward, self.step, self._backward_start, now)
        self.phase, self._backward_start = phase, now

    @never_raise
    def leave(self, phase: Phase) -> None:
        """End a phase, if it is the current one."""
        if self.phase is phase:
            if phase is Phase.BACKWARD:
                self._timer.write(self._backward, self.step, self._backward_start, self._timer.mark())
            self.phase = None

    def on_interrupted_backward(self, step: int) -> None:
        """Do nothing: the previous pass is not reduced, and so it is not measured."""

    def update_call_site(self) -> None:
        """Do nothing: the user's lines and other gradients are not measured."""

    def launches(self, records: BucketRecords) -> int:  # noqa: ARG002
        """Return the launch time; the record is written when the collective ends."""
        return host_now_ns()

    def incident(self) -> None:
        """Do nothing: nobody reads the records after an incident."""

    def disable_recording(self, error: Exception) -> None:
        """Log an error once. What was not recorded is missing in the cycles, which say so."""
        if not self._has_failed:
            self._has_failed = True
            _log.warning("steps are no longer measured: %s: %s", type(error).__name__, error)
