"""Recorder of this process's DDP instances: turns events of the wrapper and its reducers into records and files.

The order of collectives is recorded by the collective log, steps and phases by ``steps``, and events of a reducer by
``events``. This module holds what they share: the log, the timers, and the small files.
"""

from __future__ import annotations

import gc
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Final

import torch
import torch.distributed as dist

from instrumented_ddp.bucket_plan import BucketPlan, dtype_name
from instrumented_ddp.collectives.backends import explain_bounds
from instrumented_ddp.collectives.call_sites import describe_frame
from instrumented_ddp.collectives.log import CollectiveRecorder
from instrumented_ddp.collectives.position import TrainingPosition
from instrumented_ddp.collectives.roles import CollectiveRole, collective_context
from instrumented_ddp.collectives.user_reductions import GradientReader
from instrumented_ddp.native import RecordStore
from instrumented_ddp.recording.background import (
    BackgroundScheduler,
    never_raise,
    never_raising,
    suppress_recorder_errors,
)
from instrumented_ddp.recording.clock_sync import ClockSync
from instrumented_ddp.recording.coverage import ReductionCoverage
from instrumented_ddp.recording.events import EventSink, make_private_ready_times
from instrumented_ddp.recording.finite_check import GradientCheck
from instrumented_ddp.recording.loop_facts import ModelLoop
from instrumented_ddp.recording.metadata import append_plan, describe_rank, describe_run
from instrumented_ddp.recording.models import ModelRegistry
from instrumented_ddp.recording.modes import ModeFollower
from instrumented_ddp.recording.records import BucketRecords, PlanRecords, SegmentTable, make_buffer_records
from instrumented_ddp.recording.steps import OptimizerHooks, StepTracker
from instrumented_ddp.recording.tcp_stats import LinkSampler
from instrumented_ddp.recording.timing import Mark, should_mark_phases_only
from overlapscope.diagnosis.loop_facts import LoopFacts
from overlapscope.errors import OverlapScopeError
from overlapscope.trace.clocks import host_now_ns
from overlapscope.trace.environment import DEFAULT_EVERY, Detail
from overlapscope.trace.event_log import EventLogWriter
from overlapscope.trace.json_files import write_json
from overlapscope.trace.live_files import GradientReadyFile
from overlapscope.trace.schema import (
    DEFAULT_LIMIT_BYTES,
    EVENTS_FILE,
    NO_CALL_SITE,
    RANK_FILE,
    RUN_FILE,
    Kind,
    Phase,
    pack_body,
)

_log = logging.getLogger(__name__)


