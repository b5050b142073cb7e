"""DDP instances of this process: files that describe them, and detection of gradients that are never reduced.

``ddp.module(x)`` is right for evaluation. In training it yields gradients of this rank alone: nothing fails, all ranks
do the same, and their models diverge from that step on.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from types import FrameType
from typing import Final

import torch

from instrumented_ddp.bucket_plan import ParameterSpec
from instrumented_ddp.collectives.call_sites import describe_frame
from instrumented_ddp.collectives.log import CollectiveRecorder
from overlapscope.diagnosis.evidence import CallSite, InterruptedBackward, UnreducedStep
from overlapscope.trace.json_files import dump_json_line, replace_text, write_json
from overlapscope.trace.schema import (
    FROZEN_FILE,
    INTERRUPTED_BACKWARDS_FILE,
    NO_CALL_SITE,
    PARAMETERS_FILE,
    UNREDUCED_FILE,
)

_MAX_INTERRUPTED_BACKWARDS: Final = 16


class ModelRegistry:
    """Registry of the DDP instances of this process, which records their definitions before training starts.

    Args:
        collectives: the collective log of this process; the files are written to its folder.
    """

    def __init__(self, collectives: CollectiveRecorder) -> None:
        self._collectives = collectives
        self._count = 0
        self._modules: dict[int, tuple[weakref.ref[torch.nn.Module], frozenset[str]]] = {}
        self.unreduced: UnreducedStep | None = None
        """First update that has used gradients of this rank alone, see ``record_unreduced_gradients``."""
        self.interrupted_backwards: tuple[InterruptedBackward, ...] = ()
        """Latest interrupted backwards, in order."""

    def add(self, module: torch.nn.Module, parameters: Sequence[ParameterSpec], settings: Mapping[str, str]) -> int:
        """Record the definition of a DDP instance before ranks compare it.

        Args:
            settings: as in ``collect_model_settings``.

        Returns:
            Its number within the process.
        """
        number = self._count
        self._count += 1
        self._collectives.names.add_module(module)
        self._modules[number] = weakref.ref(module), frozenset(parameter.name for parameter in parameters)
        frame = self._collectives.call_sites.find_caller_frame()
        line = {
            "model": number,
            "class": type(module).__name__,
            "parameters": [parameter.signature for parameter in parameters],
            "frozen": [name for name, parameter in module.named_parameters() if not parameter.requires_grad],
            "modules": {name: type(part).__name__ for name, part in module.named_modules() if name},
            "settings": dict(settings),
            **(describe_frame(frame) if frame is not None else {}),
        }
        path = self._collectives.folder / PARAMETERS_FILE
        with suppress(OSError), path.open("a", encoding="utf-8") as file:
            file.write(dump_json_line(line))
        return number

    def note_frozen(self) -> None:
        """Write which parameters no longer require gradients although they did when they were given to DDP.

        Called when an anomaly is detected, on the watchdog's thread.
        """
        frozen: dict[str, list[str]] = {}
        with suppress(RuntimeError):  # the training thread may be changing the module
            for number, (reference, names) in list(self._modules.items()):
                module = reference()
                parameters = () if module is None else module.named_parameters()
                frozen[str(number)] = [name for name, one in parameters if name in names and not one.requires_grad]
        path = self._collectives.folder / FROZEN_FILE
        if any(frozen.values()) or path.exists():
            with suppress(OSError):
                write_json(path, {"step": self._collectives.position.step, "models": frozen})

    def record_unreduced_gradients(self, model: int, call_site: int) -> None:
        """Record the first update that uses gradients that were never averaged; every later step would look the same.

        Args:
            call_site: line at which the module was called instead of its wrapper.
        """
        if self.unreduced is not None:
            return
        step = self._collectives.position.step
        self.unreduced = UnreducedStep(model=model, step=step, call_site=self._site(call_site))
        with suppress(OSError):
            write_json(self._collectives.folder / UNREDUCED_FILE, asdict(self.unreduced))

    def on_interrupted_backward(self, step: int) -> None:
        """Record that an exception came out of the latest backward and training continues. The last few are kept."""
        left = InterruptedBackward(step=step, call_site=self._site(self._collectives.position.backward_call_site))
        self.interrupted_backwards = (*self.interrupted_backwards, left)[-_MAX_INTERRUPTED_BACKWARDS:]
        lines = [dump_json_line(asdict(one)) for one in self.interrupted_backwards]
        with suppress(OSError):
            replace_text(self._collectives.folder / INTERRUPTED_BACKWARDS_FILE, "".join(lines))

    def _site(self, call_site: int) -> CallSite | None:
        file, line, function = self._collectives.call_sites.location(call_site) or (None, None, None)
        return CallSite(file=file, line=line, function=function) if file and line and function else None


class UnreducedGradientDetector:
    """Detector of unreduced gradients of one wrapped module.

    Args:
        parameters: trained parameters of the module.
        collectives: source of the user's call sites and of the volume that users reduce themselves.
    """

    def __init__(self, parameters: Sequence[torch.nn.Parameter], collectives: CollectiveRecorder) -> None:
        self._parameters = parameters
        self._elements = sum(parameter.numel() for parameter in parameters)
        self._collectives = collectives
        self._access_call_site = NO_CALL_SITE
        self._call_site = NO_CALL_SITE
        self._reduced_by_user_before = 0

    def on_module_access(self, frame: FrameType) -> None:
        """Note that the user accesses the wrapped module, perhaps to call it."""
        if self._collectives.call_sites.is_user_frame(frame):
            self._access_call_site = self._collectives.call_sites.number_of(frame)

    def on_local_gradient(self) -> None:
        """Note a gradient from outside any pass through the wrapper."""
        if self._call_site == NO_CALL_SITE:
            # Autograd's thread for a device runs no user code: the line that took the module is the nearest known.
            self._call_site = self._collectives.call_sites.get_caller_number() or self._access_call_site
            self._reduced_by_user_before = self._collectives.elements_reduced_by_user

    def on_gradients_reduced(self) -> None:
        """Note that the current gradients are averages."""
        self._call_site = self._access_call_site = NO_CALL_SITE

    def take_unreduced_call_site(self, optimizer: torch.optim.Optimizer) -> int:
        """Return the call site behind unreduced gradients that an update is about to use. Called before each update.

        Args:
            optimizer: optimizer that is about to update. Gradients that another model's optimizer ignores may still be
                set to zero: a discriminator gets gradients from its generator's loss.

        Returns:
            The call site behind gradients that nobody has reduced; ``NO_CALL_SITE`` if there are none.
        """
        if self._call_site == NO_CALL_SITE:
            self._access_call_site = NO_CALL_SITE
            return NO_CALL_SITE
        if not self._are_updated_by(optimizer):
            return NO_CALL_SITE
        line, self._call_site, self._access_call_site = self._call_site, NO_CALL_SITE, NO_CALL_SITE
        if all(parameter.grad is None for parameter in self._parameters):
            return NO_CALL_SITE
        by_user = self._collectives.elements_reduced_by_user - self._reduced_by_user_before
        return NO_CALL_SITE if 2 * by_user >= self._elements else line

    def _are_updated_by(self, optimizer: torch.optim.Optimizer) -> bool:
        """Return whether an optimizer holds any of the parameters. Called only if there is an unreduced gradient."""
        own = {id(parameter) for parameter in self._parameters}
        return any(id(parameter) in own for group in optimizer.param_groups for parameter in group["params"])
