"""DDP instances of this process: files that describe them, and what went wrong with their gradients."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from typing import Final

import torch

from instrumented_ddp.bucket_plan import ParameterSpec
from instrumented_ddp.collectives.call_sites import describe_frame
from instrumented_ddp.collectives.log import CollectiveRecorder
from instrumented_ddp.recording.coverage import UnreducedUpdate
from overlapscope.diagnosis.evidence import (
    CallSite,
    InterruptedBackward,
    NonFiniteGradients,
    UnreducedCause,
    UnreducedStep,
)
from overlapscope.diagnosis.replica_drift import OUTSIDE_MODELS
from overlapscope.trace.json_files import dump_json_line, replace_text, write_json
from overlapscope.trace.schema import (
    FROZEN_FILE,
    INTERRUPTED_BACKWARDS_FILE,
    NON_FINITE_FILE,
    PARAMETERS_FILE,
    UNREDUCED_FILE,
)

_MAX_INTERRUPTED_BACKWARDS: Final = 16
_MAX_UNREDUCED_NAMES: Final = 64
_UPDATES_BEFORE_ALARM: Final = 8
"""Number of updates all of whose backwards were under ``no_sync()``: models may be averaged every few steps."""
_MAX_UNREDUCED: Final = 64
"""Maximum number of records of updates that were not reduced, each of another model or cause."""


class ModelRegistry:
    """Registry of the DDP instances of this process, which records their definitions before training starts.

    Args:
        collectives: the collective log of this process; the files are written to its folder.
    """

    def __init__(self, collectives: CollectiveRecorder) -> None:
        self._collectives = collectives
        self._count = 0
        self._modules: dict[int, tuple[Callable[[], torch.nn.Module | None], dict[str, int]]] = {}
        """Module and sizes of the parameters by name, by number."""
        self._unreduced: dict[tuple[int, UnreducedCause], UnreducedStep] = {}
        self._reduced_by_user_before = 0
        self.interrupted_backwards: tuple[InterruptedBackward, ...] = ()
        """Latest interrupted backwards, in order."""
        self.non_finite: tuple[NonFiniteGradients, ...] = ()
        """Steps in which gradients were not finite, by model."""
        self.non_finite_since_ns: int | None = None
        """When weights were first seen not to be finite."""

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
        self._modules[number] = weakref.ref(module), {parameter.name: parameter.elements for parameter in parameters}
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

    def names_of(self, model: int) -> tuple[str, ...]:
        """Return the names of the trained parameters of a model."""
        return tuple(self._modules[model][1])

    def reserve_number(self) -> int:
        """Return a number for parameters that are in no DDP instance, and that ranks don't compare."""
        number = self._count
        self._count += 1
        self._modules[number] = lambda: None, {}
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

    def add_outside(self, sizes: Mapping[str, int]) -> int:
        """Register parameters in no DDP instance, by name, and return a number for them."""
        number = OUTSIDE_MODELS + sum(model >= OUTSIDE_MODELS for model in self._modules)
        self._modules[number] = lambda: None, dict(sizes)
        return number

    @property
    def unreduced(self) -> tuple[UnreducedStep, ...]:
        """Return the first updates that have used gradients of this rank alone, by model and cause."""
        return tuple(self._unreduced.values())

    @property
    def has_unreduced_gradients(self) -> bool:
        """Return whether other ranks are to be told: not before the next forward, or an average of models, may be."""
        return any(
            one.cause not in ("incomplete", "outside", "in part", "left out")
            and (one.cause != "no_sync" or one.reduced_backwards or one.updates >= _UPDATES_BEFORE_ALARM)
            and not one.is_averaged_by_user
            for one in self.unreduced
        )

    def record_unreduced_update(self, model: int, found: UnreducedUpdate, step: int) -> None:
        """Record an update with gradients that were never averaged: the first of a cause, and how many follow.

        Args:
            found: what was found; its ``parameters`` are those of the model by their index.
            step: step that the update belongs to.
        """
        key = model, found.cause
        known = self._unreduced.get(key)
        if known is not None:
            known = replace(known, updates=known.updates + 1, last_step=step)
        elif len(self._unreduced) < _MAX_UNREDUCED:
            names = list(self._modules[model][1])
            sites = [self._site(number) for number in found.call_sites]
            known = UnreducedStep(
                model=model,
                step=step,
                call_site=next(iter(sites), None),
                cause=found.cause,
                parameters=tuple(names[index] for index in found.parameters[:_MAX_UNREDUCED_NAMES]),
                parameter_count=len(found.parameters),
                call_sites=tuple(dict.fromkeys(site for site in sites if site is not None)),
                backwards=len(sites),
                reduced_backwards=found.reduced_backwards,
                last_step=step,
            )
            self._reduced_by_user_before = self._collectives.elements_reduced_by_user
        else:
            return
        self._unreduced[key] = known
        if known.updates & (known.updates - 1) == 0:  # the file counts up to a power of two until the recording ends
            self.write_unreduced()

    def on_update(self) -> None:
        """Note, before an update, whether the user has averaged parameters whose gradients were not reduced."""
        if not self._unreduced:
            return
        now = self._collectives.elements_reduced_by_user
        reduced, self._reduced_by_user_before = now - self._reduced_by_user_before, now
        if not reduced:
            return
        for model in {one.model for one in self.unreduced if one.model < OUTSIDE_MODELS}:
            if 2 * reduced >= sum(self._modules[model][1].values()):
                self.on_averaging(model)

    def on_averaging(self, model: int) -> None:
        """Note that the user has reduced as much as the parameters of a model hold, and not their gradients."""
        for key, one in self._unreduced.items():
            if one.model == model and not one.is_averaged_by_user:
                self._unreduced[key] = replace(one, is_averaged_by_user=True)
                self.write_unreduced()

    def write_unreduced(self) -> None:
        """Write the updates that have used gradients of this rank alone."""
        if self._unreduced:
            lines = [dump_json_line(asdict(one)) for one in self.unreduced]
            with suppress(OSError):
                replace_text(self._collectives.folder / UNREDUCED_FILE, "".join(lines))

    def on_interrupted_backward(self, step: int) -> None:
        """Record that an exception came out of the latest backward and training continues. The last few are kept."""
        left = InterruptedBackward(step=step, call_site=self._site(self._collectives.position.backward_call_site))
        self.interrupted_backwards = (*self.interrupted_backwards, left)[-_MAX_INTERRUPTED_BACKWARDS:]
        lines = [dump_json_line(asdict(one)) for one in self.interrupted_backwards]
        with suppress(OSError):
            replace_text(self._collectives.folder / INTERRUPTED_BACKWARDS_FILE, "".join(lines))

    def record_non_finite(self, model: int, found: Sequence[NonFiniteGradients]) -> None:
        """Record all steps so far in which a model's gradients were not finite."""
        others = [one for one in self.non_finite if one.model != model]
        self.non_finite = tuple(sorted((*others, *found), key=lambda one: one.model))
        if self.non_finite_since_ns is None and any(one.is_used for one in found):
            self.non_finite_since_ns = time.monotonic_ns()
        with suppress(OSError):
            lines = [dump_json_line(asdict(one)) for one in self.non_finite]
            replace_text(self._collectives.folder / NON_FINITE_FILE, "".join(lines))

    def _site(self, call_site: int) -> CallSite | None:
        file, line, function = self._collectives.call_sites.location(call_site) or (None, None, None)
        return CallSite(file=file, line=line, function=function) if file and line and function else None
