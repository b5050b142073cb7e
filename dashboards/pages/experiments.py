"""Experiments page: the figures of each experiment, the findings of the paper, and the findings here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from bokeh.document import Document

from dashboards.charts.drawing import draw_chart
from dashboards.charts.svg import svg_for_page
from dashboards.experiments import FoundExperiment, find_experiments
from dashboards.pages.shell import render
from dashboards.place import RunUrl, run_pages_url
from dashboards.runs import RunIndex
from overlapscope.errors import OverlapScopeError
from overlapscope.lab.experiments.known import EXPERIMENTS
from overlapscope.lab.trials.conditions import describe_conditions
from overlapscope.lab.trials.progress import describe_trial
from overlapscope.lab.trials.trial import Trial
from overlapscope.units import format_ns


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
    """Why the results can't be shown; empty if they can."""
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
    return ExperimentSection(
        name=found.name,
        title=experiment.title,
        figure=experiment.figure,
        address=found.address,
        problem="",
        paper=experiment.paper,
        here=figure.here,
        note=figure.note,
        left_out=figure.left_out,
        charts=tuple(svg_for_page(draw_chart(chart)) for chart in figure.charts),
        conditions=describe_conditions(rows),
        command=" ".join(rows["argv"].iloc[-1]),
        trials=tuple(_build_trial_row(row, found.folder, names) for row in rows.to_dict("records")),  # type: ignore[arg-type]
    )


def _build_trial_row(row: Mapping[str, str], folder: Path, names: Mapping[Path, str]) -> TrialRow:
    trial = Trial.read(row["trial"])
    name = names.get(folder / row["recording"])
    return TrialRow(
        setting=describe_trial(trial),
        repetition=trial.repetition + 1,
        outcome=f"failed: {row['failure']}" if row["failure"] else format_ns(float(row["step_ns"])),
        address="" if name is None else run_pages_url(name),
    )