class Recorder(EventSink):
    """Writer of this process's trace.

    Args:
        collectives: the collective log of this process, in whose folder the recording is made.
        models: the DDP instances of this process.
        scheduler: runs periodic tasks.
        group: ranks that train together.
        device: device on which the module computes; phases and steps are timed on it.
        detail: ``parameters`` to also record the ready time of every gradient.
        every: which steps are recorded in full until a user asks for others, as in ``RecordingMode``.
        limit_bytes: maximum disk space of this rank's log.
        first_step: number of the first step.
        on_update_start: called with an optimizer and the step before it updates.
        on_unreduced_update: called with a model before an update with gradients that DDP has not averaged.
        on_inputs: called with what the first model is given in training.
        on_error: called with an internal error that would leave the recording incomplete.

    Raises:
        OverlapScopeError: the folder can't be written, or already holds a recording of this rank.
    """

    def __init__(
        self,
        collectives: CollectiveRecorder,
        models: ModelRegistry,
        scheduler: BackgroundScheduler,
        *,
        group: dist.ProcessGroup,
        device: torch.device,
        detail: Detail = "buckets",
        every: int = DEFAULT_EVERY,
        limit_bytes: int = DEFAULT_LIMIT_BYTES,
        first_step: int = 0,
        on_update_start: Callable[[torch.optim.Optimizer, int], None],
        on_unreduced_update: Callable[[int], None],
        on_inputs: Callable[[Iterable[Any]], None],
        on_error: Callable[[Exception], None],
    ) -> None:
        self.folder = collectives.folder
        self.log: EventLogWriter
        super().__init__(
            EventLogWriter(self.folder / EVENTS_FILE, limit_bytes, RecordStore), device, collectives.completions
        )
        self._on_error = on_error
        self.collectives: CollectiveRecorder = collectives
        self.modes: ModeFollower = ModeFollower(self.folder, every=every, detail=detail)
        self._steps_since_off = 0
        self._adopt_mode()
        self._models = models
        self.segments: SegmentTable = SegmentTable(self.folder)
        self._call_site = NO_CALL_SITE
        self._run = describe_run(group, device, detail)
        if should_mark_phases_only(device):
            self._run["device_marks"] = "phases"
        elif (why := explain_bounds(group, device)) is not None:
            self._run["ends_are_bounds"] = why
            if group.rank() == 0:
                _log.warning("the ends of collectives are recorded as upper bounds: %s", why)
        self._coverage: dict[int, ReductionCoverage] = {}
        self._gradient_checks: dict[int, GradientCheck] = {}
        self._loops: dict[int, ModelLoop] = {}
        self._ranks = frozenset(dist.get_process_group_ranks(group))
        self._on_inputs = on_inputs
        self._buffers: dict[tuple[int, int, str], BucketRecords] = {}
        self._has_warned = False
        self._on_update_start = on_update_start
        self.on_model: Callable[[Iterator[torch.Tensor]], None] = lambda _: None
        """Called with all parameters of a DDP instance as it is registered."""
        self._on_unreduced_update = on_unreduced_update
        self._optimizers = OptimizerHooks(self._update_begins, self._update_ends, on_error)
        self.steps: StepTracker = StepTracker(
            self.timer,
            self.log,
            collectives.position,
            self.modes,
            has_optimizer=self._optimizers.has_optimizer,
            find_others=self._optimizers.find_others,
            on_step_start=self._step_begins,
            first_step=first_step,
        )
        self.on_fetch = (
            never_raising(self.steps.on_fetch_start, on_error),
            never_raising(self.steps.on_fetch_end, on_error),
        )
        """Callbacks for before and after the training waits for a batch."""
        self._gc_pauses = GcPauses(self.log, collectives.position, self.modes)
        self._links = LinkSampler(self.folder, scheduler)
        self._write(RANK_FILE, describe_rank(collectives.rank, device))
        self._write(RUN_FILE, self._run)
        self._clock = ClockSync(self.folder, collectives.rank)
        collectives.before_collective = lambda: None  # from now on steps are known

    def disable_recording(self, error: Exception) -> None:
        """End the recording of this rank after an internal error; training continues."""
        self._on_error(error)

    # -- models and plans ----------------------------------------------------------------------------------------

    @never_raise
    def add_model(
        self,
        number: int,
        module: torch.nn.Module,
        parameters: Sequence[torch.nn.Parameter],
        arguments: dict[str, Any],
    ) -> None:
        """Register a DDP instance by its number within the process."""
        self._run["models"].append({"model": number, "class": type(module).__name__, "ddp_arguments": arguments})
        self._coverage[number] = ReductionCoverage(parameters, self.collectives)
        self._gradient_checks[number] = GradientCheck(number, parameters, self._models.record_non_finite)
        reader = GradientReader(self.collectives.user_reductions, parameters, within=self._ranks)
        names = self._models.names_of(number)
        self._loops[number] = ModelLoop(number, names, parameters, self.collectives, reader)
        for check in self._gradient_checks.values():
            check.share_budget(len(self._gradient_checks))
        self._optimizers.add(parameters)
        self.on_model(module.parameters())
        self._write(RUN_FILE, self._run)

    @never_raise
    def add_parameters(
        self, number: int, name: str, parameters: Sequence[torch.Tensor], arguments: dict[str, Any]
    ) -> None:
        """Register parameters that no wrapper reduces, but the training loop itself.

        Args:
            name: class of the module that holds them.
        """
        self._run["models"].append({"model": number, "class": name, "ddp_arguments": arguments})
        self._optimizers.add(parameters)
        self._write(RUN_FILE, self._run)

    def get_coverage(self, model: int) -> ReductionCoverage | None:
        """Return the detector of updates of a model with gradients that were not reduced."""
        return self._coverage.get(model)

    def collect_loop_facts(self) -> LoopFacts:
        """Return what the loop does with each model. Called on another thread."""
        found = [loop.summarize() for loop in list(self._loops.values())]
        return LoopFacts(
            repeated=tuple(one for of_model in found for one in of_model.repeated),
            micro_batches=tuple(one for of_model in found for one in of_model.micro_batches),
            unheld=tuple(one for of_model in found for one in of_model.unheld),
        )

    @never_raise
    def record_comm_hook(self, model: int, name: str) -> None:
        """Record that a communication hook reduces a model from now on."""
        frame = self.collectives.call_sites.find_caller_frame()
        self.set_model_info(model, "comm_hook", name)
        self.set_model_info(model, "comm_hook_call_site", describe_frame(frame) if frame is not None else None)

    @never_raise
    def set_model_info(self, model: int, name: str, value: object) -> None:
        """Add an entry about a model to ``run.json``.

        Args:
            name: key of the entry, for example ``probing`` or ``auto`` for their progress; see ``record_comm_hook``.
        """
        for described in self._run["models"]:
            if described["model"] == model:
                described[name] = value
        self._write(RUN_FILE, self._run)

    def activate_plan(self, model: int, epoch: int, plan: BucketPlan, reason: str) -> PlanRecords:
        """Write a plan next to the log.

        Returns:
            The packed records of its buckets and parameters.
        """
        with self._suppressing_disk_errors():
            append_plan(self.folder, model=model, epoch=epoch, plan=plan, reason=reason)
        if reason == "rebuild":
            self._clock.on_plan_rebuilt()
        records = PlanRecords(self.timer.flags, model, epoch, plan)
        if (check := self._gradient_checks.get(model)) is not None:
            check.adopt(plan)
        now_ns = host_now_ns()
        self.log.append(records.plan, self.steps.step, now_ns, now_ns)
        self._links.sample_soon()
        return records

    def map_ready_times(self, model: int, parameters: int) -> memoryview[int]:
        """Return a model's ready times by parameter, mapped to a file if possible, which outlives the process."""
        try:
            return GradientReadyFile(self.folder, model, parameters).ready_ns
        except OverlapScopeError as error:
            self._warn_once(str(error))
            return make_private_ready_times(parameters)

    # -- passes --------------------------------------------------------------------------------------------------

    @never_raise
    def on_training_forward(self, model: int, inputs: Sequence[Any], more: Mapping[str, Any]) -> None:
        """Note what a model is given in a training.

        Args:
            inputs: positional arguments of its forward.
            more: the other arguments.
        """
        self._gradient_checks[model].on_forward_start(inputs, more)
        if model == 0:
            with suppress(Exception):  # from the user's tensors
                self._on_inputs((*inputs, *more.values()))

    def check_gradients(self, model: int, bucket: int, buffer: torch.Tensor) -> None:
        """Look for NaN and infinity in a bucket that is about to be reduced."""
        self._gradient_checks[model].on_launch(bucket, buffer, self.steps.step)

    def on_interrupted_backward(self, step: int) -> None:
        """Note that an exception came out of the latest backward and was caught: gradients may be missing."""
        self._models.on_interrupted_backward(step)

    def on_backward(self, model: int, *, no_sync: bool) -> None:
        """Note that a backward has reached the output of a model."""
        self._coverage[model].on_backward(no_sync=no_sync)
        self._loops[model].on_backward()

    def on_unreduced_gradient(self, model: int, index: int) -> None:
        """Note that a gradient has arrived that no reduction waits for, as under ``no_sync()``."""
        self._coverage[model].on_local_gradient(index, in_backward=self.steps.phase is Phase.BACKWARD)

    def on_gradients_reduced(self, model: int) -> None:
        """Note that the gradients of a pass are final."""
        self._coverage[model].on_gradients_reduced()
        self._loops[model].on_gradients_reduced()
        self._gradient_checks[model].on_reduced(self.steps.step)
        self.steps.on_gradients_reduced()

    @never_raise
    def incident(self) -> None:
        """Record an incident, and preserve the latest records from being overwritten in the ring buffer."""
        now_ns = host_now_ns()
        self.log.append(pack_body(Kind.INCIDENT, index=self.log.incidents + 1), self.steps.step, now_ns, now_ns)
        self.log.preserve()

    def update_call_site(self) -> None:
        """Use the running line of user code as the call site of the following collectives.

        If no line of user code is visible, as on autograd's thread on CUDA, the previous one is kept.
        """
        call_site = self.collectives.call_sites.get_caller_number() or self._call_site
        self._call_site = self.collectives.position.backward_call_site = call_site

    def record_launch(self, records: BucketRecords) -> int:
        """Record that a collective is about to be enqueued. Its announcement is on disk when this returns.

        Returns:
            The recorded time, in host nanoseconds.
        """
        now_ns = host_now_ns()
        try:
            self.log.append(records.launch(self._call_site), self.steps.step, now_ns, now_ns)
        except Exception as error:
            self.disable_recording(error)
        return now_ns

    @contextmanager
    def broadcasts(self, model: int, buffers: Sequence[torch.Tensor]) -> Iterator[None]:
        """Record the broadcast of a model's buffers that runs, and is waited for, inside."""
        records, start = self._broadcast_begins(model, buffers)
        with collective_context(CollectiveRole(role="buffers", model=model)):
            yield
        if records is not None:
            self._broadcast_ended(records, start)

    def _broadcast_begins(self, model: int, buffers: Sequence[torch.Tensor]) -> tuple[BucketRecords | None, Mark]:
        try:
            if not buffers or not self.is_on:
                return None, None
            what = (model, sum(buffer.numel() for buffer in buffers), dtype_name(buffers[0].dtype))
            records = self._buffers.get(what)
            if records is None:
                records = self._buffers[what] = make_buffer_records(self.timer.flags, *what)
            self.record_launch(records)
            return records, self.timer.mark()
        except Exception as error:
            self.disable_recording(error)
            return None, None

    @never_raise
    def _broadcast_ended(self, records: BucketRecords, start: Mark) -> None:
        self.timer.write(records.collective, self.steps.step, start, self.timer.mark())

    # -- closing -------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Write pending records and close the log. May be called twice."""
        self._optimizers.close()
        self._gc_pauses.close()
        if self.log.closed:
            return
        self._models.write_unreduced()
        with suppress_recorder_errors(self.disable_recording):
            self.steps.close()
            for check in self._gradient_checks.values():
                check.close()
        self.completions.close()
        for timer in self.timers.values():
            timer.close()
        self.segments.close()
        self.log.close()

    def close_clock(self) -> None:
        """Run the last burst of clock pings. Blocks, so call it last."""
        self._clock.close()

    # -- helpers -------------------------------------------------------------------------------------------------

    def _adopt_mode(self) -> None:
        self.is_on, self.is_full, self.detail = self.modes.is_on, self.modes.is_full, self.modes.detail

    def _step_begins(self) -> None:
        self.modes.on_step_start(self.steps.step)
        self._adopt_mode()
        self._steps_since_off = 0 if self.is_on else self._steps_since_off + 1
        if self._steps_since_off > _STEPS_TO_FLUSH:
            return
        for timer in self.timers.values():
            timer.on_step_start()
        self.log.reserve()
        if self.log.is_disk_full:
            self._warn_once("the disk is full; the latest steps are kept")

    def _update_begins(self, optimizer: torch.optim.Optimizer, has_closure: bool) -> None:
        if self.log.closed:
            return
        if not has_closure:  # its backwards are yet to come
            self._find_unreduced(optimizer)
        self.steps.on_update_start()
        self._on_update_start(optimizer, self.steps.step)

    def _update_ends(self, optimizer: torch.optim.Optimizer, has_closure: bool, is_inner: bool) -> None:
        if has_closure and not self.log.closed:
            self._find_unreduced(optimizer)
        self.steps.on_update_end(optimizer, is_inner=is_inner)

    def _find_unreduced(self, optimizer: torch.optim.Optimizer) -> None:
        """Record which of its gradients an optimizer takes as they are on this rank."""
        if self.steps.phase in (Phase.BACKWARD, Phase.FINALIZE):  # optimizers in backward: nothing is over yet
            return
        self._models.on_update()
        have_reduced = [coverage for coverage in self._coverage.values() if coverage.has_reduced]
        for model, coverage in self._coverage.items():
            found = coverage.take_unreduced_update(optimizer, have_reduced)
            if found is not None:
                self._models.record_unreduced_update(model, found, self.collectives.position.step)
            if coverage.has_gap:
                self._on_unreduced_update(model)
            self._loops[model].on_update(optimizer, self.collectives.position.step)

    def _write(self, name: str, content: dict[str, Any]) -> None:
        with self._suppressing_disk_errors():
            write_json(self.folder / name, content)

    @contextmanager
    def _suppressing_disk_errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self._warn_once(f"can't be written ({error.strerror}); the recording is incomplete")

    def _warn_once(self, what: str) -> None:
        if not self._has_warned:
            self._has_warned = True
            _log.warning("%s: %s", self.folder, what)


