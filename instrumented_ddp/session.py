"""Recording session of this process: what is opened and closed, and in which order.

A process has at most one session. It begins with the first thing to record, which is the default process group
(``attach``) or a DDP instance, and ends with the process:

1. the log of collectives, with this rank's position in training and in its data;
2. the exit recorder and the watchdog, which observe how the process ends and whether the job makes progress;
3. with the first DDP instance, the recorder of steps and buckets.

They are closed in reverse order. An internal error never stops the training; it only ends the recording.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Final

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_group

from instrumented_ddp.bucket_plan import ParameterSpec
from instrumented_ddp.collectives.log import CollectiveRecorder
from instrumented_ddp.collectives.position import TrainingPosition
from instrumented_ddp.machine.sampler import MachineSampler
from instrumented_ddp.recording.background import BackgroundScheduler, suppress_recorder_errors
from instrumented_ddp.recording.batch_tracker import DataPositionTracker
from instrumented_ddp.recording.caught_errors import CaughtErrors
from instrumented_ddp.recording.console import log_to_stderr
from instrumented_ddp.recording.exit_recorder import ExitRecorder, call_at_exit
from instrumented_ddp.recording.loop_facts import LoopFactsWriter
from instrumented_ddp.recording.metadata import find_attempt_folder, get_global_rank
from instrumented_ddp.recording.models import ModelRegistry
from instrumented_ddp.recording.recorder import Recorder
from instrumented_ddp.replicas.outside import ParametersOutside
from instrumented_ddp.replicas.replicas import ReplicaComparison
from instrumented_ddp.watchdog.abort import IncidentError
from instrumented_ddp.watchdog.watchdog import Watchdog
from overlapscope.diagnosis.evidence import Failure
from overlapscope.diagnosis.loop_facts import LoopFacts
from overlapscope.errors import OverlapScopeError
from overlapscope.trace.collective_log import UNKNOWN
from overlapscope.trace.environment import OnIncident, read_recording_options
from overlapscope.trace.manifest import write_manifest
from overlapscope.trace.schema import rank_folder

_log = logging.getLogger(__name__)

_CLOSE_TIMEOUT_S: Final = 3.0
"""Time limit for final messages to the other ranks, whose store may no longer answer."""

_DEVICE_TIMEOUT_S: Final = 1.0
"""Time limit for the last sample of the machine, whose devices may no longer answer."""


class Session:
    """Recording of this process, from the first thing that is recorded to the end of the process.

    Args:
        trace_folder: folder of the attempt, the same for all ranks of a host.
        rank: rank of this process in the whole job.
        on_incident: whether there is a watchdog, and what it does when it detects an incident.

    Raises:
        OverlapScopeError: the folder can't be written, or already holds a recording of this rank.
    """

    def __init__(self, trace_folder: Path, rank: int, on_incident: OnIncident = "report") -> None:
        log_to_stderr()
        self.folder = rank_folder(trace_folder, rank)
        self.rank = rank
        self.position = TrainingPosition()
        self.recorder: Recorder | None = None
        """Recorder of steps and buckets, if this process trains with DDP."""
        self.outside: ParametersOutside | None = None
        """Watcher of parameters in no DDP instance, once there may be any."""
        self.is_provisional = False
        """True if only the environment requested this session."""
        self.is_recording = True
        """True until the session is closed or recording is disabled."""
        self.has_unknown_buckets = False
        """True if a model of torch's class has buckets that torch does not tell: its all-reduces are no loop's own."""
        self._closed = False
        self._disable_lock = threading.Lock()
        self._pid = os.getpid()
        self._exit_recorder: ExitRecorder | None = None
        self._watchdog: Watchdog | None = None
        self._scheduler = BackgroundScheduler(rank)
        self._machine_thread = BackgroundScheduler(rank, "machine")
        self._machine = MachineSampler(self.folder)
        self.collectives = CollectiveRecorder(self.folder, rank, self.position, self.disable_recording)
        self.caught = CaughtErrors(self.folder, self.collectives.loop)
        self.models = ModelRegistry(self.collectives)
        self.replicas = ReplicaComparison(self.folder, self._scheduler, self.disable_recording)
        self.data = DataPositionTracker(self.position, self.collectives.call_sites)
        self._loop_facts = LoopFactsWriter(self.folder, self._collect_loop_facts)
        try:
            self._watch_process(on_incident)
        except BaseException as error:  # for example, no thread can be started: don't leave half of it open
            if self._exit_recorder is not None:
                self._exit_recorder.note_recording_end(repr(error))  # the process has not ended
            self.close()
            raise
        call_at_exit(self.close)

    def _watch_process(self, on_incident: OnIncident) -> None:
        """Start the exit recorder and, unless it is off, the watchdog."""
        self._scheduler.add(self.collectives.completions)
        self._scheduler.add(self._loop_facts)
        self._machine_thread.add(self._machine)
        self._exit_recorder = ExitRecorder(self.folder, self.collectives.loop, self.caught, self._on_process_failure)
        abort_after_s = None
        if on_incident == "raise":
            recording = read_recording_options(self.folder.parent)
            assert recording is not None
            abort_after_s = recording.stall_timeout_s
        if on_incident != "off":
            self._watchdog = Watchdog(
                self.collectives,
                self.models,
                self.replicas,
                self.caught,
                self._scheduler,
                abort_after_s=abort_after_s,
                on_fault=self._on_fault,
                before_exit=self._flush,
            )

    def record(
        self, group: dist.ProcessGroup, device: torch.device, *, first_step: int = 0, has_wrapper: bool = True
    ) -> Recorder | None:
        """Return the recorder shared by all DDP instances of this process, created on first use; None on failure.

        Args:
            group: ranks that train together.
            device: device on which the first instance computes.
            first_step: number of the first recorded step.
            has_wrapper: false for a loop that reduces gradients by hand.
        """
        self.watch_outside().has_wrappers |= has_wrapper
        if self.recorder is not None or not self.is_recording:
            return self.recorder if self.is_recording else None
        recording = read_recording_options(self.folder.parent)
        assert recording is not None
        try:
            self.recorder = Recorder(
                self.collectives,
                self.models,
                self._scheduler,
                group=group,
                device=device,
                detail=recording.detail,
                every=recording.every,
                limit_bytes=recording.limit_bytes,
                first_step=first_step,
                on_update_start=self.replicas.settings.on_update_start,
                on_unreduced_update=self.replicas.on_unreduced_update,
                on_inputs=self.data.hashes.on_inputs,
                on_error=self.disable_recording,
            )
        except Exception as error:
            self.disable_recording(error)
            return None
        self.recorder.on_model = self.watch_outside().add_model
        self.data.on_fetch = self.recorder.on_fetch
        self._machine.use_device(device)
        atexit.unregister(self.close)  # handlers that users registered meanwhile still run after ours, as before
        call_at_exit(self.close)
        return self.recorder

    def watch_outside(self) -> ParametersOutside:
        """Watch what optimizers update outside of DDP instances, and return the watcher."""
        if self.outside is None:
            self.outside = ParametersOutside(
                self.collectives,
                self.models,
                self.replicas,
                lambda: self.position.step if self.recorder is None else self.recorder.steps.step,
                self.disable_recording,
            )
        return self.outside

    def add_model(
        self, module: torch.nn.Module, parameters: Sequence[ParameterSpec], settings: Mapping[str, str]
    ) -> int:
        """Record the definition of a DDP instance before ranks compare it.

        Args:
            settings: as in ``collect_model_settings``.

        Returns:
            Its number within the process.
        """
        try:
            return self.models.add(module, parameters, settings)
        except Exception as error:
            self.disable_recording(error)
            return 0

    def on_training_forward(self, *, has_uneven_inputs: bool) -> None:
        """Record that a training forward begins.

        Args:
            has_uneven_inputs: whether it is under ``join()``, where ranks may be at different steps.
        """
        try:
            self.position.has_updated = self.position.has_partly_updated = False
            self.collectives.loop.on_forward_start()
            self.data.on_forward_start(has_uneven_inputs=has_uneven_inputs)
        except Exception as error:  # from the user's variables: the position in the data stays unknown
            self.position.batch = UNKNOWN
            _log.debug("rank %d: its position in the data is not known: %r", self.rank, error)

    def disable_recording(self, error: Exception) -> None:
        """Disable recording after an internal error: training continues, but no more steps or collectives are logged.

        If only a part of the recording ended, what is missing would look like something the rank had not done. May be
        called on any thread and in any callback; only the first error is handled.

        Raises:
            IncidentError: this was the error: a watchdog raised it in the training thread, which was in a callback.
        """
        if isinstance(error, IncidentError):
            raise error
        with self._disable_lock:
            if not self.is_recording or os.getpid() != self._pid:
                return
            self.is_recording = False
        why = warn_unrecorded(self.rank, error)
        if self._exit_recorder is not None:
            self._exit_recorder.note_recording_end(
                why
            )  # before the logs are closed, which would make them look complete
        if self._watchdog is not None:
            self._watchdog.note_recording_end(why)
        self.collectives.stop()
        if self.recorder is not None:
            with suppress(Exception):
                self.recorder.log.close()

    @property
    def closed(self) -> bool:
        """Return whether ``close`` has been called."""
        return self._closed

    def close(self, *, is_detached: bool = False) -> None:
        """Write pending records and stop recording. Called at exit; may be called earlier, and twice.

        Args:
            is_detached: the process lives on, and nothing of what becomes of it matters.
        """
        if self._closed or os.getpid() != self._pid:
            return
        self._closed = True
        self.is_recording = False
        atexit.unregister(self.close)
        recorder, exit_recorder, watchdog = self.recorder, self._exit_recorder, self._watchdog
        if watchdog is not None and exit_recorder is not None:
            watchdog.exits(exit_recorder.exit_call)
        parts = (
            None if recorder is None else recorder.close,
            None if exit_recorder is None else partial(exit_recorder.close, is_detached=is_detached),
            self.caught.close,
            None if self.outside is None else self.outside.close,
            self.replicas.close,
            partial(self._machine_thread.close, _DEVICE_TIMEOUT_S),
            partial(self._scheduler.close, _CLOSE_TIMEOUT_S),
            None if watchdog is None else watchdog.close,
            self.collectives.close,
            self.data.close,
            None if recorder is None else recorder.close_clock,
            partial(write_manifest, self.folder),
        )
        for close in parts:
            try:
                if close is not None:
                    close()
            except Exception as error:  # the others are closed all the same
                _log.warning("rank %d: the end of its recording is incomplete: %r", self.rank, error)

    def discard(self) -> None:
        """Detach this copy in a forked process from the files of the recorded process."""
        self.is_recording = False
        self._closed = True
        self.collectives.discard()
        self.caught.discard()
        if self.recorder is not None:
            self.recorder.log.discard()

    def _collect_loop_facts(self) -> LoopFacts:
        facts = LoopFacts() if self.recorder is None else self.recorder.collect_loop_facts()
        user_reduced = () if self.outside is None else self.outside.list_user_reduced()
        return replace(facts, user_reduced=user_reduced, batches=self.data.hashes.latest())

    def _on_process_failure(self, failure: Failure) -> None:
        self._machine_thread.wake(self._machine)  # what has ended another rank may have been counted there
        if self._watchdog is not None:
            self._watchdog.failed(failure)

    def _on_fault(self) -> None:
        if self.recorder is not None:
            self.recorder.incident()

    def _flush(self) -> None:
        """Preserve what was recorded, because the process is about to be terminated."""
        if self.recorder is not None:
            self.recorder.log.close()
        self.collectives.stop()


_of_this_process: Session | None = None


def _discard_session_of_parent() -> None:
    if _of_this_process is not None:
        _of_this_process.discard()


os.register_at_fork(after_in_child=_discard_session_of_parent)


def get_current_session() -> Session | None:
    """Return the open session; None if this process is not recorded."""
    return _of_this_process if _of_this_process is not None and not _of_this_process.closed else None


def open_session(trace_folder: Path, rank: int, on_incident: OnIncident = "report") -> Session:
    """Record this process from now on.

    A session that was only opened because of the environment is replaced if the script names another folder.

    Args:
        trace_folder: folder of the run; a later attempt of the job gets a folder inside it.
        rank: rank of this process.
        on_incident: as for ``Session``.

    Raises:
        OverlapScopeError: the folder can't be written, or the process already records into another one.
    """
    global _of_this_process
    trace_folder = find_attempt_folder(trace_folder, rank)
    existing = get_current_session()
    is_elsewhere = existing is not None and existing.folder != rank_folder(trace_folder, rank)
    if existing is not None and is_elsewhere and existing.is_provisional and existing.recorder is None:
        existing.close()
        existing, is_elsewhere = None, False
    if existing is None:
        existing = _of_this_process = Session(trace_folder, rank, on_incident)
    elif is_elsewhere:
        raise OverlapScopeError(f"{trace_folder}: this process already records into {existing.folder.parent}")
    return existing


def get_or_open_session(
    trace: str | Path | None, on_incident: OnIncident | None, group: dist.ProcessGroup | None
) -> Session | None:
    """Return the session that records a DDP instance, or None if recording is not requested or fails.

    Args:
        trace: folder given to the instance; None uses the environment.
        on_incident: setting given to the instance; None uses the environment.
        group: process group of the instance; None for the default one.
    """
    existing = get_current_session()
    if trace is None and existing is not None:  # opened by attach(), or by an earlier model
        return existing
    try:
        recording = read_recording_options(trace)
        if recording is None or (group is None and not dist.is_initialized()):  # torch raises its own error
            return None
        rank = get_global_rank(group or _get_default_group())
        return open_session(recording.folder, rank, on_incident or recording.on_incident)
    except Exception as error:
        warn_unrecorded(dist.get_rank() if dist.is_initialized() else 0, error)
        return None


def warn_unrecorded(rank: int, error: Exception) -> str:
    """Warn that a rank is not recorded, or no longer recorded.

    Returns:
        The reason: the message of an ``OverlapScopeError``, else the type and message of the unexpected error.
    """
    log_to_stderr()
    why = str(error) if isinstance(error, OverlapScopeError) else f"{type(error).__name__}: {error}"
    _log.warning("rank %d: training continues unrecorded: %s", rank, why)
    return why


def step() -> None:
    """Mark the end of an optimizer step, where hooks can't detect it. Does nothing if nothing is being recorded.

    Once called, steps end only where it is called.
    """
    session = get_current_session()
    if session is not None and session.recorder is not None:
        with suppress_recorder_errors(session.disable_recording):
            session.recorder.steps.mark_step()


def detach() -> None:
    """End the recording of this process now, as that of a rank that has done all its work. Call it on all ranks.

    For processes that live on after the training, or that a framework kills, as Ray does: what becomes of them is no
    longer part of the recording, and the ranks count as ended. Does nothing if nothing is being recorded.
    """
    session = get_current_session()
    if session is not None:
        session.close(is_detached=True)
