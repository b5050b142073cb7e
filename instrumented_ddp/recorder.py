"""What the wrapper and the reducer do -> trace records.

One recorder per process writes one rank's folder. The steps and phases of a training loop are derived from hooks:
the forward of the wrapper, the first gradient of its output, the end of autograd, and the hooks that torch calls
around every optimizer's ``step``. A step ends with its last optimizer, which is known when the next forward
begins. Loops in which that is not so (two optimizers that alternate, as in a GAN) call ``instrumented_ddp.step()``.
"""

from __future__ import annotations

import atexit
import gc
import mmap
import os
import sys
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

import torch
import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.weak import WeakIdKeyDictionary

from instrumented_ddp.bucket_plan import BucketPlan
from instrumented_ddp.clock import ClockSampling
from instrumented_ddp.collective_log.bypass import Bypass
from instrumented_ddp.collective_log.collectives import Collectives
from instrumented_ddp.collective_log.farewell import call_at_exit
from instrumented_ddp.collective_log.purposes import launched_for
from instrumented_ddp.completion import CompletionWatch
from instrumented_ddp.gc_pauses import GcPauses
from instrumented_ddp.links import LinkSampler
from instrumented_ddp.metadata import append_plan, describe_rank, describe_run, rank_of_this_process
from instrumented_ddp.records import ENTER_RECORDS, BucketRecords, PlanRecords, phase_records
from instrumented_ddp.timing import HostTimeline, Mark, Timeline, host_now_ns, timeline_of
from overlapscope.errors import OverlapScopeError
from overlapscope.trace.board import ReadinessBoard
from overlapscope.trace.environment import Detail, recording_from_environment
from overlapscope.trace.format import (
    EVENTS_FILE,
    NO_CALL_SITE,
    RANK_FILE,
    RUN_FILE,
    Kind,
    Phase,
    pack_body,
    ready_file,
    write_json,
)
from overlapscope.trace.group_log import UNKNOWN_PHASE
from overlapscope.trace.writer import DEFAULT_LIMIT_BYTES, EventLog

_DATA_WAIT_FOLLOWS: Final = (Phase.BACKWARD, Phase.FINALISE, Phase.OPTIMIZER, Phase.EVALUATION)
"""Between one of these and the next forward a loop fetches data; between two forwards it computes."""