_STEPS_TO_FLUSH: Final = 2
"""Number of steps after the last recorded one in which times of a device may still become known."""
_SHORTEST_PAUSE_NS: Final = 50_000
_PAUSE_RECORDS: Final = tuple(pack_body(Kind.PAUSE, index=generation) for generation in range(3))
"""The constant part of a pause's record, by the generation collected."""


class GcPauses:
    """Recorder of pauses of the process by Python's garbage collector.

    A collection runs on whichever thread happened to allocate, at any point of a step, and a full one takes longer the
    more Python objects a model has. A rank that collects while the others wait for its bucket looks slow for no reason
    visible in its code. Young collections are frequent and short, so only pauses of at least ``_SHORTEST_PAUSE_NS``
    are recorded.

    Args:
        log: receives the records.
        position: position of this rank.
        modes: whether anything is recorded.
    """

    def __init__(self, log: EventLogWriter, position: TrainingPosition, modes: ModeFollower) -> None:
        self._log = log
        self._position = position
        self._modes = modes
        self._start_ns = 0
        self._pid = os.getpid()
        gc.callbacks.append(self._on_gc)

    def close(self) -> None:
        """Stop recording. May be called twice."""
        if self._on_gc in gc.callbacks:
            gc.callbacks.remove(self._on_gc)

    def _on_gc(self, phase: str, info: dict[str, Any]) -> None:
        """Note the start, or record the end, of a collection; a process never has two at a time."""
        if phase == "start":
            self._start_ns = host_now_ns()
            return
        end_ns = host_now_ns()
        # A forked process, such as a data loader's, collects too, and shares the log's memory with us.
        if self._log.closed or os.getpid() != self._pid:
            return
        if self._modes.is_on and end_ns - self._start_ns >= _SHORTEST_PAUSE_NS:
            # An error of the log can't be reported from here; its other writers report it.
            with suppress(Exception):
                self._log.append(_PAUSE_RECORDS[info["generation"]], self._position.step, self._start_ns, end_ns)
