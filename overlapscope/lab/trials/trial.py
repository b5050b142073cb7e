"""One training, or one series of all-reduces, whose time is taken: all that it takes to do it again."""

from __future__ import annotations

import json
import random
from collections.abc import Collection, Iterable
from dataclasses import asdict, dataclass
from typing import Any

from overlapscope.trace.environment import DETAILS, Detail


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One setting, once."""

    experiment: str
    ranks: int
    backend: str
    repetition: int
    seed: int
    """Of weights and data, and of the order of trials."""
    steps: int
    """Updates of the weights; of all-reduces alone 0."""
    model: str = ""
    """Name in ``examples/experiments/workloads.py``; empty for all-reduces alone."""
    strategy: str = "overlapped"
    bucket_cap_mb: float | None = None
    """None: the default of DDP, or of the strategy."""
    groups: int | None = None
    """Process groups that take turns; None: as many as the strategy has."""
    sync_every: int = 1
    """Forward and backward passes of a step, of which the last one reduces the sum of gradients."""
    batch: int | None = None
    """Samples a rank and pass; None: as the model has it. So is the learning rate."""
    learning_rate: float | None = None
    total_elements: int = 0
    """Of all-reduces alone: float32 values that are reduced in all."""
    tensor_elements: int = 0
    """The same in each of them."""
    detail: Detail = DETAILS[0]

    @property
    def key(self) -> str:
        """By which it is known that it has been done."""
        return json.dumps(asdict(self), sort_keys=True)

    @property
    def folder_name(self) -> str:
        """Of its recording: what differs between trials of an experiment, for people."""
        parts = [self.model or f"{self.tensor_elements}-elements", f"{self.ranks}-ranks", self.strategy]
        parts += [f"{self.bucket_cap_mb:g}-mb"] if self.bucket_cap_mb is not None else []
        parts += [f"{self.groups}-groups"] if self.groups is not None else []
        parts += [f"every-{self.sync_every}"] if self.sync_every > 1 else []
        parts += [f"batch-{self.batch}"] if self.batch is not None else []
        return "-".join([*parts, self.backend, f"{self.steps}-steps", f"seed-{self.seed}", f"{self.repetition}"])

    @property
    def settings(self) -> dict[str, Any]:
        """All but which repetition it is."""
        return {name: value for name, value in asdict(self).items() if name != "repetition"}

    @classmethod
    def read(cls, key: str) -> Trial:
        """The trial of a key."""
        return cls(**json.loads(key))


def left_to_do(trials: Iterable[Trial], done: Collection[str]) -> list[Trial]:
    """Those that are not done, in the order in which they are measured.

    Whatever drifts on a machine, such as its temperature, should meet all settings alike: so they are measured once
    each before any is measured again, in an order that is drawn for each repetition.

    Args:
        done: keys of trials.
    """
    drawn = {trial.key: random.Random(trial.key).random() for trial in trials}
    left = [trial for trial in trials if trial.key not in done]
    return sorted(left, key=lambda trial: (trial.repetition, drawn[trial.key]))
