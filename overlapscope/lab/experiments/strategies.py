"""Experiments that compare strategies: overlap with none (Figure 6), and all strategies on one model and link."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import pandas as pd

from overlapscope.diagnosis.text import join_and
from overlapscope.interval import Interval
from overlapscope.lab.experiments.charts import StackedBarChart, has_interval
from overlapscope.lab.experiments.estimates import (
    estimate_change,
    estimate_mean,
    estimate_step,
    format_difference,
    format_share_ci,
    group_rows,
    is_significant,
    make_stacked_bar,
    select_by,
    select_rows,
)
from overlapscope.lab.experiments.experiment import Experiment
from overlapscope.text import format_interval_ns, format_ns

DEFAULT: Final = "overlapped"
_NOT_OVERLAPPED: Final = "bucketed"
_SETTING: Final = ("model", "ranks", "backend")


def _compare_overlap(rows: pd.DataFrame) -> Iterator[StackedBarChart | str]:
    """Draw two bars for each model: the same buckets reduced after backward, and during it."""
    for title, group in group_rows(rows, *_SETTING):
        without, overlapped = (select_rows(group, strategy=name) for name in (_NOT_OVERLAPPED, DEFAULT))
        bars = [
            make_stacked_bar(label, own)
            for label, own in (("not overlapped", without), ("overlapped", overlapped))
            if len(own)
        ]
        yield StackedBarChart(title=title, bars=tuple(bars))
        if len(without) and len(overlapped):
            backward_ns = without[["backward_ns", "exposed_ns", "bucket_copies_ns"]].sum(axis=1)
            share = estimate_mean((without["exposed_ns"] / backward_ns).tolist())
            yield (
                f"{title}: "
                f"{format_difference('a step with overlap', estimate_change(without, overlapped), 'one without')}; "
                f"without it, communication is {format_share_ci(share)} of the backward's time."
            )


def _compare_all(rows: pd.DataFrame) -> Iterator[StackedBarChart | str]:
    """Draw a bar for each strategy, the fastest first."""
    for title, group in group_rows(rows, *_SETTING):
        by_name = select_by(group, "strategy")
        order = sorted(by_name, key=lambda name: estimate_step(by_name[name]).value)
        yield StackedBarChart(title=title, bars=tuple(make_stacked_bar(name, by_name[name]) for name in order))
        yield f"{title}: {_format_conclusion(by_name, order)}."


def _format_conclusion(by_name: dict[str, pd.DataFrame], order: list[str]) -> str:
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
        text += f", but {join_and(equal)} can't be told from it"
    if first != DEFAULT and DEFAULT in by_name and DEFAULT not in equal:
        change = estimate_change(by_name[DEFAULT], by_name[first])
        text += f"; {format_difference('it', change, f'the default, {DEFAULT}')}"
    return text


def compare_with_default(rows: pd.DataFrame) -> list[tuple[str, str, Interval, Interval]]:
    """Compare every strategy on every model with the default, the fastest first.

    Returns:
        Tuples of the setting, the strategy, its step, and the difference as a share of the default's step, negative if
        it takes less.
    """
    found = []
    for setting, group in group_rows(rows, "model", "ranks"):
        default = select_rows(group, strategy=DEFAULT)
        of_model = [
            (setting, name, estimate_step(own), estimate_change(default, own))
            for name, own in select_by(group, "strategy").items()
        ]
        found += sorted(of_model, key=lambda each: each[2].value)
    return found


BREAKDOWN: Final = Experiment(
    name="breakdown",
    title="What a step consists of, with and without overlap",
    figure="Figure 6",
    paper=(
        "On 32 GPUs overlap made steps 38.0 % (ResNet-50) and 35.2 % (BERT) shorter with NCCL, and 26.8 and 21.5 % "
        "with gloo; communication was more than half of the backward's time."
    ),
    trials=lambda options: options.trials("breakdown", model=options.models, strategy=(_NOT_OVERLAPPED, DEFAULT)),
    content=_compare_overlap,
)
STRATEGIES: Final = Experiment(
    name="strategies",
    title="All strategies on one model and link",
    trials=lambda options: options.trials("strategies", model=options.models, strategy=options.strategies),
    content=_compare_all,
    note=(
        "Steps as the breakdown divides them; the line at the end of a bar is a 90 % interval. Of as many differences "
        "as there are here, one in ten or so looks like one by chance."
    ),
)
