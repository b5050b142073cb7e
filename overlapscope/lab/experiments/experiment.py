"""An experiment: one question, its trials, and the figure that answers it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import pandas as pd

from overlapscope.analysis import Analysis
from overlapscope.lab.experiments.charts import Chart, FigureContent
from overlapscope.lab.experiments.trial import ExperimentTrial


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

    def trials(self, experiment: str, **settings: Sequence[Any]) -> list[ExperimentTrial]:
        """Make the trials of all combinations of these settings, of all ranks and steps unless they say otherwise."""
        return [
            ExperimentTrial(
                experiment=experiment,
                backend=self.backend,
                repetition=repetition,
                seed=self.seed + repetition,
                **{"ranks": self.ranks, "steps": self.steps, **dict(zip(settings, values, strict=True))},
            )
            for repetition in range(self.repetitions)
            for values in product(*settings.values())
        ]


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """One question, its trials, and the figure that answers it."""

    name: str
    """Name for ``overlapscope lab run NAME``."""
    title: str
    figure: str = ""
    """Figure in the paper, such as ``Figure 6``; empty for our own experiments."""
    paper: str = ""
    """Findings of the paper."""
    trials: Callable[[ExperimentOptions], list[ExperimentTrial]]
    content: Callable[[pd.DataFrame], Iterator[Chart | str]]
    """Makes the charts, and the conclusions from them as sentences, from the rows of successful trials."""
    note: str = ""
    """How to read the figure, or what it is based on."""
    observe: Callable[[Analysis], Mapping[str, Any]] | None = None
    """Computes further columns from the recording of a trial."""

    def draw(self, rows: pd.DataFrame) -> FigureContent:
        """Draw the figure of some results, with the list of settings that have none."""
        failed, good = rows[rows["failure"] != ""], rows[rows["failure"] == ""]
        reasons = dict.fromkeys(
            f"{ExperimentTrial.read(trial).description}: {failure}"
            for trial, failure in zip(failed["trial"], failed["failure"], strict=True)
        )
        figure = FigureContent(charts=(), here=("There is no result yet.",), left_out=tuple(reasons))
        if good.empty:
            return figure
        content = list(self.content(good))
        return replace(
            figure,
            charts=tuple(each for each in content if not isinstance(each, str)),
            here=tuple(each for each in content if isinstance(each, str)),
            note=self.note,
        )
