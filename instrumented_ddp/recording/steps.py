"""Hooks of a training loop -> its steps and phases.

They are derived from the forward of the wrapper, the first gradient of its output, the end of autograd, and the hooks
that torch calls around every optimizer's ``step``. A step ends with its last optimizer, which is known when the next
forward begins. Loops in which that is not so (two optimizers that alternate, as in a GAN) call
``instrumented_ddp.step()``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from instrumented_ddp.collective_log.position import Position
from instrumented_ddp.recording.records import ENTER_RECORDS, phase_records
from instrumented_ddp.recording.timing import DeviceTimer, Mark, RecordLog
from overlapscope.trace.format import Kind, Phase, pack_body
from overlapscope.trace.group_log import UNKNOWN_PHASE
from overlapscope.trace.host import host_now_ns

_LOOP_FOLLOWS: Final = (Phase.BACKWARD, Phase.FINALISE, Phase.OPTIMIZER, Phase.EVALUATION)
"""Between one of these and the next forward a loop does what is its own; between two forwards it computes."""
_MOST_FETCHES: Final = 8
"""In one gap, each of which is recorded: of a loop that skips thousands of batches the rest counts as one."""


class Steps:
    """Writes a record for every step and phase, and keeps the rank's position.

    Args:
        timer: of the device where the module computes.
        log: where it is announced that a phase begins.
        position: of this rank.
        has_optimizer: whether an optimizer of torch updates the parameters.
        step_begins: called when a step begins, between two steps.
    """

    def __init__(
        self,
        timer: DeviceTimer,
        log: RecordLog,
        position: Position,
        *,
        has_optimizer: Callable[[], bool],
        step_begins: Callable[[], None],
    ) -> None:
        self._timer = timer
        self._log = log
        self._position = position
        self._has_optimizer = has_optimizer
        self._step_begins = step_begins
        self._reduced_phases = phase_records(timer.flags, no_sync=False)
        self._no_sync_phases = phase_records(timer.flags, no_sync=True)
        self._step_record = pack_body(Kind.STEP, flags=timer.flags)
        self.step = 0
        self.phase: Phase | None = None
        """The phase that is open."""
        self._step_start: Mark | None = None
        self._phase_start: Mark | None = None
        self._phase_is_no_sync = False
        self._passes_are_no_sync: bool | None = None
        self._last_phase: Phase | None = None
        self._last_phase_end: Mark | None = None
        self._fetch_start: Mark | None = None
        self._fetches: list[tuple[Mark, Mark]] = []
        """Since the last phase has ended."""
        self._is_marked_by_user = False
        self._is_updating = False
        self._closure_has_run = False
        self._has_updated = False
        self._gradients_are_reduced = False
        position.has_phases = True
        self._tell()

    # -- as the wrapper tells ------------------------------------------------------------------------------------

    def forward_is_called(self) -> None:
        """The data is there: the wait for it is over, and so may be the step before.

        An evaluation between two optimizer steps belongs to the second.
        """
        now = self._timer.mark()
        is_within_update = self._is_updating and self._closure_has_run
        if self._is_updating and not self._closure_has_run:
            self.phase = None  # optimizer.step(closure): the update has not begun, the closure comes first
            self._closure_has_run = True
        if self.phase is not None:
            self._end_open_phase(now)
        if self._step_start is None:
            self._step_start = now
            self._step_begins()
            self._tell()
            return
        # An optimizer may call its closure again and again, as LBFGS does: all that is one step.
        step_is_over = self._has_updated or (
            # With an optimizer of torch this is an accumulation, or an update that was left out.
            self._gradients_are_reduced and not self._is_updating and not self._has_optimizer()
        )
        if step_is_over and not self._is_marked_by_user:
            # Without an optimizer of torch nobody knows where the update ended and the data loader began.
            self._end_step(self._last_phase_end if self._has_updated else now)
        if self._last_phase in _LOOP_FOLLOWS and not is_within_update:
            self._write_gap(self._last_phase_end, now)
            self._last_phase = Phase.LOOP
        self._tell()

    def _write_gap(self, start: Mark, end: Mark) -> None:
        """What lies between an update and a forward: waits for data loaders, and the rest."""
        for fetch_start, fetch_end in self._fetches:
            self._timer.write(self._reduced_phases[Phase.LOOP], self.step, start, fetch_start)
            start = fetch_end
        self._timer.write(self._reduced_phases[Phase.LOOP], self.step, start, end)
        self._write_fetches()

    def _write_fetches(self) -> None:
        for start, end in self._fetches:
            self._timer.write(self._reduced_phases[Phase.DATA_WAIT], self.step, start, end)
        self._fetches.clear()

    def enter(self, phase: Phase, *, no_sync: bool = False) -> None:
        """A phase begins; one that is still open has ended."""
        now = self._timer.mark()
        if self.phase is not None:
            self._end_open_phase(now)
        self._write_fetches()
        self._fetch_start = None  # data that is made by a model is no wait for a loader
        self.phase, self._phase_start = phase, now
        self._phase_is_no_sync = no_sync
        if phase is Phase.BACKWARD:
            self._passes_are_no_sync = no_sync and self._passes_are_no_sync is not False
        self._announce(phase)

    def leave(self, phase: Phase) -> None:
        """A phase ends, if it is the one that is open."""
        if self.phase is phase:
            self._end_open_phase(self._timer.mark())
            if phase is Phase.BACKWARD and self._phase_is_no_sync:
                self._resume_update()

    def gradients_are_reduced(self) -> None:
        """The gradients of a pass are final: the step may end, also if no optimizer of torch is ever seen."""
        self._gradients_are_reduced = True
        self._resume_update()

    # -- as data loaders tell ------------------------------------------------------------------------------------

    def fetch_begins(self) -> None:
        """A data loader is asked for a batch."""
        if self.phase is None and self._step_start is not None:
            self._fetch_start = self._timer.mark()

    def fetch_ends(self) -> None:
        """It has given one, or has none left."""
        start, self._fetch_start = self._fetch_start, None
        if start is None or self.phase is not None:
            return
        if len(self._fetches) == _MOST_FETCHES:
            start, _ = self._fetches.pop()
        self._fetches.append((start, self._timer.mark()))

    # -- as optimizers tell --------------------------------------------------------------------------------------

    def update_begins(self) -> None:
        """An optimizer steps."""
        self._is_updating = True
        self._closure_has_run = False
        self.enter(Phase.OPTIMIZER)

    def update_ends(self) -> None:
        """An optimizer has stepped."""
        self.leave(Phase.OPTIMIZER)
        self._is_updating = False
        self._has_updated = self._position.has_updated = True
        self._tell()

    def _resume_update(self) -> None:
        """A backward is over; if a closure has run it, the optimizer goes on with the update."""
        if self._is_updating:
            self.enter(Phase.OPTIMIZER)

    # -- as the user tells ---------------------------------------------------------------------------------------

    def mark_step(self) -> None:
        """A step ends here. From now on steps end nowhere else."""
        now = self._timer.mark()
        if self.phase is not None:
            self._end_open_phase(now)
        self._is_marked_by_user = self._position.has_updated = True
        self._end_step(now)
        self._tell()

    def close(self) -> None:
        """End what has ended."""
        if self.phase is not None:
            self._end_open_phase(self._timer.mark())
        if self._has_updated and not self._is_marked_by_user:
            self._end_step(self._last_phase_end)

    # -- small parts ---------------------------------------------------------------------------------------------

    def _end_step(self, end: Mark) -> None:
        if self._step_start is None:
            return
        self._timer.write(self._step_record, self.step, self._step_start, end)
        if self._passes_are_no_sync is False:
            self._position.no_sync_since = None
        elif self._passes_are_no_sync and self._position.no_sync_since is None:
            self._position.no_sync_since = self.step
        self._passes_are_no_sync = None
        self.step += 1
        self._step_start = end
        self._has_updated = self._gradients_are_reduced = False
        self._step_begins()

    def _end_open_phase(self, now: Mark) -> None:
        phase = self.phase
        assert phase is not None
        records = self._no_sync_phases if self._phase_is_no_sync else self._reduced_phases
        self._timer.write(records[phase], self.step, self._phase_start, now)
        self._last_phase, self._last_phase_end = phase, now
        self.phase = None
        if phase is Phase.OPTIMIZER:
            self._announce(Phase.LOOP)
        else:
            self._tell()

    def _announce(self, phase: Phase) -> None:
        now_ns = self._position.since_ns = host_now_ns()
        self._log.append(ENTER_RECORDS[phase], self.step, now_ns, now_ns)
        self._tell()

    def _tell(self) -> None:
        """Where the host is: after the last optimizer that is the next step, which no forward has begun."""
        position = self._position
        position.step = self.step + (self._has_updated and not self._is_marked_by_user)
        if self.phase is not None:
            position.phase = self.phase
        elif self._last_phase in _LOOP_FOLLOWS:
            position.phase = Phase.LOOP
        else:
            position.phase = UNKNOWN_PHASE
