"""Steps and phases of a training loop, derived from hooks.

The hooks are the forward of the wrapper, the first gradient of its output, the end of autograd, and torch's hooks
around every optimizer's ``step``. A step is an iteration of the user's loop: it ends with its last optimizer, which is
known when the next forward begins. Where several optimizers are stepped, ``iterations`` tells whether that forward
begins another iteration. Loops for which that is wrong call ``instrumented_ddp.step()``.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.weak import WeakIdKeyDictionary

from instrumented_ddp.collectives.position import TrainingPosition
from instrumented_ddp.recording.background import never_raising
from instrumented_ddp.recording.iterations import IterationTracker, find_optimizers, find_other_optimizers
from instrumented_ddp.recording.modes import ModeFollower
from instrumented_ddp.recording.records import ENTER_RECORDS, make_phase_records
from instrumented_ddp.recording.timing import DeviceTimer, Mark, RecordLog
from overlapscope.trace.clocks import host_now_ns
from overlapscope.trace.collective_log import UNKNOWN_PHASE
from overlapscope.trace.schema import Flag, Kind, Phase, pack_body


class OptimizerHooks:
    """Hooks that report each update of registered parameters.

    Args:
        begins: called before an update with the optimizer, and whether it was given a closure.
        ends: called after the update with the same, and whether it is a part of another one's, which goes on.
        on_error: called with internal errors.
    """

    def __init__(
        self,
        begins: Callable[[torch.optim.Optimizer, bool], None],
        ends: Callable[[torch.optim.Optimizer, bool, bool], None],
        on_error: Callable[[Exception], None],
    ) -> None:
        self._begins = begins
        self._ends = ends
        self._parameters = WeakIdKeyDictionary()
        self._is_relevant: weakref.WeakKeyDictionary[torch.optim.Optimizer, bool] = weakref.WeakKeyDictionary()
        self._has_optimizer: bool | None = None
        self._open: list[int] = []
        """Optimizers whose ``step`` has been called: the outer one, as ``ZeroRedundancyOptimizer``, steps others."""
        self._hooks = [
            register_optimizer_step_pre_hook(never_raising(self._before_step, on_error)),
            register_optimizer_step_post_hook(never_raising(self._after_step, on_error)),
        ]

    def add(self, parameters: Sequence[torch.Tensor]) -> None:
        """Register parameters whose updates are reported."""
        self._parameters.update(dict.fromkeys(parameters, True))
        self._is_relevant.clear()

    def has_optimizer(self) -> bool:
        """Return whether a torch optimizer updates the registered parameters, even if it has not stepped yet.

        Searches all objects, which takes a moment, but only once: after the first reduction without an update.
        """
        if self._has_optimizer is None:
            self._has_optimizer = any(map(self._updates_our_parameters, find_optimizers()))
        return self._has_optimizer

    def find_others(self, optimizer: torch.optim.Optimizer) -> list[torch.optim.Optimizer]:
        """Return the optimizers that update other registered parameters, as ``find_other_optimizers``."""
        return [one for one in find_other_optimizers(optimizer) if self._updates_our_parameters(one)]

    def close(self) -> None:
        """Stop reporting. May be called twice."""
        for hook in self._hooks:
            hook.remove()

    def _before_step(self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._updates_our_parameters(optimizer):
            self._close_update(optimizer)  # if the last one has raised
            self._begins(optimizer, _has_closure(args, kwargs))
            self._open.append(id(optimizer))

    def _after_step(self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._updates_our_parameters(optimizer):
            self._close_update(optimizer)
            self._ends(optimizer, _has_closure(args, kwargs), bool(self._open))
            self._has_optimizer = True

    def _close_update(self, optimizer: torch.optim.Optimizer) -> None:
        if id(optimizer) in self._open:
            del self._open[self._open.index(id(optimizer)) :]

    def _updates_our_parameters(self, optimizer: torch.optim.Optimizer) -> bool:
        known = self._is_relevant.get(optimizer)
        if known is None:
            groups = getattr(optimizer, "param_groups", ())  # a user's class may lack it
            known = any(p in self._parameters for group in groups for p in group["params"])
            self._is_relevant[optimizer] = known
        return known


def _has_closure(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether ``step`` was given a closure; ``args`` begin with the optimizer."""
    return kwargs.get("closure") is not None or any(callable(each) for each in args[1:2])


