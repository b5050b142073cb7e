"""Comparison of all strategies on one model and link: one of our own experiments."""

from __future__ import annotations

import pandas as pd

from overlapscope.interval import Interval
from overlapscope.lab.experiments.charts import FigureContent, StackedBarChart, has_interval
from overlapscope.lab.experiments.estimates import (
    describe_setting,
    estimate_change,
    estimate_step,
    format_difference,
    group_rows,
    is_significant,
    make_stacked_bar,
    select_rows,
)
from overlapscope.lab.experiments.experiment import Experiment, ExperimentOptions
from overlapscope.lab.experiments.trial import Trial
from overlapscope.text import format_interval_ns, format_ns

NAME = "strategies"
DEFAULT = "overlapped"


def trials(options: ExperimentOptions) -> list[Trial]:
    """Return trials of each strategy with its defaults."""
    return [
        options.trial(NAME, repetition, model=model, strategy=strategy)
        for repetition in range(options.repetitions)
        for model in options.models
        for strategy in options.strategies
    ]


def draw(rows: pd.DataFrame) -> FigureContent:
    """Draw a bar for each strategy, the fastest first."""
    charts, here = [], []
    for settings, group in group_rows(rows, "model", "ranks", "backend"):
        title = f"{describe_setting(settings)}, {settings['backend']}"
        by_name = {name: select_rows(group, strategy=name) for name in group["strategy"].unique()}
        order = sorted(by_name, key=lambda name: estimate_step(by_name[name]).value)
        charts.append(StackedBarChart(title=title, bars=tuple(make_stacked_bar(name, by_name[name]) for name in order)))
        here.append(f"{title}: {format_conclusion(by_name, order)}.")
    return FigureContent(
        charts=tuple(charts),
        here=tuple(here),
        note=(
            "Steps as the breakdown divides them; the line at the end of a bar is a 90 % interval. Of as many "
            "differences as there are here, one in ten or so looks like one by chance."
        ),
    )


def format_conclusion(by_name: dict[str, pd.DataFrame], order: list[str]) -> str:
    """Say which strategy is the fastest, compared with the default and with the others.

    Args:
        by_name: Rows of each strategy.
        order: Names, the fastest first.
    """
    first, *others = order
    step = estimate_step(by_name[first])
    if not has_interval(step):
        return f"{first} had the shortest steps, {format_ns(step.value)}, of too few repetitions to name the fastest"
    equal = [name for name in others if not is_significant(estimate_change(by_name[first], by_name[name]))]
    text = f"{first} is the fastest with steps of {format_ns(step.value)} ({format_interval_ns(step)})"
    if equal:
        text += f", but {_join_names(equal)} can't be told from it"
    if first != DEFAULT and DEFAULT in by_name and DEFAULT not in equal:
        text += (
            f"; {format_difference('it', estimate_change(by_name[DEFAULT], by_name[first]), f'the default, {DEFAULT}')}"
        )
    return text


def compare_with_default(rows: pd.DataFrame) -> list[tuple[str, str, Interval, Interval]]:
    """Compare every strategy on every model with the default, the fastest first.

    Returns:
        Tuples of the setting, the strategy, its step, and the difference as a share of the default's step, negative if
        it takes less.
    """
    found = []
    for settings, group in group_rows(rows, "model", "ranks", "backend"):
        default = select_rows(group, strategy=DEFAULT)
        of_model = [
            (describe_setting(settings), str(name), estimate_step(own), estimate_change(default, own))
            for name, own in ((name, select_rows(group, strategy=name)) for name in group["strategy"].unique())
        ]
        found += sorted(of_model, key=lambda each: each[2].value)
    return found


def _join_names(names: list[str]) -> str:
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
