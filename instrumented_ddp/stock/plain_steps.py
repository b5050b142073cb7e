"""Where a training loop without DDP is: optimizer steps are counted, and that is all there is to see."""

from __future__ import annotations

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from instrumented_ddp.collective_log.collectives import Collectives
from overlapscope.trace.format import Phase
from overlapscope.trace.group_log import UNKNOWN_PHASE


class PlainSteps:
    """Tells the collective log step, phase and position in the data, until a recorder of DDP does.

    A step is one of the optimizer that steps first. Without a forward to go by, the position in the data is taken at
    the first collective of each step, and where no optimizer is seen, at the first one after each batch.

    Args:
        collectives: the collective log of this process.
    """

    def __init__(self, collectives: Collectives) -> None:
        self._collectives = collectives
        self._step = 0
        self._optimizer = 0
        """Identity of the one whose steps count; 0 before the first."""
        self._is_stepping = False
        self._step_of_position = -1
        register_optimizer_step_pre_hook(self._begins)
        register_optimizer_step_post_hook(self._ends)
        collectives.where = self._where

    def _begins(self, *_: object) -> None:
        self._is_stepping = True

    def _ends(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        self._is_stepping = False
        self._optimizer = self._optimizer or id(optimizer)
        self._step += id(optimizer) == self._optimizer

    def _where(self) -> tuple[int, int]:
        collectives = self._collectives
        is_new_step = self._step != self._step_of_position
        if is_new_step if self._optimizer else collectives.position.has_new_batch or is_new_step:
            self._step_of_position = self._step
            collectives.training_forward(has_uneven_inputs=False)
            if (frame := collectives.call_sites.frame_of_caller()) is not None:
                collectives.names.note_modules(frame)
        return self._step, Phase.OPTIMIZER if self._is_stepping else UNKNOWN_PHASE
