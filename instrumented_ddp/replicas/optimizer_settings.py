"""Optimizer settings of this process and their changes: ``hyperparameters.jsonl``."""

from __future__ import annotations

import hashlib
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from operator import itemgetter
from pathlib import Path
from typing import Any, Final

import torch

from overlapscope.diagnosis.replica_drift import HyperparameterChange, OptimizerHyperparameters
from overlapscope.trace.json_files import dump_json_line, replace_text
from overlapscope.trace.schema import HYPERPARAMETERS_FILE

_MAX_GROUPS: Final = 16
"""Maximum number of parameter groups per optimizer; further groups are ignored."""
_MAX_CHANGES: Final = 512
"""Maximum number of changes kept: the latest."""
_MAX_OPTIMIZERS: Final = 64


class OptimizerSettings:
    """Settings of all optimizers that update the parameters of DDP instances.

    Args:
        folder: folder of the rank's recording.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._optimizers: weakref.WeakKeyDictionary[torch.optim.Optimizer, _SettingsHistory] = (
            weakref.WeakKeyDictionary()
        )
        self._all: list[_SettingsHistory] = []

    def on_update_start(self, optimizer: torch.optim.Optimizer, step: int) -> None:
        """Record an optimizer's settings if they have changed."""
        settings = self._optimizers.get(optimizer)
        if settings is None:
            if len(self._all) >= _MAX_OPTIMIZERS:
                return
            settings = self._optimizers[optimizer] = _SettingsHistory(optimizer)
            settings.key += f".{sum(settings.key == one.key.partition('.')[0] for one in self._all)}"
            self._all.append(settings)
        settings.on_update_start(optimizer, step)

    def write(self) -> None:
        """Write everything recorded so far."""
        if self._all:
            with suppress(OSError):
                lines = [dump_json_line(asdict(settings.summarize())) for settings in list(self._all)]
                replace_text(self._folder / HYPERPARAMETERS_FILE, "".join(lines))


class _SettingsHistory:
    """Settings of one optimizer, which is not kept alive."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        groups = optimizer.param_groups[:_MAX_GROUPS]
        named = [
            (index, name, part)
            for index, group in enumerate(groups)
            for name, value in sorted(group.items())
            for part in _parts_of(value)
        ]
        self._class_name = type(optimizer).__name__
        self._names = tuple(
            name + (f"[{part}]" if part is not None else "") + (f" of group {index}" if len(groups) > 1 else "")
            for index, name, part in named
        )
        self._parts = [(index, name, part) for index, name, part in named]
        keys = [list(dict.fromkeys(name for at, name, _ in named if at == index)) for index in range(len(groups))]
        self._getters: list[Callable[[dict[str, Any]], Any] | None] = [
            itemgetter(*one) if one else None for one in keys
        ]
        shapes = [[tuple(p.shape) for p in group["params"]] for group in groups]
        same = repr((self._class_name, self._names, len(optimizer.param_groups), shapes))
        self.key = hashlib.blake2b(same.encode(), digest_size=8).hexdigest()
        self._before: list[Any] = []
        self._updates = 0
        self._changes: deque[HyperparameterChange] = deque(maxlen=_MAX_CHANGES)

    def on_update_start(self, optimizer: torch.optim.Optimizer, step: int) -> None:
        try:
            self._follow(optimizer.param_groups, step)
        except (TypeError, KeyError, IndexError):  # a setting is no number any more, or gone
            self._getters.clear()
            self._parts.clear()
            self._before = []
            self.key += "?"  # what is no longer followed is not compared
        self._updates += 1

    def _follow(self, groups: list[dict[str, Any]], step: int) -> None:
        now = [getter(group) for getter, group in zip(self._getters, groups, strict=False) if getter is not None]
        if now != self._before:
            values = tuple(_number(groups[index][name], part) for index, name, part in self._parts)
            self._changes.append(HyperparameterChange(update=self._updates, step=step, values=values))
            self._before = now

    def summarize(self) -> OptimizerHyperparameters:
        return OptimizerHyperparameters(
            key=self.key,
            class_name=self._class_name,
            names=self._names,
            changes=tuple(self._changes),
            updates=self._updates,
        )


def _parts_of(value: Any) -> list[int | None]:
    """Return the indices of a setting's numbers, ``[None]`` for a single one. Tensors may be on a device: none."""
    if isinstance(value, bool | int | float):
        return [None]
    if isinstance(value, tuple) and all(isinstance(part, bool | int | float) for part in value):
        return list(range(len(value)))
    return []


def _number(value: Any, part: int | None) -> float:
    return float(value if part is None else value[part])
