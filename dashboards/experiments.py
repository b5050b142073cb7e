"""Discovery of the experiments in the served folders."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from urllib.parse import quote

import pandas as pd

from overlapscope.lab.experiments.charts import FigureContent
from overlapscope.lab.experiments.experiment import Experiment
from overlapscope.lab.experiments.known import draw_figure, find_experiment_results, read_experiment


@dataclass(frozen=True)
class FoundExperiment:
    """An experiment with results."""

    folder: Path
    name: str
    """Unique name among the served experiments: that of its folder, if need be with the parent folder's before it."""

    @cached_property
    def _read(self) -> tuple[Experiment, pd.DataFrame]:
        return read_experiment(self.folder)

    @property
    def experiment(self) -> Experiment:
        """Return the experiment; like the properties below, raises OverlapScopeError if results can't be read."""
        return self._read[0]

    @property
    def rows(self) -> pd.DataFrame:
        """Return the results."""
        return self._read[1]

    @cached_property
    def figure(self) -> FigureContent:
        """Compute the figure of the results."""
        return draw_figure(self.experiment, self.rows)

    @property
    def address(self) -> str:
        """Return the URL of its files without the extension, relative to the page."""
        return f"experiments/{quote(self.name, safe='')}"


def find_experiments(folders: Sequence[Path]) -> list[FoundExperiment]:
    """Find all experiments that have results, in the order of the paper."""
    found = find_experiment_results([folder.resolve() for folder in folders])
    names = [path.name for path in found]
    return [
        FoundExperiment(path, path.name if names.count(path.name) == 1 else f"{path.parent.name}/{path.name}")
        for path in found
    ]
