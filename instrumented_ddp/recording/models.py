"""DDP instances of this process and their files: ``parameters.jsonl``, ``unreduced.json`` and others."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from typing import Final

import torch

from instrumented_ddp.bucket_plan import ParameterSpec
from instrumented_ddp.collective_log.call_sites import describe_frame
from instrumented_ddp.collective_log.collectives import CollectiveLog
from overlapscope.diagnosis.evidence import CallSite, InterruptedBackward, UnreducedStep
from overlapscope.trace.checksum import dump_json_line
from overlapscope.trace.format import (
    FROZEN_FILE,
    INTERRUPTED_BACKWARDS_FILE,
    PARAMETERS_FILE,
    UNREDUCED_FILE,
    write_json,
)
from overlapscope.trace.host import host_now_ns

_MAX_INTERRUPTED_BACKWARDS: Final = 16


class ModelRegistry:
    """Registry of the DDP instances of this process, which records their definitions before training starts.

    Args:
        collectives: the collective log of this process; the files are written to its folder.
    """

    def __init__(self, collectives: CollectiveLog) -> None:
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
            settings: as in ``settings_of_model``.

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
        site = self._site(call_site)
        step = self._collectives.position.step
        self.unreduced = UnreducedStep(model=model, step=step, call_site=site)
        where = {"call_site": call_site, **_as_json(site)}
        with suppress(OSError):
            write_json(
                self._collectives.folder / UNREDUCED_FILE,
                {"model": model, "step": step, **where, "time_ns": host_now_ns()},
            )

    def on_interrupted_backward(self, step: int) -> None:
        """Record that an exception came out of the latest backward and training continues. The last few are kept."""
        left = InterruptedBackward(step=step, call_site=self._site(self._collectives.position.backward_call_site))
        self.interrupted_backwards = (*self.interrupted_backwards, left)[-_MAX_INTERRUPTED_BACKWARDS:]
        lines = [{"step": one.step, **_as_json(one.call_site)} for one in self.interrupted_backwards]
        with suppress(OSError):
            write_json(self._collectives.folder / INTERRUPTED_BACKWARDS_FILE, {"backwards": lines})

    def _site(self, call_site: int) -> CallSite | None:
        file, line, function = self._collectives.call_sites.location(call_site) or (None, None, None)
        return CallSite(file=file, line=line, function=function) if file and line and function else None


def _as_json(site: CallSite | None) -> dict[str, object]:
    return {} if site is None else asdict(site)
