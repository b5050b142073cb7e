"""Comparison of all strategies on one model and link: one of our own experiments."""

from __future__ import annotations

import pandas as pd

from overlapscope.interval import Interval
from overlapscope.lab.experiments.charts import Bars, Figure, is_known
from overlapscope.lab.experiments.estimates import (
    bar_of,
    change,
    groups_of,
    is_told,
    said_change,
    select,
    step_of,
    where,
)
from overlapscope.lab.experiments.experiment import Experiment, Wanted
from overlapscope.lab.trials.trial import Trial
from overlapscope.units import format_interval_ns, format_ns

NAME = "strategies"
DEFAULT = "overlapped"


def trials(wanted: Wanted) -> list[Trial]:
    """Return trials of each strategy with its defaults."""
    return [
        wanted.trial(NAME, repetition, model=model, strategy=strategy)
        for repetition in range(wanted.repetitions)
        for model in wanted.models
        for strategy in wanted.strategies
    ]


def draw(rows: pd.DataFrame) -> Figure:
    """Draw a bar for each strategy, the fastest first."""
    charts, here = [], []
    for settings, group in groups_of(rows, "model", "ranks", "backend"):
        title = f"{where(settings)}, {settings['backend']}"
        by_name = {name: select(group, strategy=name) for name in group["strategy"].unique()}
        order = sorted(by_name, key=lambda name: step_of(by_name[name]).value)
        charts.append(Bars(title=title, bars=tuple(bar_of(name, by_name[name]) for name in order)))
        here.append(f"{title}: {verdict(by_name, order)}.")
    return Figure(
        charts=tuple(charts),
        here=tuple(here),
        note=(
            "Steps as the account divides them; the line at the end of a bar is a 90 % interval. Of as many "
            "differences as there are here, one in ten or so looks like one by chance."
        ),
    )


def verdict(by_name: dict[str, pd.DataFrame], order: list[str]) -> str:
    """Say which strategy is the fastest, compared with the default and with the others.

    Args:
        by_name: Rows of each strategy.
        order: Names, the fastest first.
    """
    first, *others = order
    step = step_of(by_name[first])
    if not is_known(step):
        return f"{first} had the shortest steps, {format_ns(step.value)}, of too few repetitions to name the fastest"
    equal = [name for name in others if not is_told(change(by_name[first], by_name[name]))]
    text = f"{first} is the fastest with steps of {format_ns(step.value)} ({format_interval_ns(step)})"
    if equal:
        text += f", but {_listed(equal)} can't be told from it"
    if first != DEFAULT and DEFAULT in by_name and DEFAULT not in equal:
        text += f"; {said_change('it', change(by_name[DEFAULT], by_name[first]), f'the default, {DEFAULT}')}"
    return text


def against_default(rows: pd.DataFrame) -> list[tuple[str, str, Interval, Interval]]:
    """Compare every strategy on every model with the default, the fastest first.

    Returns:
        Tuples of the setting, the strategy, its step, and the difference as a share of the default's step, negative if
        it takes less.
    """
    found = []
    for settings, group in groups_of(rows, "model", "ranks", "backend"):
        default = select(group, strategy=DEFAULT)
        of_model = [
            (where(settings), str(name), step_of(own), change(default, own))
            for name, own in ((name, select(group, strategy=name)) for name in group["strategy"].unique())
        ]
        found += sorted(of_model, key=lambda each: each[2].value)
    return found


def _listed(names: list[str]) -> str:
    *most, last = names
    return f"{', '.join(most)} and {last}" if most else last


EXPERIMENT = Experiment(
    name=NAME,
    title="All strategies on one model and link",
    figure="",
    paper="",
    trials=trials,
    draw=draw,
)
