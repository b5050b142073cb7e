"""Registry of all experiments, and the experiment whose results are in a folder."""

from __future__ import annotations

from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Final

import pandas as pd

from overlapscope.errors import OverlapScopeError
from overlapscope.lab.experiments.buckets import BUCKET_SIZE, ROUND_ROBIN, TENSOR_SIZE
from overlapscope.lab.experiments.experiment import Experiment
from overlapscope.lab.experiments.results import find_results, read_results
from overlapscope.lab.experiments.scaling import SCALING
from overlapscope.lab.experiments.skip_sync import CONVERGENCE, SKIP_SYNC
from overlapscope.lab.experiments.strategies import BREAKDOWN, STRATEGIES

EXPERIMENTS: Final = (
    TENSOR_SIZE,
    BREAKDOWN,
    BUCKET_SIZE,
    SCALING,
    SKIP_SYNC,
    CONVERGENCE,
    ROUND_ROBIN,
    STRATEGIES,
)
"""All experiments, in the order of the paper, followed by our own."""


def get_experiment(name: str) -> Experiment:
    """Return the experiment with a name.

    Raises:
        OverlapScopeError: There is none.
    """
    by_name = {experiment.name: experiment for experiment in EXPERIMENTS}
    if name not in by_name:
        nearest = get_close_matches(name, by_name, n=3, cutoff=0.4)
        hint = f"did you mean {' or '.join(nearest)}?" if nearest else "see 'overlapscope lab experiments'"
        raise OverlapScopeError(f"{name}: no such experiment; {hint}")
    return by_name[name]


def find_experiment_results(folders: Sequence[Path]) -> list[Path]:
    """Find the folders of experiments among these folders and directly in them, in the order of the experiments."""
    names = [experiment.name for experiment in EXPERIMENTS]
    return sorted(
        find_results(folders), key=lambda folder: names.index(folder.name) if folder.name in names else len(names)
    )


def read_experiment(folder: Path) -> tuple[Experiment, pd.DataFrame]:
    """Read the results in a folder, and return their experiment with them.

    Raises:
        OverlapScopeError: The folder has no results of a single experiment, or they can't be read.
    """
    rows = read_results(folder)
    names = rows["experiment"].unique().tolist()
    if len(names) != 1:
        raise OverlapScopeError(
            f"{folder}: its results should be of one experiment, and are of {', '.join(names) or 'none'}"
        )
    return get_experiment(names[0]), rows
