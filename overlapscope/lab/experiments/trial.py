"""One timed training, or series of all-reduces: everything that is needed to repeat it."""

from __future__ import annotations

import json
import random
from collections.abc import Collection, Iterable
from dataclasses import asdict, dataclass

from overlapscope.text import count_of
from overlapscope.trace.environment import DETAILS, Detail


@dataclass(frozen=True, kw_only=True)
class ExperimentTrial:
    """One setting, run once."""

    experiment: str
    ranks: int
    backend: str
    repetition: int
    seed: int
    """Seed of weights and data, and of the order of trials."""
    steps: int
    """Number of optimizer updates; 0 for all-reduces alone."""
    model: str = ""
    """Name in ``examples/experiments/workloads.py``; empty for all-reduces alone."""
    strategy: str = "overlapped"
    bucket_cap_mb: float | None = None
    """Bucket size in MB; None for the default of DDP, or of the strategy."""
    groups: int | None = None
    """Number of process groups used in turn; None for the number that the strategy has."""
    sync_every: int = 1
    """Forward and backward passes per step, of which the last one reduces the sum of gradients."""
    batch: int | None = None
    """Samples per rank and pass; None for the model's default, as for the learning rate."""
    learning_rate: float | None = None
    total_elements: int = 0
    """All-reduces alone: total number of float32 values to reduce."""
    tensor_elements: int = 0
    """All-reduces alone: number of float32 values in each."""
    detail: Detail = DETAILS[0]

    @property
    def key(self) -> str:
        """Return the key that identifies the trial among those that are done."""
        return json.dumps(asdict(self), sort_keys=True)

    @property
    def folder_name(self) -> str:
        """Return the folder name of the recording: what differs between trials of an experiment, for people."""
        parts = [self.model or f"{self.tensor_elements}-elements", f"{self.ranks}-ranks", self.strategy]
        parts += [f"{self.bucket_cap_mb:g}-mb"] if self.bucket_cap_mb is not None else []
        parts += [f"{self.groups}-groups"] if self.groups is not None else []
        parts += [f"every-{self.sync_every}"] if self.sync_every > 1 else []
        parts += [f"batch-{self.batch}"] if self.batch is not None else []
        return "-".join([*parts, self.backend, f"{self.steps}-steps", f"seed-{self.seed}", f"{self.repetition}"])

    @property
    def description(self) -> str:
        """Describe what is measured, in a few words."""
        ranks = count_of(self.ranks, "rank")
        if not self.model:
            return f"all-reduces of {self.tensor_elements:,} values, {ranks}"
        parts = [self.model, ranks, self.strategy]
        parts += [f"{self.bucket_cap_mb:g} MB"] if self.bucket_cap_mb is not None else []
        parts += [count_of(self.groups, "group")] if self.groups is not None else []
        parts += [f"every {self.sync_every}"] if self.sync_every > 1 else []
        return ", ".join(parts)

    @classmethod
    def read(cls, key: str) -> ExperimentTrial:
        """Parse the trial of a key."""
        return cls(**json.loads(key))


def list_remaining(trials: Iterable[ExperimentTrial], done: Collection[str]) -> list[ExperimentTrial]:
    """Select the trials that are not done, in the order in which they are measured.

    Drift of a machine, such as its temperature, should affect all settings alike: so each is measured once before any
    is measured again, in an order that is random for each repetition.

    Args:
        done: Keys of trials.
    """
    drawn = {trial.key: random.Random(trial.key).random() for trial in trials}
    left = [trial for trial in trials if trial.key not in done]
    return sorted(left, key=lambda trial: (trial.repetition, drawn[trial.key]))
