"""Step counting for training loops without DDP: optimizer steps are all that can be observed."""

from __future__ import annotations

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from instrumented_ddp.recording.background import never_raising
from instrumented_ddp.session import Session
from overlapscope.trace.collective_log import UNKNOWN_PHASE
from overlapscope.trace.schema import Phase


class OptimizerStepCounter:
    """Updates step, phase and position in the data until a DDP recorder does.

    A step is one of the optimizer that steps first. Since no forward is observed, the position in the data is updated
    at the first collective of each step, and if no optimizer is seen, at the first one after each batch.

    Args:
        session: session of this process.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._position = session.position
        self._optimizer = 0
        """Identity of the optimizer whose steps count; 0 before the first step."""
        self._step_of_position = -1
        register_optimizer_step_pre_hook(never_raising(self._before_step, session.disable_recording))
        register_optimizer_step_post_hook(never_raising(self._after_step, session.disable_recording))
        session.collectives.before_collective = self._update_position

    def _before_step(self, *_: object) -> None:
        if not self._position.has_phases:
            self._position.phase = Phase.OPTIMIZER

    def _after_step(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        if not self._position.has_phases:
            self._position.phase = UNKNOWN_PHASE
            self._optimizer = self._optimizer or id(optimizer)
            self._position.step += id(optimizer) == self._optimizer

    def _update_position(self) -> None:
        """Update the position when a collective is about to be launched."""
        session, step = self._session, self._position.step
        is_new_step = step != self._step_of_position
        if is_new_step if self._optimizer else session.data.has_new_batch or is_new_step:
            self._step_of_position = step
            session.on_training_forward(has_uneven_inputs=False)
            if (frame := session.collectives.call_sites.find_caller_frame()) is not None:
                session.collectives.names.note_modules(frame)