_PHASES_BEFORE_LOOP: Final = (Phase.BACKWARD, Phase.FINALIZE, Phase.OPTIMIZER, Phase.EVALUATION)
"""Phases whose gap to the next forward is the loop's own code; a gap between two forwards is compute."""
_MAX_SEARCHES: Final = 16
"""Maximum number of searches for optimizers."""
_MAX_FETCHES: Final = 8
"""Maximum number of fetches recorded in one gap: if a loop skips thousands of batches, the rest counts as one."""


class Steps:
    """Step and phase that records belong to. What is reported is ignored unless it is overridden."""

    step = 0
    phase: Phase | None = None
    """The open phase."""

    def on_forward_call(self) -> None:
        """Note that the wrapper is called."""

    def enter(self, phase: Phase, *, no_sync: bool = False) -> None:
        """Begin a phase, and end the one that is open."""

    def leave(self, phase: Phase) -> None:
        """End a phase, if it is the open one."""

    def on_gradients_reduced(self) -> None:
        """Note that the gradients of a pass are final."""


class StepTracker(Steps):
    """Writes a record for every step and phase, and updates the rank's position.

    Args:
        timer: timer of the device on which the module computes.
        log: receives the announcement that a phase begins.
        position: position of this rank.
        modes: whether the step is recorded; if not, its steps and phases are only counted.
        has_optimizer: returns whether a torch optimizer updates the parameters.
        find_others: returns the optimizers of other parameters.
        on_step_start: called when a step begins, between two steps.
        first_step: number of the first step.
    """

    def __init__(
        self,
        timer: DeviceTimer,
        log: RecordLog,
        position: TrainingPosition,
        modes: ModeFollower,
        *,
        has_optimizer: Callable[[], bool],
        find_others: Callable[[torch.optim.Optimizer], list[torch.optim.Optimizer]],
        on_step_start: Callable[[], None],
        first_step: int = 0,
    ) -> None:
        self._timer = timer
        self._log = log
        self._position = position
        self._modes = modes
        self._has_optimizer = has_optimizer
        self._find_others = find_others
        self._searches = 0
        self._iterations = IterationTracker()
        self._step_begins = on_step_start
        self.step = first_step
        self._reduced_phases = make_phase_records(timer.flags, no_sync=False)
        self._no_sync_phases = make_phase_records(timer.flags, no_sync=True)
        self._full_step_record = pack_body(Kind.STEP, flags=timer.flags)
        self._light_step_record = pack_body(Kind.STEP, flags=timer.flags | Flag.LIGHT)
        self._has_begun = False
        self._step_start: Mark | None = None
        self._phase_start: Mark | None = None
        self._phase_is_no_sync = False
        self._passes_are_no_sync: bool | None = None
        self._last_phase: Phase | None = None
        self._last_phase_end: Mark | None = None
        self._fetch_start: Mark | None = None
        self._fetches: list[tuple[Mark, Mark]] = []
        """Fetches since the last phase ended."""
        self._is_marked_by_user = False
        self._is_updating = False
        self._closure_has_run = False
        self._has_updated = False
        self._skipped_steps = 0
        """Steps that have ended without a record, before it was known that they do."""
        self._gradients_are_reduced = False
        position.has_phases = True
        self._update_position()

    # -- reported by the wrapper ---------------------------------------------------------------------------------

    def on_forward_call(self) -> None:
        """Note that the wrapper is called: the batch is available, and the previous step may be over.

        An evaluation between two optimizer steps belongs to the second step.
        """
        now = self._mark()
        is_within_update = self._is_updating and self._closure_has_run
        if self._is_updating and not self._closure_has_run:
            self.phase = None  # optimizer.step(closure): the update has not begun, the closure comes first
            self._closure_has_run = True
        if self.phase is not None:
            self._end_open_phase(now)
        if not self._has_begun:
            self._has_begun = True
            self._step_begins()
            self._step_start = now or self._mark()
            self._update_position()
            return
        if not self._is_marked_by_user and self._is_step_over():
            # Without a torch optimizer it is unknown where the update ended and the data loader began.
            self._end_step(self._last_phase_end if self._has_updated else now)
        if self._last_phase in _PHASES_BEFORE_LOOP and not is_within_update:
            self._write_gap(self._last_phase_end, now)
            self._last_phase = Phase.LOOP
        self._update_position()

    def _is_step_over(self) -> bool:
        """Return whether a forward begins another step."""
        if self._has_updated:
            begun = self._iterations.count_begun() if self._iterations.has_several else 1
            self._skipped_steps += max(0, begun - 1)
            return begun > 0
        # An optimizer such as LBFGS may call its closure repeatedly: all that is one step. With a torch optimizer a
        # reduction without an update is gradient accumulation, or a skipped update.
        return self._gradients_are_reduced and not self._is_updating and not self._has_optimizer()

    def _write_gap(self, start: Mark, end: Mark) -> None:
        """Write the gap between an update and a forward: waits for data loaders, and the rest.

        With fetches at 3-5 and 6-8 ms in a gap of 0-10 ms, ``LOOP`` is 0-3, 5-6 and 8-10, ``DATA_WAIT`` 3-5 and 6-8.
        """
        for fetch_start, fetch_end in self._fetches:
            self._write(self._reduced_phases[Phase.LOOP], start, fetch_start)
            start = fetch_end
        self._write(self._reduced_phases[Phase.LOOP], start, end)
        self._write_fetches()

    def _write_fetches(self) -> None:
        for start, end in self._fetches:
            self._write(self._reduced_phases[Phase.DATA_WAIT], start, end)
        self._fetches.clear()

    def enter(self, phase: Phase, *, no_sync: bool = False) -> None:
        """Begin a phase, and end the one that is open."""
        now = self._mark()
        if self._write_open_phase(now) is Phase.OPTIMIZER:
            self._announce(Phase.LOOP)
        if self._fetches:
            self._write_fetches()
        self._fetch_start = None  # data produced by a model is not a wait for a loader
        self.phase, self._phase_start = phase, now
        self._phase_is_no_sync = no_sync
        if phase is Phase.BACKWARD:
            self._passes_are_no_sync = no_sync and self._passes_are_no_sync is not False
        self._announce(phase)

    def leave(self, phase: Phase) -> None:
        """End a phase, if it is the open one."""
        if self.phase is phase:
            self._end_open_phase(self._mark())
            if phase is Phase.BACKWARD and self._phase_is_no_sync:
                self._resume_update()

    def on_gradients_reduced(self) -> None:
        """Note that the gradients of a pass are final: the step may end even if no torch optimizer is ever seen."""
        self._gradients_are_reduced = True
        self._resume_update()

    # -- reported by data loaders --------------------------------------------------------------------------------

    def on_fetch_start(self) -> None:
        """Note that a batch is requested from a data loader."""
        if self.phase is None and self._has_begun:
            self._fetch_start = self._mark()

    def on_fetch_end(self) -> None:
        """Note that the data loader has returned a batch, or is exhausted."""
        start, self._fetch_start = self._fetch_start, None
        if start is None or self.phase is not None:
            return
        if len(self._fetches) == _MAX_FETCHES:
            start, _ = self._fetches.pop()
        self._fetches.append((start, self._mark()))

    # -- reported by optimizers ----------------------------------------------------------------------------------

    def on_update_start(self) -> None:
        """Note that an optimizer step begins."""
        self._is_updating = True
        self._closure_has_run = False
        self.enter(Phase.OPTIMIZER)

    def on_update_end(self, optimizer: torch.optim.Optimizer, *, is_inner: bool = False) -> None:
        """Note that an optimizer step has ended.

        Args:
            is_inner: it is a part of another optimizer's, which goes on.
        """
        self.leave(Phase.OPTIMIZER)
        self._is_updating = is_inner
        self._has_updated = True
        if not self._iterations.knows(optimizer):
            self._expect_optimizers(optimizer)
        self._skipped_steps += self._iterations.on_update(optimizer)
        # Of several optimizers it may not be the last one of this step: the next forward tells.
        self._position.has_partly_updated = self._iterations.has_several
        self._position.has_updated = not self._position.has_partly_updated
        if is_inner:
            self.enter(Phase.OPTIMIZER)
        self._update_position()

    def _expect_optimizers(self, optimizer: torch.optim.Optimizer) -> None:
        """Find out, when an optimizer steps for the first time, which others there are."""
        if self._searches < _MAX_SEARCHES:  # one that is made anew in each step must not cost a search in each
            self._searches += 1
            others = self._find_others(optimizer)
            self._iterations.forget_all_but(others)
            if self._searches == 1:
                self._iterations.expect(others)

    def _resume_update(self) -> None:
        """Reopen the optimizer phase after a backward that was run by an optimizer's closure."""
        if self._is_updating:
            self.enter(Phase.OPTIMIZER)

    # -- reported by the user ------------------------------------------------------------------------------------

    def mark_step(self) -> None:
        """End a step here. From now on steps end nowhere else."""
        now = self._mark()
        if self.phase is not None:
            self._end_open_phase(now)
        self._is_marked_by_user = self._position.has_updated = True
        self._end_step(now)
        self._update_position()

    def close(self) -> None:
        """End the open phase, and the step if it is complete."""
        if self.phase is not None:
            self._end_open_phase(self._mark())
        if self._has_updated and not self._is_marked_by_user:
            self._end_step(self._last_phase_end)

    # -- helpers -------------------------------------------------------------------------------------------------

    def _mark(self) -> Mark:
        """Return a mark of now; None if no record will need it."""
        return self._timer.mark() if self._modes.is_marked else None

    def _write(self, body: bytes, start: Mark, end: Mark) -> None:
        """Write a record of this step, if it is recorded and both times were taken."""
        if self._modes.is_on and start is not None and end is not None:
            self._timer.write(body, self.step, start, end)

    def _end_step(self, end: Mark) -> None:
        if not self._has_begun:
            return
        record = self._full_step_record if self._modes.is_full else self._light_step_record
        self._write(record, self._step_start, end)
        if self._passes_are_no_sync is False:
            self._position.no_sync_since = None
        elif self._passes_are_no_sync and self._position.no_sync_since is None:
            self._position.no_sync_since = self.step
        self._passes_are_no_sync = None
        self.step += 1 + self._skipped_steps
        self._skipped_steps = 0
        self._has_updated = self._gradients_are_reduced = False
        self._step_begins()
        self._step_start = self._mark() if end is None else end  # recording was just turned on, without a notice

    def _end_open_phase(self, now: Mark) -> None:
        if self._write_open_phase(now) is Phase.OPTIMIZER:
            self._announce(Phase.LOOP)
        else:
            self._update_position()

    def _write_open_phase(self, now: Mark) -> Phase | None:
        """Write the phase that has ended, and return it; the position is not updated yet."""
        phase = self.phase
        if phase is not None:
            records = self._no_sync_phases if self._phase_is_no_sync else self._reduced_phases
            self._write(records[phase], self._phase_start, now)
            self._last_phase, self._last_phase_end = phase, now
            self.phase = None
        return phase

    def _announce(self, phase: Phase) -> None:
        now_ns = self._position.since_ns = host_now_ns()
        if self._modes.is_on:
            self._log.append(ENTER_RECORDS[phase], self.step, now_ns, now_ns)
        self._update_position()

    def _update_position(self) -> None:
        """Update the rank's position; after the only optimizer it is in the next step, which no forward has begun."""
        position = self._position
        is_next = self._has_updated and not self._is_marked_by_user and not self._iterations.has_several
        position.step = self.step + is_next
        if self.phase is not None:
            position.phase = self.phase
        elif self._last_phase in _PHASES_BEFORE_LOOP:
            position.phase = Phase.LOOP
        else:
            position.phase = UNKNOWN_PHASE
