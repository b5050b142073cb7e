"""The experiments in the folders that are served."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from urllib.parse import quote

import pandas as pd

from overlapscope.lab.experiments.charts import Figure
from overlapscope.lab.experiments.experiment import Experiment
from overlapscope.lab.experiments.known import experiment_in, figure_of, results_in


@dataclass(frozen=True)
class FoundExperiment:
    """An experiment with results."""

    folder: Path
    name: str
    """What it is called among those that are served: its folder, and if need be that one's."""

    @cached_property
    def _read(self) -> tuple[Experiment, pd.DataFrame]:
        return experiment_in(self.folder)

    @property
    def experiment(self) -> Experiment:
        """Which it is; an OverlapScopeError if its results can't be read, as below."""
        return self._read[0]

    @property
    def rows(self) -> pd.DataFrame:
        """Its results."""
        return self._read[1]

    @cached_property
    def figure(self) -> Figure:
        """What they show."""
        return figure_of(self.experiment, self.rows)

    @property
    def address(self) -> str:
        """Of its files, without the ending, relative to the page."""
        return f"experiments/{quote(self.name, safe='')}"


def experiments_in(folders: Sequence[Path]) -> list[FoundExperiment]:
    """All that have results now, in the order of the paper."""
    found = results_in([folder.resolve() for folder in folders])
    names = [path.name for path in found]
    return [
        FoundExperiment(path, path.name if names.count(path.name) == 1 else f"{path.parent.name}/{path.name}")
        for path in found
    ]
