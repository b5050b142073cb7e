"""Step counting for training loops without DDP: optimizer steps are all that can be observed."""

from __future__ import annotations

import sys

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from instrumented_ddp.collectives.call_sites import iter_frames
from instrumented_ddp.recording.background import never_raising
from instrumented_ddp.recording.iterations import IterationTracker, find_other_optimizers
from instrumented_ddp.session import Session
from overlapscope.trace.collective_log import UNKNOWN_PHASE
from overlapscope.trace.schema import Phase


class OptimizerStepCounter:
    """Updates step, phase and position in the data until a DDP recorder does.

    A step is an update; with several optimizers, an iteration of the loop in which all of them are stepped. Since no
    forward is observed, the next one begins with its first collective or update, and the position in the data is
    updated at the first collective of each step, and if no optimizer is seen, at the first one after each batch.

    Args:
        session: session of this process.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._position = session.position
        self._iterations = IterationTracker()
        self._has_optimizer = False
        self._missed = 0
        """Iterations that are over and not counted, as it was not known that they are."""
        self._is_updated = False
        """True after an update of one of several optimizers, until the next iteration begins."""
        self._step_of_position = -1
        register_optimizer_step_pre_hook(never_raising(self._before_step, session.disable_recording))
        register_optimizer_step_post_hook(never_raising(self._after_step, session.disable_recording))
        session.collectives.before_collective = self._update_position

    def _before_step(self, *_: object) -> None:
        if not self._position.has_phases:
            self._begin_iteration()
            self._position.phase = Phase.OPTIMIZER

    def _after_step(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        if self._position.has_phases:
            return
        self._position.phase = UNKNOWN_PHASE
        if not self._has_optimizer:
            self._has_optimizer = True
            self._iterations.expect(find_other_optimizers(optimizer))
        self._missed += self._iterations.on_update(optimizer)
        self._is_updated = self._position.has_partly_updated = self._iterations.has_several
        self._position.has_updated = not self._is_updated
        self._position.step += not self._is_updated

    def _begin_iteration(self) -> None:
        """Count the iteration that an update or a collective begins, if it does."""
        if self._is_updated and (begun := self._iterations.count_begun()):
            self._position.step += begun + self._missed
            self._is_updated, self._missed = False, 0

    def _begins_iteration(self) -> bool:
        frames = iter_frames(sys._getframe(2))
        return self._session.collectives.loop.has_begun_next_iteration(frames, may_be_forward=True) is not False

    def _update_position(self) -> None:
        """Update the position when a collective is about to be launched."""
        self._begin_iteration()
        session, step = self._session, self._position.step
        if (self._position.has_updated or self._is_updated) and not self._begins_iteration():
            return  # a collective after the update, in the same iteration
        is_new_step = step != self._step_of_position
        if is_new_step if self._has_optimizer else session.data.has_new_batch or is_new_step:
            self._step_of_position = step
            session.on_training_forward(has_uneven_inputs=False)
            if (frame := session.collectives.call_sites.find_caller_frame()) is not None:
                session.collectives.names.note_modules(frame)
