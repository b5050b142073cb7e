"""Definition of an experiment."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import pandas as pd

from overlapscope.analysis import Analysis
from overlapscope.lab.experiments.charts import FigureContent
from overlapscope.lab.experiments.trial import Trial


@dataclass(frozen=True, kw_only=True)
class ExperimentOptions:
    """Options of a run of an experiment."""

    models: tuple[str, ...]
    ranks: int
    """Total number of ranks."""
    backend: str
    strategies: tuple[str, ...]
    """Names of strategies; ignored by experiments that do not compare strategies."""
    steps: int
    repetitions: int
    seed: int

    @property
    def rank_counts(self) -> tuple[int, ...]:
        """Return the numbers of ranks for an experiment that the paper did with two of them."""
        return (self.ranks // 2, self.ranks) if self.ranks >= 4 else (self.ranks,)

    def trial(self, experiment: str, repetition: int, **settings: Any) -> Trial:
        """Make a trial of all ranks, unless its settings say otherwise."""
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
    """Name for ``overlapscope lab run NAME``."""
    title: str
    figure: str
    """Figure in the paper, such as ``FigureContent 6``; empty for our own experiments."""
    paper: str
    """Findings of the paper."""
    trials: Callable[[ExperimentOptions], list[Trial]]
    draw: Callable[[pd.DataFrame], FigureContent]
    """Makes the figure from the rows of successful trials."""
    observe: Callable[[Analysis], Mapping[str, Any]] | None = None
    """Computes further columns from the recording of a trial."""
