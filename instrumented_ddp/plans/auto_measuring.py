"""Measurement of some steps, from what the recorder writes anyway, or else with a meter."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import AllgatherOptions  # type: ignore[attr-defined]

from instrumented_ddp.bucket_plan import BucketPlan
from instrumented_ddp.collectives.completion import NO_TIMEOUT, CompletionWatch
from instrumented_ddp.recording.events import EventSink, RecordedReduction
from instrumented_ddp.recording.recorder import Recorder
from instrumented_ddp.recording.records import make_phase_records
from instrumented_ddp.recording.steps import Steps
from instrumented_ddp.recording.timing import DeviceTimer, Mark
from instrumented_ddp.reduction.reducer import Reducer
from overlapscope.bucket_model.observation import BucketCycles, compute_bucket_cycles
from overlapscope.bucket_model.partition import Int64Array
from overlapscope.trace.event_log import RECORD_DTYPE, Records, read_latest_records
from overlapscope.trace.schema import CHECKED_RECORD, RECORD, Phase

MAX_RANKS: Final = 8
"""Maximum number of ranks considered. Of more ranks the slowest are used."""


def gather_cycles(own: BucketCycles, group: dist.ProcessGroup, device: torch.device) -> tuple[BucketCycles, Int64Array]:
    """Gather the same cycles of all ranks, or of the slowest ones; no clocks are exchanged. Called on all ranks.

    Args:
        own: cycles of this rank, of the same shape on all ranks.
        device: device on which the group communicates.

    Returns:
        Cycles of R ranks, on every rank, with its own steps and epochs; and the (R,) ranks.
    """
    lateness = torch.tensor([np.nan_to_num(np.median(own.backward_end_ns[0]))], device=device)
    everyones = [torch.empty_like(lateness) for _ in range(group.size())]
    group.allgather([everyones], [lateness], AllgatherOptions()).wait(NO_TIMEOUT)
    latest_first = torch.cat(everyones).argsort(descending=True, stable=True)
    ranks = np.sort(latest_first[:MAX_RANKS].cpu().numpy())
    parts = (own.moments_ns, own.ready_ns, own.buckets_ns)
    flat = np.concatenate([part.ravel() for part in parts])
    sum_of_one = torch.zeros((len(ranks), len(flat)), dtype=torch.float64, device=device)
    if group.rank() in ranks:
        sum_of_one[int(np.searchsorted(ranks, group.rank()))] = torch.from_numpy(flat)
    group.allreduce([sum_of_one], dist.AllreduceOptions()).wait(NO_TIMEOUT)
    columns = np.split(sum_of_one.cpu().numpy(), np.cumsum([part.size for part in parts])[:-1], axis=1)
    moments, ready, buckets = (
        column.reshape(len(ranks), *part.shape[1:]) for column, part in zip(columns, parts, strict=True)
    )
    return replace(own, moments_ns=moments, ready_ns=ready, buckets_ns=buckets), ranks


_log = logging.getLogger(__name__)


class MemoryLog:
    """An in-memory replacement of an ``EventLogWriter``."""

    def __init__(self) -> None:
        self._rows: list[tuple[bytes, int, int, int, int]] = []

    def append(self, body: bytes, step: int, start_ns: int, end_ns: int, end_uncertainty_ns: int = 0) -> None:
        """Store a record, with the arguments of ``EventLogWriter.append``."""
        self._rows.append((body, step, start_ns, end_ns, end_uncertainty_ns))

    def records(self) -> Records:
        """Return all records, in the form of a log that is read back."""
        rows = self._rows.copy()  # threads may append meanwhile
        packed = b"".join(
            CHECKED_RECORD.pack(0, RECORD.pack(start_ns, end_ns, step, uncertainty_ns, body, number))
            for number, (body, step, start_ns, end_ns, uncertainty_ns) in enumerate(rows, start=1)
        )
        return np.frombuffer(packed, dtype=RECORD_DTYPE)


class MeterSteps(Steps):
    """Steps of a meter, of which each is a reduced pass. Backwards that are reduced are timed, and nothing else."""

    def __init__(self, timer: DeviceTimer) -> None:
        self._timer = timer
        self._backward = make_phase_records(timer.flags, no_sync=False)[Phase.BACKWARD]
        self._backward_start: Mark | None = None

    def enter(self, phase: Phase, *, no_sync: bool = False) -> None:
        """Begin a phase of the backward, and end the one that is open."""
        if no_sync or phase not in (Phase.BACKWARD, Phase.FINALIZE):
            return
        now = self._timer.mark()
        if self.phase is Phase.BACKWARD:
            self._timer.write(self._backward, self.step, self._backward_start, now)
        self.phase, self._backward_start = phase, now

    def leave(self, phase: Phase) -> None:
        """End a phase, if it is the open one."""
        if self.phase is phase:
            if phase is Phase.BACKWARD:
                self._timer.write(self._backward, self.step, self._backward_start, self._timer.mark())
            self.phase = None


class Meter(EventSink):
    """Recorder of one model's timings in memory over some steps, for jobs that are not recorded.

    Args:
        device: where the module computes. On CUDA this waits for the device once, to tie its clock to the host's.
    """

    def __init__(self, device: torch.device) -> None:
        self.log: MemoryLog
        super().__init__(MemoryLog(), device, CompletionWatch(self.disable_recording))
        self.steps = MeterSteps(self.timer)
        self._has_failed = False

    def records(self) -> Records:
        """Return what was recorded so far, except for what the device has not reached yet."""
        for timer in self.timers.values():
            timer.on_step_start()
        return self.log.records()

    def close(self) -> None:
        """Stop recording."""
        self.completions.close()

    def on_gradients_reduced(self, model: int) -> None:  # noqa: ARG002
        """Note that a pass is over, and with it a step of the meter."""
        self.steps.step += 1
        for timer in self.timers.values():
            timer.on_step_start()

    def disable_recording(self, error: Exception) -> None:
        """Log an error once. What was not recorded is missing in the cycles, which say so."""
        if not self._has_failed:
            self._has_failed = True
            _log.warning("steps are no longer measured: %s: %s", type(error).__name__, error)


class Measurement:
    """A measurement of one model, from now until ``end``. Begun and ended between two steps.

    Args:
        reducer: reducer of the model. A plan must be adopted next.
        model: number of the model.
        device: device where it computes.
    """

    def __init__(self, reducer: Reducer, recorder: Recorder | None, model: int, device: torch.device) -> None:
        self._reducer = reducer
        self._recorder = recorder
        self._model = model
        self._steps: list[int] = []
        self._records_before = recorder.log.latest if recorder is not None else 0
        self._meter = Meter(device) if recorder is None else None
        if recorder is not None:
            recorder.modes.is_held = True
        if self._meter is not None:
            self._events_before = reducer.events
            stats, parameters = reducer.events.stats, len(reducer.parameters)
            reducer.set_listener(RecordedReduction(self._meter, model, device, stats, parameters))

    def on_step_start(self) -> bool:
        """Note that a step begins that is to be measured. Return True."""
        sink = self._reducer.events.sink
        assert sink is not None
        self._steps.append(sink.steps.step)
        return True

    def cycles(self, plans: Sequence[BucketPlan], latest: int) -> BucketCycles:
        """Return the cycles of the latest steps. For the very first step, the end of the previous one is unknown.

        Args:
            plans: the plans that the steps ran with.
            latest: number of steps.
        """
        wanted = {plan.buckets for plan in plans}
        active = {number: plan.buckets for number, plan in enumerate(self._reducer.plans) if plan.buckets in wanted}
        steps = self._steps[-latest:]
        return compute_bucket_cycles(self._records(), self._model, active, steps, len(self._reducer.plan.parameters))

    def end(self) -> None:
        """Stop measuring."""
        if self._recorder is not None:
            self._recorder.modes.is_held = False
        if self._meter is not None:
            self._reducer.set_listener(self._events_before)
            self._meter.close()

    def _records(self) -> Records:
        if self._recorder is None:
            assert self._meter is not None
            return self._meter.records()
        log = self._recorder.log
        return read_latest_records(log.path, log.latest - self._records_before)
