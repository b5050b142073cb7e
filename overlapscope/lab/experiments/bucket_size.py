"""Figures 7 and 8: step time by bucket size."""

from __future__ import annotations

import pandas as pd

from overlapscope.lab.experiments.charts import BoxPlotChart, FigureContent, compute_box
from overlapscope.lab.experiments.estimates import (
    describe_setting,
    estimate_change,
    estimate_step,
    format_difference,
    group_rows,
    is_significant,
    select_rows,
)
from overlapscope.lab.experiments.experiment import Experiment, ExperimentOptions
from overlapscope.lab.experiments.trial import Trial
from overlapscope.text import format_ns

NAME = "bucket-size"
SIZES_MB = (0.0, 1.0, 5.0, 10.0, 25.0, 50.0)


def trials(options: ExperimentOptions) -> list[Trial]:
    """Return trials of each size with each model, with half of the ranks and with all."""
    return [
        options.trial(NAME, repetition, model=model, ranks=ranks, bucket_cap_mb=size)
        for repetition in range(options.repetitions)
        for model in options.models
        for ranks in options.rank_counts
        for size in SIZES_MB
    ]


def draw(rows: pd.DataFrame) -> FigureContent:
    """Draw a box of all counted steps for each size."""
    charts, here = [], []
    for settings, group in group_rows(rows, "model", "ranks", "backend"):
        title = f"{describe_setting(settings)}, {settings['backend']}"
        by_size = {size: select_rows(group, bucket_cap_mb=size) for size in sorted(group["bucket_cap_mb"].unique())}
        boxes = tuple(compute_box(f"{size:g}", own["steps_ns"].explode().tolist()) for size, own in by_size.items())
        charts.append(
            BoxPlotChart(title=title, x_label="bucket size in MB; 0 is a bucket for each parameter", boxes=boxes)
        )
        here.append(f"{title}: {_format_conclusion(by_size)}.")
    return FigureContent(
        charts=tuple(charts),
        here=tuple(here),
        note="Boxes are quartiles of all steps, whiskers what nine of ten lie in; sentences compare repetitions.",
    )


def _format_conclusion(by_size: dict[float, pd.DataFrame]) -> str:
    best = min(by_size, key=lambda size: estimate_step(by_size[size]).value)
    others = [size for size in by_size if size != best]
    equal = [size for size in others if not is_significant(estimate_change(by_size[best], by_size[size]))]
    text = f"{best:g} MB is the fastest with steps of {format_ns(estimate_step(by_size[best]).value)}"
    if equal:
        text += f", but {_join_sizes(equal)} MB can't be told from it"
    elif others:
        text += ", and no other size comes near it"
    if 0.0 in by_size and best != 0.0:
        change = estimate_change(by_size[best], by_size[0.0])
        text += f"; {format_difference('a bucket for each parameter', change, f'{best:g} MB')}"
    return text


def _join_sizes(sizes: list[float]) -> str:
    *most, last = [f"{size:g}" for size in sizes]
    return f"{', '.join(most)} and {last}" if most else last


EXPERIMENT = Experiment(
    name=NAME,
    title="The step time by bucket size",
    figure="Figures 7 and 8",
    paper=(
        "On 16 GPUs ResNet-50 was fastest with 10 to 25 MB and BERT with 50 MB over NCCL, and both with 5 MB over "
        "gloo. On 32 a bucket for each parameter was clearly worse than on 16, and from 5 MB up nothing was."
    ),
    trials=trials,
    draw=draw,
)
