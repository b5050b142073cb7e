"""What ``overlapscope tune`` asks of a training: other settings of DDP than the script's, and timed all-reduces.

All ranks are asked for the same, by their environment, and act at the same place: the construction of a model.
"""

from __future__ import annotations

import logging
from contextlib import AbstractContextManager, nullcontext, suppress
from inspect import BoundArguments
from pathlib import Path
from typing import Any, Final, Protocol

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

from instrumented_ddp.collectives.roles import CollectiveRole, collective_context
from overlapscope.bucket_model.calibration import write_calibration
from overlapscope.errors import OverlapScopeError
from overlapscope.trace.ddp_trial import Trial, read_trial
from overlapscope.trace.schema import CALIBRATION_FILE

_log = logging.getLogger(__name__)

_HOOKS: Final = {"bf16": default_hooks.bf16_compress_hook, "fp16": default_hooks.fp16_compress_hook}
_LARGEST_BYTES: Final = 256 * 1024**2
"""Largest all-reduce that is timed, however large the model is."""


class _Model(Protocol):
    """What is needed of a DDP instance."""

    process_group: dist.ProcessGroup
    device: torch.device

    def register_comm_hook(self, state: object, hook: Any) -> None: ...


class RunningTrial:
    """The trial of this process.

    Args:
        trial: what was asked for.
    """

    def __init__(self, trial: Trial) -> None:
        self._trial = trial
        self._has_calibrated = False

    def change(self, arguments: BoundArguments) -> dict[str, Any]:
        """Replace arguments of a DDP instance that is about to be made, and say what the script has given.

        Returns:
            What to note of the trial in the recording of the model.
        """
        given = sorted(name for name in arguments.arguments if name not in ("self", "module"))
        self._trial.setting.change(arguments.arguments)
        return {"given": given}

    def compress(self, model: _Model) -> None:
        """Register the hook that sends gradients in another type, if the trial has one."""
        if self._trial.setting.compression:
            model.register_comm_hook(None, _HOOKS[self._trial.setting.compression])

    def calibrate(self, model: _Model, model_bytes: int, folder: Path) -> None:
        """Time all-reduces of many sizes, once for the first model whose ranks are all there are.

        Args:
            model_bytes: bytes of the model's gradients; no bucket is larger.
            folder: folder of the rank; the result is written beside it.
        """
        group = model.process_group
        is_whole = group.size() == dist.get_world_size() > 1
        if not self._trial.calibrates or self._has_calibrated or not is_whole:
            return
        self._has_calibrated = True
        is_cuda = model.device.type == "cuda"
        # torch gathers objects on the current device, which scripts with device_ids need not have set.
        device: AbstractContextManager[Any] = torch.cuda.device(model.device) if is_cuda else nullcontext()
        with device, collective_context(CollectiveRole(role="construction")):
            from instrumented_ddp.calibrate import measure_all_sizes  # a program as well, which runs itself

            measured = measure_all_sizes(group, model.device, min(model_bytes, _LARGEST_BYTES), prints=False)
            if is_cuda:
                torch.cuda.empty_cache()  # the training finds as much memory as without
        if group.rank() == 0:
            with suppress(OverlapScopeError):  # the disk is full: predictions do without
                write_calibration(folder.parent / CALIBRATION_FILE, measured)


_of_this_process: RunningTrial | None = None


def get_trial() -> RunningTrial | None:
    """Return the trial that the environment of this process asks for; None if there is none, or it can't be read."""
    global _of_this_process
    try:
        if _of_this_process is None and (trial := read_trial()) is not None:
            _of_this_process = RunningTrial(trial)
    except OverlapScopeError as error:
        _log.warning("settings are left as they are: %s", error)
    return _of_this_process
