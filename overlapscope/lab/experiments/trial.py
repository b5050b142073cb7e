"""One timed training, or series of all-reduces: everything that is needed to repeat it."""

from __future__ import annotations

import json
import random
from collections.abc import Collection, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from overlapscope.analysis import Analysis
from overlapscope.breakdown.text import describe_summary
from overlapscope.errors import OverlapScopeError
from overlapscope.trace.environment import DETAILS, Detail
from overlapscope.trace.recording import read_trace

# Results of a recorded trial: the same step-time breakdown that every page and command shows.


def analyze_recording(recording: Path) -> Analysis:
    """Analyze the recording of a trial.

    Raises:
        OverlapScopeError: The recording can't be read, or has no step that all ranks have finished and that can be
            compared.
    """
    analysis = Analysis(read_trace(recording))
    if not analysis.summary.steps:
        raise OverlapScopeError(f"{recording}: {describe_summary(analysis.summary)}")
    return analysis


def make_columns(analysis: Analysis) -> dict[str, Any]:
    """Compute the columns of a row: the mean step and its blocks, which sum to it, hidden communication, and all steps.

    Returns:
        step_ns, a column for each of ``BLOCKS``, hidden_ns, and steps_ns: a list with the time of each counted step.
    """
    summary = analysis.summary
    counted = summary.figures[summary.is_steady]
    return {
        "step_ns": summary.mean.step.value,
        **{f"{name}_ns": mean.value for name, mean in summary.mean.blocks.items()},
        "hidden_ns": summary.hidden.value,
        "steps_ns": counted.groupby("step")["step_time_ns"].mean().tolist(),
    }


@dataclass(frozen=True, kw_only=True)
class Trial:
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
    def settings(self) -> dict[str, Any]:
        """Return all settings except the repetition."""
        return {name: value for name, value in asdict(self).items() if name != "repetition"}

    @classmethod
    def read(cls, key: str) -> Trial:
        """Parse the trial of a key."""
        return cls(**json.loads(key))


def list_remaining(trials: Iterable[Trial], done: Collection[str]) -> list[Trial]:
    """Select the trials that are not done, in the order in which they are measured.

    Drift of a machine, such as its temperature, should affect all settings alike: so each is measured once before any
    is measured again, in an order that is random for each repetition.

    Args:
        done: Keys of trials.
    """
    drawn = {trial.key: random.Random(trial.key).random() for trial in trials}
    left = [trial for trial in trials if trial.key not in done]
    return sorted(left, key=lambda trial: (trial.repetition, drawn[trial.key]))