class Recorder:
    """Writes the trace of this process.

    Args:
        collectives: the collective log of this process, in whose folder the recording is made.
        group: the ranks that train together.
        device: where the module computes; its time line is the trace's.
        detail: ``parameters`` to record the readiness of every gradient as well.
        limit_bytes: most disk space of this rank's log.

    Raises:
        OverlapScopeError: the folder can't be written, or already holds a recording of this rank.
    """

    def __init__(
        self,
        collectives: Collectives,
        *,
        group: dist.ProcessGroup,
        device: torch.device,
        detail: Detail = "buckets",
        limit_bytes: int = DEFAULT_LIMIT_BYTES,
    ) -> None:
        self.collectives = collectives
        self.folder = collectives.folder
        self.detail = detail
        self.log = EventLog(self.folder / EVENTS_FILE, limit_bytes)
        self.timeline = timeline_of(device, self.log)
        self._timelines = {device: self.timeline}
        self.completions = CompletionWatch(self.log)
        self._call_site = NO_CALL_SITE
        self._run = describe_run(group, detail)
        self._bypasses: dict[int, Bypass] = {}
        self._model_of_parameter = WeakIdKeyDictionary()
        self._is_ours: weakref.WeakKeyDictionary[torch.optim.Optimizer, bool] = weakref.WeakKeyDictionary()
        self._reduced_phases = phase_records(self.timeline.flags, no_sync=False)
        self._no_sync_phases = phase_records(self.timeline.flags, no_sync=True)
        self._step_record = pack_body(Kind.STEP, flags=self.timeline.flags)

        self.step = 0
        self._step_start: Mark | None = None
        self.phase_since_ns = 0
        """When the newest phase began that was announced; a wait for data is announced with the end of the update."""
        self._last_phase: Phase | None = None
        self._last_phase_end: Mark | None = None
        self._open_phase: Phase | None = None
        self._open_phase_start: Mark | None = None
        self._open_phase_is_no_sync = False
        self._step_is_marked_by_user = False
        self._optimizer_is_stepping = False
        self._closure_has_run = False
        self._optimizer_has_stepped = False
        self._optimizer_is_known: bool | None = None
        self._gradients_are_reduced = False
        self._has_complained = False
        self._gc_pauses = GcPauses(self.log, self._step_of_host)
        self._links = LinkSampler(self.folder)

        with self._training_goes_on():
            write_json(self.folder / RANK_FILE, describe_rank(collectives.rank, device))
            write_json(self.folder / RUN_FILE, self._run)
        self._clock = ClockSampling(self.folder, collectives.rank)
        self._optimizer_hooks = [
            register_optimizer_step_pre_hook(self._optimizer_begins),
            register_optimizer_step_post_hook(self._optimizer_ends),
        ]
        collectives.recorder = self
        collectives.where = self._where
        call_at_exit(self.close)

    def timeline_on(self, device: torch.device) -> Timeline:
        """The time line of one of the devices that a module spans. Phases and steps are timed on the first one's."""
        timeline = self._timelines.get(device)
        if timeline is None:
            timeline = self._timelines[device] = timeline_of(device, self.log)
        return timeline

    # -- models and plans ----------------------------------------------------------------------------------------

    def add_model(
        self,
        number: int,
        module: torch.nn.Module,
        parameters: Sequence[torch.nn.Parameter],
        arguments: dict[str, Any],
    ) -> Bypass:
        """Make a DDP instance known, by its number within the process.

        Returns:
            Who is to be told when the user reaches behind the wrapper.
        """
        self._run["models"].append({"model": number, "class": type(module).__name__, "ddp_arguments": arguments})
        self._bypasses[number] = Bypass(parameters, self.collectives)
        self._model_of_parameter.update(dict.fromkeys(parameters, number))
        self._is_ours.clear()
        with self._training_goes_on():
            write_json(self.folder / RUN_FILE, self._run)
        return self._bypasses[number]

    def comm_hook_reduces(self, model: int, name: str) -> None:
        """A hook reduces a model's buckets from now on. It need not wait for all ranks."""
        self._note_of_model(model, "comm_hook", name)

    def _note_of_model(self, model: int, name: str, value: object) -> None:
        for described in self._run["models"]:
            if described["model"] == model:
                described[name] = value
        with self._training_goes_on():
            write_json(self.folder / RUN_FILE, self._run)

    def probing_is(self, model: int, state: dict[str, Any]) -> None:
        """How far the probing of a model's bucket plans has come, for ``run.json``."""
        self._note_of_model(model, "probing", state)

    def choosing_is(self, model: int, state: dict[str, Any]) -> None:
        """How far ``bucket_cap_mb="auto"`` of a model has come, for ``run.json``."""
        self._note_of_model(model, "auto", state)

    def plan_takes_effect(self, model: int, epoch: int, plan: BucketPlan, reason: str) -> PlanRecords:
        """Write a plan beside the log.

        Returns:
            The records of its buckets and parameters, packed.
        """
        with self._training_goes_on():
            append_plan(self.folder, model=model, epoch=epoch, plan=plan, reason=reason)
        if reason == "rebuild":
            self._clock.plan_is_rebuilt()
        records = PlanRecords(self.timeline.flags, model, epoch, plan)
        now_ns = host_now_ns()
        self.log.append(records.plan, self.step, now_ns, now_ns)
        self._links.sample_soon()
        return records

    def ready_board(self, model: int, parameters: int) -> memoryview[int]:
        """A byte a parameter, for the reducer to say which gradients have come; it outlives the process."""
        try:
            with (self.folder / ready_file(model)).open("x+b") as file:
                os.posix_fallocate(file.fileno(), 0, parameters)
                return memoryview(mmap.mmap(file.fileno(), parameters))
        except (OSError, ValueError) as error:
            self._complain_once(f"{ready_file(model)} can't be made ({error})")
            return memoryview(bytearray(parameters))

    def readiness_board(self, model: int, parameters: int) -> memoryview[int] | None:
        """Where gradient hooks store the time, until their bucket is ready and the records are written.

        Returns:
            Host nanoseconds by parameter number; None if no gradients are recorded, on a device whose marks are no
            host times, or without a file.
        """
        if self.detail == "buckets" or not isinstance(self.timeline, HostTimeline):
            return None
        try:
            return ReadinessBoard(self.folder, model, parameters).ready_ns
        except OverlapScopeError as error:
            self._complain_once(str(error))
            return None

    def gradients_were_ready(self, indices: Sequence[int], records: Sequence[bytes], ready_ns: Sequence[int]) -> None:
        """Write when the gradients of a bucket were ready.

        Args:
            indices: of the bucket's parameters.
            records: packed, by parameter.
            ready_ns: host nanoseconds, by parameter.
        """
        append, step = self.log.append, self.step
        for index in indices:
            append(records[index], step, ready_ns[index], ready_ns[index])

    # -- steps and phases ----------------------------------------------------------------------------------------

    def forward_is_called(self) -> None:
        """The data is there: the wait for it is over, and so may be the step before.

        An evaluation between two optimizer steps belongs to the second.
        """
        now = self.timeline.mark()
        is_within_update = self._optimizer_is_stepping and self._closure_has_run
        if self._optimizer_is_stepping and not self._closure_has_run:
            self._open_phase = None  # optimizer.step(closure): the update has not begun, the closure comes first
            self._closure_has_run = True
        if self._open_phase is not None:
            self._end_open_phase(now)
        if self._step_start is None:
            self._step_start = now
            self._step_begins()
            return
        # An optimizer may call its closure again and again, as LBFGS does: all that is one step.
        step_is_over = self._optimizer_has_stepped or (
            # With an optimizer of torch this is an accumulation, or an update that was left out.
            self._gradients_are_reduced and not self._optimizer_is_stepping and not self._has_optimizer()
        )
        if step_is_over and not self._step_is_marked_by_user:
            # Without an optimizer of torch nobody knows where the update ended and the data loader began.
            self._end_step(self._last_phase_end if self._optimizer_has_stepped else now)
        if self._last_phase in _DATA_WAIT_FOLLOWS and not is_within_update:
            self.timeline.write(self._reduced_phases[Phase.DATA_WAIT], self.step, self._last_phase_end, now)
            self._last_phase = Phase.DATA_WAIT

    def enter(self, phase: Phase, *, no_sync: bool = False) -> None:
        """A phase begins; one that is still open has ended."""
        now = self.timeline.mark()
        if self._open_phase is not None:
            self._end_open_phase(now)
        self._open_phase, self._open_phase_start = phase, now
        self._open_phase_is_no_sync = no_sync
        self._announce(phase)

    def leave(self, phase: Phase) -> None:
        """A phase ends, if it is the one that is open."""
        if self._open_phase is phase:
            self._end_open_phase(self.timeline.mark())
            if phase is Phase.BACKWARD and self._open_phase_is_no_sync:
                self._resume_optimizer()

    @property
    def phase(self) -> Phase | None:
        """The phase that is open."""
        return self._open_phase

    def gradient_is_not_reduced(self, model: int) -> None:
        """A gradient has come that no reduction waits for, as under ``no_sync()``."""
        if self._open_phase is not Phase.BACKWARD:  # the output of the wrapper has no part in it
            self._bypasses[model].gradient_comes()

    def gradients_are_reduced(self, model: int) -> None:
        """The gradients of a pass are final: the step may end, also if no optimizer of torch is ever seen."""
        self._bypasses[model].gradients_are_reduced()
        self._gradients_are_reduced = True
        self._resume_optimizer()

    def mark_step(self) -> None:
        """The user says that a step ends here. From now on steps end nowhere else."""
        now = self.timeline.mark()
        if self._open_phase is not None:
            self._end_open_phase(now)
        self._step_is_marked_by_user = True
        self._end_step(now)

    def incident(self) -> None:
        """Something went wrong: keep the newest records where no ring overwrites them."""
        now_ns = host_now_ns()
        self.log.append(pack_body(Kind.INCIDENT, index=self.log.incidents + 1), self.step, now_ns, now_ns)
        self.log.preserve()

    def note_caller(self) -> None:
        """The user's line that is running is behind the collectives that follow.

        Where no line of the user's is to be seen, as on autograd's own thread on CUDA, the one before stays.
        """
        call_site = self.collectives.call_sites.number_of_caller() or self._call_site
        self._call_site = self.collectives.line_of_backward = call_site

    def launches(self, records: BucketRecords) -> int:
        """A collective is about to be enqueued. Its announcement is on disk when this returns.

        Returns:
            The time that was written, in host nanoseconds.
        """
        now_ns = host_now_ns()
        self.log.append(records.launch(self._call_site), self.step, now_ns, now_ns)
        return now_ns

    @contextmanager
    def broadcasts(self, records: BucketRecords) -> Iterator[None]:
        """Buffers are broadcast inside, by code that waits for it."""
        self.launches(records)
        start = self.timeline.mark()
        with launched_for(records.purpose):
            yield
        self.timeline.write(records.collective, self.step, start, self.timeline.mark())

    def close(self) -> None:
        """Write what is still pending and close the log. Called at exit; may be called before, and twice."""
        for hook in self._optimizer_hooks:
            hook.remove()
        atexit.unregister(self.close)
        if self.log.closed:
            return
        if self._open_phase is not None:
            self._end_open_phase(self.timeline.mark())
        if self._optimizer_has_stepped and not self._step_is_marked_by_user:
            self._end_step(self._last_phase_end)
        self._gc_pauses.close()
        self._links.close()
        self.completions.close()
        for timeline in self._timelines.values():
            timeline.close()
        self.log.close()
        self.collectives.close()
        self._clock.close()

    def _step_of_host(self) -> int:
        """The step that the host is in: after the last optimizer that is the next one, which no forward has begun."""
        return self.step + (self._optimizer_has_stepped and not self._step_is_marked_by_user)

    def _where(self) -> tuple[int, int]:
        """Step and phase of the host, for the collective log."""
        phase = self._open_phase
        if phase is None:
            is_data_wait = self._last_phase in _DATA_WAIT_FOLLOWS
            return self._step_of_host(), Phase.DATA_WAIT if is_data_wait else UNKNOWN_PHASE
        return self._step_of_host(), phase

    def _end_step(self, end: Mark) -> None:
        if self._step_start is None:
            return
        self.timeline.write(self._step_record, self.step, self._step_start, end)
        self.step += 1
        self._step_start = end
        self._optimizer_has_stepped = self._gradients_are_reduced = False
        self._step_begins()
        self.log.reserve()
        if self.log.disk_is_full:
            self._complain_once("the disk is full; the newest steps are kept")

    def _step_begins(self) -> None:
        for timeline in self._timelines.values():
            timeline.step_begins()

    def _end_open_phase(self, now: Mark) -> None:
        phase = self._open_phase
        assert phase is not None
        records = self._no_sync_phases if self._open_phase_is_no_sync else self._reduced_phases
        self.timeline.write(records[phase], self.step, self._open_phase_start, now)
        self._last_phase, self._last_phase_end = phase, now
        self._open_phase = None
        if phase is Phase.OPTIMIZER:
            self._announce(Phase.DATA_WAIT)

    def _announce(self, phase: Phase) -> None:
        now_ns = self.phase_since_ns = host_now_ns()
        self.log.append(ENTER_RECORDS[phase], self.step, now_ns, now_ns)

    @contextmanager
    def _training_goes_on(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self._complain_once(f"can't be written ({error.strerror}); the recording is incomplete")

    def _complain_once(self, what: str) -> None:
        if not self._has_complained:
            self._has_complained = True
            print(f"overlapscope: {self.folder}: {what}", file=sys.stderr)

    def _optimizer_begins(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        if self._updates_our_parameters(optimizer):
            self._look_for_unreduced()
            self._optimizer_is_stepping = True
            self._closure_has_run = False
            self.enter(Phase.OPTIMIZER)

    def _optimizer_ends(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        if self._updates_our_parameters(optimizer):
            self.leave(Phase.OPTIMIZER)
            self._optimizer_is_stepping = False
            self._optimizer_has_stepped = self._optimizer_is_known = True

    def _look_for_unreduced(self) -> None:
        for model, bypass in self._bypasses.items():
            call_site = bypass.line_of_unreduced()
            if call_site != NO_CALL_SITE:
                self.collectives.gradients_were_not_reduced(model, call_site)

    def _has_optimizer(self) -> bool:
        """Whether an optimizer of torch updates our parameters, also one that has not stepped yet.

        Looked for among all objects, which takes a moment, once: after the first reduction without an update.
        """
        if self._optimizer_is_known is None:
            optimizers = [thing for thing in gc.get_objects() if issubclass(type(thing), torch.optim.Optimizer)]
            self._optimizer_is_known = any(self._updates_our_parameters(optimizer) for optimizer in optimizers)
        return self._optimizer_is_known

    def _resume_optimizer(self) -> None:
        """A backward is over; if a closure has run it, the optimizer goes on with the update."""
        if self._optimizer_is_stepping:
            self.enter(Phase.OPTIMIZER)

    def _updates_our_parameters(self, optimizer: torch.optim.Optimizer) -> bool:
        known = self._is_ours.get(optimizer)
        if known is None:
            known = any(p in self._model_of_parameter for group in optimizer.param_groups for p in group["params"])
            self._is_ours[optimizer] = known
        return known


_of_this_process: Recorder | None = None


def recorder_of_this_process(
    collectives: Collectives, *, group: dist.ProcessGroup, device: torch.device, detail: Detail, limit_bytes: int
) -> Recorder:
    """The recorder that all DDP instances of a process share; made on first use.

    Raises:
        OverlapScopeError: it can't be made.
    """
    global _of_this_process
    existing = _of_this_process
    if existing is None or existing.log.closed:
        existing = _of_this_process = Recorder(
            collectives, group=group, device=device, detail=detail, limit_bytes=limit_bytes
        )
    return existing


def make_recorder(collectives: Collectives | None, group: dist.ProcessGroup, device: torch.device) -> Recorder | None:
    """The recorder that belongs to a collective log. A recording that fails never stops a training run."""
    if collectives is None:
        return None
    try:
        recording = recording_from_environment(collectives.folder.parent)
        assert recording is not None
        return recorder_of_this_process(
            collectives,
            group=group,
            device=device,
            detail=recording.detail,
            limit_bytes=recording.limit_bytes,
        )
    except OverlapScopeError as error:
        collectives.close()
        print(f"overlapscope: rank {rank_of_this_process(group)} trains on, unrecorded: {error}", file=sys.stderr)
        return None


def step() -> None:
    """Say that an optimizer step ends here, where hooks can't tell. Does nothing if nothing is being recorded.

    Once called, steps end only where it is called.
    """
    if _of_this_process is not None and not _of_this_process.log.closed:
        _of_this_process.mark_step()
