"""What an experiment is."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import pandas as pd

from overlapscope.analysis.analysis import Analysis
from overlapscope.lab.experiments.charts import Figure
from overlapscope.lab.trials.trial import Trial


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """What whoever runs an experiment asks for."""

    models: tuple[str, ...]
    ranks: int
    """All that there are."""
    backend: str
    strategies: tuple[str, ...]
    """By name; those that an experiment does not compare are of no use to it."""
    steps: int
    repetitions: int
    seed: int

    @property
    def half_and_all(self) -> tuple[int, ...]:
        """Numbers of ranks for an experiment that the paper has with two of them."""
        return (self.ranks // 2, self.ranks) if self.ranks >= 4 else (self.ranks,)

    def trial(self, experiment: str, repetition: int, **settings: Any) -> Trial:
        """A trial of all ranks, unless its settings say otherwise."""
        usual = {"ranks": self.ranks, "steps": self.steps}
        return Trial(
            experiment=experiment,
            backend=self.backend,
            repetition=repetition,
            seed=self.seed + repetition,
            **{**usual, **settings},
        )


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """One question, its trials, and the figure that answers it."""

    name: str
    """For ``overlapscope lab run NAME``."""
    title: str
    figure: str
    """Of the paper: ``Figure 6``; empty for one of our own."""
    paper: str
    """What the paper found."""
    trials: Callable[[Wanted], list[Trial]]
    draw: Callable[[pd.DataFrame], Figure]
    """Makes the figure of the rows of trials that have succeeded."""
    observe: Callable[[Analysis], Mapping[str, Any]] | None = None
    """Further columns, from the recording of a trial."""
