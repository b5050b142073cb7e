"""Figure 9: step time by number of ranks; beyond the available ranks, as predicted by the cost model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd

from overlapscope.advice.other_ranks import predict_step_times
from overlapscope.analysis import Analysis
from overlapscope.errors import OverlapScopeError
from overlapscope.lab.experiments.charts import FigureContent, LineChart, LineSeries, make_line_series
from overlapscope.lab.experiments.estimates import (
    estimate_change,
    estimate_step,
    format_difference,
    group_rows,
    select_rows,
)
from overlapscope.lab.experiments.experiment import Experiment, ExperimentOptions
from overlapscope.lab.experiments.trial import Trial
from overlapscope.text import count_of, format_ns

NAME = "scaling"
PREDICTED_RANKS = (2, 3, 4, 6, 8, 16, 32, 64, 128, 256)
"""Numbers of ranks for which steps are predicted, from each recording."""
_MAX_CONSECUTIVE_RANKS = 4


def trials(options: ExperimentOptions) -> list[Trial]:
    """Return trials from one rank, which does not communicate, up to all; beyond 4 the number doubles."""
    counts = {
        ranks for ranks in range(1, options.ranks + 1) if ranks <= _MAX_CONSECUTIVE_RANKS or ranks & (ranks - 1) == 0
    }
    return [
        options.trial(NAME, repetition, model=model, ranks=ranks)
        for repetition in range(options.repetitions)
        for model in options.models
        for ranks in sorted(counts | {options.ranks})
    ]


def observe(analysis: Analysis) -> Mapping[str, Any]:
    """Predict steps with other numbers of ranks, by the model fitted to this recording alone.

    Returns:
        predicted_ns: One value for each of ``PREDICTED_RANKS``; empty where nothing can be predicted, as from one rank.
    """
    try:
        return {"predicted_ns": predict_step_times(analysis, PREDICTED_RANKS)}
    except OverlapScopeError:
        return {"predicted_ns": []}


def draw(rows: pd.DataFrame) -> FigureContent:
    """Draw measured steps, and beyond the last of them the predictions from the recordings of all ranks."""
    charts, here = [], []
    for settings, group in group_rows(rows, "model", "backend"):
        title = f"{settings['model']}, {settings['backend']}"
        by_ranks = {int(ranks): select_rows(group, ranks=ranks) for ranks in sorted(group["ranks"].unique())}
        steps = {ranks: estimate_step(own) for ranks, own in by_ranks.items()}
        most = max(steps)
        lines = [make_line_series("measured", list(steps), list(steps.values()))]
        predicted = mean_predictions(by_ranks[most])
        beyond = {ranks: ns for ranks, ns in predicted.items() if ranks >= most}
        if len(beyond) > 1:
            lines.append(
                LineSeries(
                    label=f"predicted from {most} ranks",
                    x=tuple(map(float, beyond)),
                    y=tuple(beyond.values()),
                    style="predicted",
                    color=1,
                )
            )
        charts.append(LineChart(title=title, x_label="ranks", y_label="step", lines=tuple(lines), is_log=True))
        least = min(steps)
        if least < most:
            said = format_difference(
                f"a step of {most} ranks",
                estimate_change(by_ranks[least], by_ranks[most]),
                f"one of {count_of(least, 'rank')}",
            )
            here.append(f"{title}: {said}.")
        here += [f"{title}: {each}" for each in _format_model_errors(by_ranks)]
        if beyond and (farthest := max(beyond)) > most:
            ratio = beyond[farthest] / steps[most].value
            here.append(
                f"{title}: for {farthest} ranks on links like these the model predicts {format_ns(beyond[farthest])}, "
                f"{ratio:.2f} times the step of {most}; nobody has measured that."
            )
    return FigureContent(
        charts=tuple(charts),
        here=tuple(here),
        note=(
            "Each rank has the same batch, however many there are. Ranks on one machine share its cores, which makes "
            "compute slower with each. The model assumes links like those that were measured."
        ),
    )


def mean_predictions(rows: pd.DataFrame) -> dict[int, float]:
    """Compute the mean prediction over repetitions, in nanoseconds, by number of ranks."""
    known = [values for values in rows["predicted_ns"] if len(values)]
    return dict(zip(PREDICTED_RANKS, np.mean(known, axis=0).tolist(), strict=True)) if known else {}


def _format_model_errors(by_ranks: dict[int, pd.DataFrame]) -> list[str]:
    """Compare the model with the measurements where there are any."""
    found = []
    for source, rows in by_ranks.items():
        predicted = mean_predictions(rows)
        off = {
            ranks: predicted[ranks] / estimate_step(own).value - 1
            for ranks, own in by_ranks.items()
            if ranks in predicted and ranks != source
        }
        if off:
            said = ", ".join(
                f"{ranks} ranks by {100 * share:+.0f} %".replace("-", "\N{MINUS SIGN}") for ranks, share in off.items()
            )
            found.append(f"predicted from {source} ranks, the model is off for {said}.")
    return found


EXPERIMENT = Experiment(
    name=NAME,
    title="The step time by the number of ranks",
    figure="Figure 9",
    paper=(
        "From 1 to 256 GPUs ResNet-50's step took about twice as long with NCCL; with gloo it took about 3 times as "
        "long, and BERT's about 6 times."
    ),
    trials=trials,
    draw=draw,
    observe=observe,
)
