"""What this rank's training loop does with the gradients of each model, beside what is a fault at once.

It is compared with the other ranks when a job is diagnosed (``overlapscope.diagnosis.loop_facts``). What is counted
here are backwards, reductions and updates; gradients are looked at only after a collective of the user.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Final

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from instrumented_ddp.collectives.log import CollectiveRecorder
from instrumented_ddp.collectives.user_reductions import GradientReader
from overlapscope.diagnosis.loop_facts import (
    LoopFacts,
    MicroBatches,
    RepeatedBy,
    RepeatedReductions,
    UnheldParameters,
)
from overlapscope.trace.json_files import dump_json_line, replace_text
from overlapscope.trace.schema import LOOP_FACTS_FILE

_MAX_CHANGES: Final = 64
_MAX_NAMES: Final = 64
_WRITE_INTERVAL_S: Final = 5.0


class ModelLoop:
    """Backwards, reductions and updates of one wrapped model.

    Args:
        model: number of the model.
        names: names of its trained parameters.
        parameters: the parameters. They are not kept alive.
        collectives: source of the user's call sites.
        reader: reads what the user's own collectives reduce of their gradients.
    """

    def __init__(
        self,
        model: int,
        names: Sequence[str],
        parameters: Sequence[torch.nn.Parameter],
        collectives: CollectiveRecorder,
        reader: GradientReader,
    ) -> None:
        self.model = model
        self._names = tuple(names)
        self._numbers = {id(parameter): number for number, parameter in enumerate(parameters)}
        self._first = weakref.ref(parameters[0])
        self._collectives = collectives
        self._reader = reader
        self._backwards = self._reductions = self._added = 0
        """Since the latest update: backwards, those that were reduced, and of these those whose gradients were added
        to reduced ones."""
        self._reduced: tuple[StorageWeakRef, int] | None = None
        """Memory and version of the first gradient after the latest reduction since an update."""
        self._is_added = False
        self._changes: deque[tuple[int, int]] = deque(maxlen=_MAX_CHANGES)
        self._updates = self._last_step = 0
        self._has_uneven_inputs = False
        self._repeated: dict[RepeatedBy, RepeatedReductions] = {}
        self._held: set[int] = set()
        self._seen: weakref.WeakKeyDictionary[torch.optim.Optimizer, tuple[int, bool]] = weakref.WeakKeyDictionary()
        """Number of all parameters of each optimizer, and whether some are this model's."""

    def on_backward(self) -> None:
        """Note that a backward begins to compute gradients."""
        self._backwards += 1
        self._is_added = self._reduced is not None and self._is_unchanged(*self._reduced)

    def on_gradients_reduced(self) -> None:
        """Note that the gradients so far are averages."""
        self._reductions += 1
        self._added += self._is_added
        self._is_added = False
        gradient = self._first_gradient()
        self._reduced = None if gradient is None else (StorageWeakRef(gradient.untyped_storage()), gradient._version)

    def on_update(self, optimizer: torch.optim.Optimizer, step: int) -> None:
        """Note that an optimizer is about to update."""
        if not self._backwards or not self._is_held_by(optimizer):  # of this model only the first of several counts
            return
        if self._reader.has_news and self._reader.take() and self._reductions:
            self._note_repeated("user", step, self._reader.call_site)
        if self._added:
            self._note_repeated("backwards", step, self._collectives.position.backward_call_site)
        if not self._changes or self._changes[-1][1] != self._backwards:
            self._changes.append((step, self._backwards))
        self._updates += 1
        self._last_step = step
        self._has_uneven_inputs |= bool(self._collectives.position.flags)
        self._backwards = self._reductions = self._added = 0
        self._reduced = None

    def summarize(self) -> LoopFacts:
        """Return what was noted. Called on another thread."""
        is_even = self._updates > 0 and not self._has_uneven_inputs
        micro_batches = MicroBatches(model=self.model, changes=tuple(self._changes), last_step=self._last_step)
        names = [name for number, name in enumerate(self._names) if number not in self._held] if self._held else []
        unheld = UnheldParameters(model=self.model, names=tuple(names[:_MAX_NAMES]), count=len(names))
        return LoopFacts(
            repeated=tuple(self._repeated.values()),
            micro_batches=(micro_batches,) * is_even,
            unheld=(unheld,) * bool(names),
        )

    def _is_held_by(self, optimizer: torch.optim.Optimizer) -> bool:
        """Return whether an optimizer updates parameters of this model, and note which."""
        groups = getattr(optimizer, "param_groups", ())
        count = sum(len(group["params"]) for group in groups)
        known = self._seen.get(optimizer)
        if known is None or known[0] != count:
            held = {id(parameter) for group in groups for parameter in group["params"]} & self._numbers.keys()
            self._held.update(self._numbers[one] for one in held)
            known = self._seen[optimizer] = count, bool(held)
        return known[1]

    def _first_gradient(self) -> torch.Tensor | None:
        parameter = self._first()
        gradient = None if parameter is None else parameter.grad
        return gradient if gradient is not None and gradient.layout is torch.strided else None

    def _is_unchanged(self, storage: StorageWeakRef, version: int) -> bool:
        """Return whether the first gradient is what it was: neither set to zero nor replaced."""
        gradient = self._first_gradient()
        if gradient is None or gradient._version != version:
            return False
        return gradient.untyped_storage()._cdata == storage.cdata

    def _note_repeated(self, by: RepeatedBy, step: int, call_site: int) -> None:
        known = self._repeated.get(by)
        if known is not None:
            self._repeated[by] = replace(known, updates=known.updates + 1)
            return
        place = self._collectives.call_sites.location(call_site)
        site = "" if place is None else f"{place[0]}:{place[1]} ({place[2]})"
        self._repeated[by] = RepeatedReductions(
            model=self.model, by=by, step=step, site=site, backwards=self._reductions
        )


class LoopFactsWriter:
    """Writer of ``loop_facts.jsonl``; a ``PeriodicTask``.

    Args:
        folder: folder of the rank's recording.
        collect: returns what is known so far.
    """

    name = "the record of what the loop does"

    def __init__(self, folder: Path, collect: Callable[[], LoopFacts]) -> None:
        self._path = folder / LOOP_FACTS_FILE
        self._collect = collect
        self._written = LoopFacts()

    def run(self) -> float:
        """Write what has changed, and return the seconds until the next call."""
        facts = self._collect()
        if facts != self._written:
            self._written = facts
            with suppress(OSError):
                replace_text(self._path, dump_json_line(asdict(facts)))
        return _WRITE_INTERVAL_S

    def end(self) -> None:
        """Write what has changed since."""
        self.run()
