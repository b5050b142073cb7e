"""The recording of this process's DDP instances: what they and their reducers tell -> records and files of one rank.

The order of collectives is the collective log's affair, the loop's steps and phases ``steps``'s, and what a reducer
tells ``model_events``'s. Here is what they share: the log, the timers, and the small files.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from instrumented_ddp.bucket_plan import BucketPlan, dtype_name
from instrumented_ddp.collective_log.call_sites import line_of
from instrumented_ddp.collective_log.collectives import Collectives
from instrumented_ddp.collective_log.purposes import Purpose, launched_for
from instrumented_ddp.recording.bypass import Bypass
from instrumented_ddp.recording.clock import ClockSampling
from instrumented_ddp.recording.gc_pauses import GcPauses
from instrumented_ddp.recording.guard import survived, surviving
from instrumented_ddp.recording.housekeeper import Housekeeper
from instrumented_ddp.recording.links import LinkSampler
from instrumented_ddp.recording.metadata import append_plan, describe_rank, describe_run
from instrumented_ddp.recording.models import Models
from instrumented_ddp.recording.optimizers import Optimizers
from instrumented_ddp.recording.records import BucketRecords, PlanRecords, buffer_records
from instrumented_ddp.recording.reduction_events import private_board
from instrumented_ddp.recording.segment_table import SegmentTable
from instrumented_ddp.recording.steps import Steps
from instrumented_ddp.recording.timing import DeviceTimer, Mark, bucket_timer_of, marks_phases_only, timer_of
from overlapscope.errors import OverlapScopeError
from overlapscope.trace.board import ReadinessBoard
from overlapscope.trace.environment import Detail
from overlapscope.trace.format import EVENTS_FILE, NO_CALL_SITE, RANK_FILE, RUN_FILE, Kind, Phase, pack_body, write_json
from overlapscope.trace.host import host_now_ns
from overlapscope.trace.writer import DEFAULT_LIMIT_BYTES, EventLog

_log = logging.getLogger(__name__)


class Recorder:
    """Writes the trace of this process; an ``Observer``.

    Args:
        collectives: the collective log of this process, in whose folder the recording is made.
        models: the DDP instances of this process.
        housekeeper: has done what is done from time to time.
        group: the ranks that train together.
        device: where the module computes; its time line is the trace's.
        detail: ``parameters`` to record the readiness of every gradient as well.
        limit_bytes: most disk space of this rank's log.
        update_begins: called with an optimizer and the step before it updates.
        on_error: called when something of ours went wrong, so that the recording would lack something.

    Raises:
        OverlapScopeError: the folder can't be written, or already holds a recording of this rank.
    """

    def __init__(
        self,
        collectives: Collectives,
        models: Models,
        housekeeper: Housekeeper,
        *,
        group: dist.ProcessGroup,
        device: torch.device,
        detail: Detail = "buckets",
        limit_bytes: int = DEFAULT_LIMIT_BYTES,
        update_begins: Callable[[torch.optim.Optimizer, int], None],
        on_error: Callable[[Exception], None],
    ) -> None:
        self.gives_up = on_error
        """Something of ours went wrong: the training goes on, and the recording of this rank ends."""
        self.collectives = collectives
        self.folder = collectives.folder
        self.detail = detail
        self._models = models
        self.log = EventLog(self.folder / EVENTS_FILE, limit_bytes)
        self.timer = timer_of(device, self.log)
        self._timers = {device: bucket_timer_of(device, self.timer)}
        self.completions = collectives.completions
        self.segments = SegmentTable(self.folder)
        self._call_site = NO_CALL_SITE
        self._run = describe_run(group, device, detail)
        if marks_phases_only(device):
            self._run["device_marks"] = "phases"
        self._bypasses: dict[int, Bypass] = {}
        self._buffers: dict[tuple[int, int, str], BucketRecords] = {}
        self._has_complained = False
        self._tell_of_update = update_begins
        self._optimizers = Optimizers(self._update_begins, self._update_ends, on_error)
        self._steps = Steps(
            self.timer,
            self.log,
            collectives.position,
            has_optimizer=self._optimizers.has_one,
            step_begins=self._step_begins,
        )
        self.on_fetch = surviving(self._steps.fetch_begins, on_error), surviving(self._steps.fetch_ends, on_error)
        """To be called around the training's wait for a batch."""
        self._gc_pauses = GcPauses(self.log, collectives.position)
        self._links = LinkSampler(self.folder, housekeeper)
        self._write(RANK_FILE, describe_rank(collectives.rank, device))
        self._write(RUN_FILE, self._run)
        self._clock = ClockSampling(self.folder, collectives.rank)
        collectives.before_each = lambda: None  # from now on steps are known

    @property
    def step(self) -> int:
        """The optimizer step that records belong to."""
        return self._steps.step

    @property
    def phase(self) -> Phase | None:
        """The phase that is open."""
        return self._steps.phase

    def timer_on(self, device: torch.device) -> DeviceTimer:
        """The timer of one of the devices that a module spans. Phases and steps are timed on the first one's."""
        timer = self._timers.get(device)
        if timer is None:
            timer = self._timers[device] = bucket_timer_of(device, timer_of(device, self.log))
        return timer

    # -- models and plans ----------------------------------------------------------------------------------------

    @survived
    def add_model(
        self,
        number: int,
        module: torch.nn.Module,
        parameters: Sequence[torch.nn.Parameter],
        arguments: dict[str, Any],
    ) -> None:
        """Make a DDP instance known, by its number within the process."""
        self._run["models"].append({"model": number, "class": type(module).__name__, "ddp_arguments": arguments})
        self._bypasses[number] = Bypass(parameters, self.collectives)
        self._optimizers.add(parameters)
        self._write(RUN_FILE, self._run)

    def bypass_of(self, model: int) -> Bypass | None:
        """Who is to be told when the user reaches behind the wrapper of a model."""
        return self._bypasses.get(model)

    @survived
    def hook_is_registered(self, model: int, name: str) -> None:
        """A communication hook reduces a model from now on."""
        frame = self.collectives.call_sites.frame_of_caller()
        self.note_of_model(model, "comm_hook", name)
        self.note_of_model(model, "comm_hook_call_site", line_of(frame) if frame is not None else None)

    @survived
    def note_of_model(self, model: int, name: str, value: object) -> None:
        """Write something down about a model in ``run.json``.

        Args:
            name: ``probing`` or ``auto``, how far that has come; see ``hook_is_registered``.
        """
        for described in self._run["models"]:
            if described["model"] == model:
                described[name] = value
        self._write(RUN_FILE, self._run)

    def plan_takes_effect(self, model: int, epoch: int, plan: BucketPlan, reason: str) -> PlanRecords:
        """Write a plan beside the log.

        Returns:
            The records of its buckets and parameters, packed.
        """
        with self._training_goes_on():
            append_plan(self.folder, model=model, epoch=epoch, plan=plan, reason=reason)
        if reason == "rebuild":
            self._clock.plan_is_rebuilt()
        records = PlanRecords(self.timer.flags, model, epoch, plan)
        now_ns = host_now_ns()
        self.log.append(records.plan, self.step, now_ns, now_ns)
        self._links.sample_soon()
        return records

    def board(self, model: int, parameters: int) -> memoryview[int]:
        """Where it is kept which gradients have come and when; it outlives the process."""
        try:
            return ReadinessBoard(self.folder, model, parameters).ready_ns
        except OverlapScopeError as error:
            self._complain_once(str(error))
            return private_board(parameters)

    # -- steps and phases, as the wrapper tells ------------------------------------------------------------------

    @survived
    def forward_is_called(self) -> None:
        """The wrapper was called."""
        self._steps.forward_is_called()

    @survived
    def enter(self, phase: Phase, *, no_sync: bool = False) -> None:
        """A phase begins; one that is still open has ended."""
        self._steps.enter(phase, no_sync=no_sync)

    @survived
    def leave(self, phase: Phase) -> None:
        """A phase ends, if it is the one that is open."""
        self._steps.leave(phase)

    @survived
    def backward_was_left(self, step: int) -> None:
        """An exception has come out of the newest backward, and was caught: gradients may be missing."""
        self._models.backward_was_left(step)

    @survived
    def gradient_is_not_reduced(self, model: int) -> None:
        """A gradient has come that no reduction waits for, as under ``no_sync()``."""
        if self._steps.phase is not Phase.BACKWARD:  # the output of the wrapper has no part in it
            self._bypasses[model].gradient_comes()

    @survived
    def gradients_are_reduced(self, model: int) -> None:
        """The gradients of a pass are final."""
        self._bypasses[model].gradients_are_reduced()
        self._steps.gradients_are_reduced()

    @survived
    def mark_step(self) -> None:
        """The user says that a step ends here. From now on steps end nowhere else."""
        self._steps.mark_step()

    @survived
    def incident(self) -> None:
        """Something went wrong: keep the newest records where no ring overwrites them."""
        now_ns = host_now_ns()
        self.log.append(pack_body(Kind.INCIDENT, index=self.log.incidents + 1), self.step, now_ns, now_ns)
        self.log.preserve()

    @survived
    def note_caller(self) -> None:
        """The user's line that is running is behind the collectives that follow.

        Where no line of the user's is to be seen, as on autograd's own thread on CUDA, the one before stays.
        """
        call_site = self.collectives.call_sites.number_of_caller() or self._call_site
        self._call_site = self.collectives.position.backward_call_site = call_site

    def launches(self, records: BucketRecords) -> int:
        """A collective is about to be enqueued. Its announcement is on disk when this returns.

        Returns:
            The time that was written, in host nanoseconds.
        """
        now_ns = host_now_ns()
        try:
            self.log.append(records.launch(self._call_site), self.step, now_ns, now_ns)
        except Exception as error:
            self.gives_up(error)
        return now_ns

    @contextmanager
    def broadcasts(self, model: int, buffers: Sequence[torch.Tensor]) -> Iterator[None]:
        """A model's buffers are broadcast inside, by code that waits for it."""
        records, start = self._broadcast_begins(model, buffers)
        with launched_for(Purpose(role="buffers", model=model)):
            yield
        if records is not None:
            self._broadcast_ended(records, start)

    def _broadcast_begins(self, model: int, buffers: Sequence[torch.Tensor]) -> tuple[BucketRecords | None, Mark]:
        try:
            if not buffers:
                return None, None
            what = (model, sum(buffer.numel() for buffer in buffers), dtype_name(buffers[0].dtype))
            records = self._buffers.get(what)
            if records is None:
                records = self._buffers[what] = buffer_records(self.timer.flags, *what)
            self.launches(records)
            return records, self.timer.mark()
        except Exception as error:
            self.gives_up(error)
            return None, None

    @survived
    def _broadcast_ended(self, records: BucketRecords, start: Mark) -> None:
        self.timer.write(records.collective, self.step, start, self.timer.mark())

    # -- the end -------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Write what is still pending and close the log. May be called twice."""
        self._optimizers.close()
        self._gc_pauses.close()
        if self.log.closed:
            return
        self._close_steps()
        self.completions.close()
        for timer in self._timers.values():
            timer.close()
        self.segments.close()
        self.log.close()

    def close_clock(self) -> None:
        """Have a last burst of pings. Waited for, so it comes last."""
        self._clock.close()

    @survived
    def _close_steps(self) -> None:
        self._steps.close()

    # -- small parts ---------------------------------------------------------------------------------------------

    def _step_begins(self) -> None:
        for timer in self._timers.values():
            timer.step_begins()
        self.log.reserve()
        if self.log.disk_is_full:
            self._complain_once("the disk is full; the newest steps are kept")

    @survived
    def _update_begins(self, optimizer: torch.optim.Optimizer) -> None:
        if self.log.closed:
            return
        for model, bypass in self._bypasses.items():
            call_site = bypass.line_of_unreduced(optimizer)
            if call_site != NO_CALL_SITE:
                self._models.gradients_were_not_reduced(model, call_site)
        self._steps.update_begins()
        self._tell_of_update(optimizer, self.step)

    @survived
    def _update_ends(self) -> None:
        self._steps.update_ends()

    def _write(self, name: str, content: dict[str, Any]) -> None:
        with self._training_goes_on():
            write_json(self.folder / name, content)

    @contextmanager
    def _training_goes_on(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self._complain_once(f"can't be written ({error.strerror}); the recording is incomplete")

    def _complain_once(self, what: str) -> None:
        if not self._has_complained:
            self._has_complained = True
            _log.warning("%s: %s", self.folder, what)
