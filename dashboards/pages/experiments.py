"""Experiments page: the figures of each experiment, the findings of the paper, and the findings here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from urllib.parse import quote

import pandas as pd
from bokeh.document import Document

from dashboards.experiment_figures import svg_for_page
from dashboards.pages.shell import render
from dashboards.runs import RunIndex
from dashboards.urls import RunUrl, run_pages_url
from overlapscope.errors import OverlapScopeError
from overlapscope.lab.experiments.charts import FigureContent
from overlapscope.lab.experiments.experiment import Experiment
from overlapscope.lab.experiments.registry import EXPERIMENTS, find_experiment_results, read_experiment
from overlapscope.lab.experiments.results import describe_conditions
from overlapscope.lab.experiments.trial import ExperimentTrial
from overlapscope.text import format_ns

# Discovery of the experiments in the served folders.


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
        return self.experiment.draw(self.rows)

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


@dataclass(frozen=True, kw_only=True)
class TrialRow:
    """A trial in the table below a figure."""

    setting: str
    repetition: int
    outcome: str
    address: str
    """Address of the pages of its recording; empty if that is not served."""


@dataclass(frozen=True, kw_only=True)
class ExperimentSection:
    """One experiment."""

    name: str
    title: str
    figure: str
    address: str
    problem: str
    """Why the results can't be shown, or not drawn; empty if they can."""
    paper: str = ""
    here: tuple[str, ...] = ()
    note: str = ""
    left_out: tuple[str, ...] = ()
    charts: tuple[str, ...] = ()
    """Markup of the charts."""
    conditions: str = ""
    command: str = ""
    trials: tuple[TrialRow, ...] = ()


def build(document: Document, runs: RunIndex) -> None:
    """Fill a document with all experiments that have results, or with how to make some."""
    document.template_variables["place"] = RunUrl(has_table=runs.only_run is None)
    names = {run.path: run.name for run in runs.found.runs}
    render(
        document,
        "experiments.html",
        title="Experiments",
        sections=[build_experiment_section(found, names) for found in find_experiments(runs.folders)],
        known=EXPERIMENTS,
        folders=[str(folder) for folder in runs.folders],
    )


def build_experiment_section(found: FoundExperiment, names: Mapping[Path, str]) -> ExperimentSection:
    """Return an experiment as the page shows it; ``names`` are the names of the runs that are served, by folder."""
    try:
        experiment, figure, rows = found.experiment, found.figure, found.rows
    except OverlapScopeError as error:
        return ExperimentSection(
            name=found.name, title=found.name, figure="", address=found.address, problem=str(error)
        )
    charts: tuple[str, ...] = ()
    problem = ""
    try:
        charts = tuple(map(svg_for_page, figure.charts))
    except OverlapScopeError as error:
        problem = str(error)
    return ExperimentSection(
        name=found.name,
        title=experiment.title,
        figure=experiment.figure,
        address=found.address,
        problem=problem,
        paper=experiment.paper,
        here=figure.here,
        note=figure.note,
        left_out=figure.left_out,
        charts=charts,
        conditions=describe_conditions(rows),
        command=" ".join(rows["argv"].iloc[-1]),
        trials=tuple(_build_trial_row(row, found.folder, names) for row in rows.to_dict("records")),  # type: ignore[arg-type]
    )


def _build_trial_row(row: Mapping[str, str], folder: Path, names: Mapping[Path, str]) -> TrialRow:
    trial = ExperimentTrial.read(row["trial"])
    name = names.get(folder / row["recording"])
    return TrialRow(
        setting=trial.description,
        repetition=trial.repetition + 1,
        outcome=f"failed: {row['failure']}" if row["failure"] else format_ns(float(row["step_ns"])),
        address="" if name is None else run_pages_url(name),
    )
