"""Progress of an experiment: a bar with the remaining time on a terminal, a line for each trial in a pipe."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from overlapscope.lab.experiments.trial import ExperimentTrial, list_remaining
from overlapscope.text import format_ns


class TrialProgress:
    """Progress display, shown while the context is entered.

    Args:
        trials: All trials.
        done: Keys of the trials that were done before.
    """

    def __init__(self, trials: Sequence[ExperimentTrial], done: Collection[str]) -> None:
        left = list_remaining(trials, done)
        self._left_cost = sum(map(_cost, left))
        self._done_cost = 0
        self._number = len(trials) - len(left)
        self._all = len(trials)
        self._began_s = time.monotonic()
        console = Console(stderr=True)
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[left]}"),
        )
        self._bar = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
        self._task = self._bar.add_task("starting", total=self._all, completed=self._number, left="")

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def begin(self, trial: ExperimentTrial) -> None:
        """Show that a trial begins."""
        self._bar.update(self._task, description=trial.description)

    def end(self, trial: ExperimentTrial, measured: Mapping[str, Any], failure: str) -> None:
        """Show that a trial is over, with its result."""
        self._number += 1
        self._done_cost += _cost(trial)
        self._left_cost -= _cost(trial)
        taken_s = time.monotonic() - self._began_s
        left = f"about {_format_estimate(taken_s * self._left_cost / self._done_cost)} left" if self._left_cost else ""
        self._bar.update(self._task, completed=self._number, left=left)
        outcome = f"failed: {failure}" if failure else format_ns(measured["step_ns"])
        line = f"{self._number} of {self._all}: {trial.description}: {outcome}"
        self._bar.console.print(
            line + (f"; {left}" if left and not self._bar.console.is_terminal else ""), highlight=False, soft_wrap=True
        )


def _format_estimate(seconds: float) -> str:
    """Format an estimated time: ``40 s``, ``12 min``, ``2.5 h``."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 90 * 60 else f"{seconds / 3600:.1f} h"


def _cost(trial: ExperimentTrial) -> int:
    """Estimate the cost of a trial in passes: starting processes takes as long as some steps."""
    return 10 + trial.steps * trial.sync_every
