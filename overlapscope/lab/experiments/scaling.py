"""Figure 9: step time by number of ranks; beyond the available ranks, as predicted by the cost model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

import numpy as np
import pandas as pd

from overlapscope.advice.advice import predict_step_times
from overlapscope.analysis import Analysis
from overlapscope.errors import OverlapScopeError
from overlapscope.lab.experiments.charts import LineChart, LineSeries, make_line_series
from overlapscope.lab.experiments.estimates import (
    estimate_change,
    estimate_step,
    format_difference,
    group_rows,
    select_by,
)
from overlapscope.lab.experiments.experiment import Experiment, ExperimentOptions
from overlapscope.lab.experiments.trial import ExperimentTrial
from overlapscope.text import count_of, format_ns

PREDICTED_RANKS: Final = (2, 3, 4, 6, 8, 16, 32, 64, 128, 256)
"""Numbers of ranks for which steps are predicted, from each recording."""
_MAX_CONSECUTIVE_RANKS: Final = 4


def _trials(options: ExperimentOptions) -> list[ExperimentTrial]:
    """Return trials from one rank, which does not communicate, up to all; beyond 4 the number doubles."""
    counts = {
        ranks for ranks in range(1, options.ranks + 1) if ranks <= _MAX_CONSECUTIVE_RANKS or ranks & (ranks - 1) == 0
    }
    return options.trials("scaling", model=options.models, ranks=sorted(counts | {options.ranks}))


def _observe_predictions(analysis: Analysis) -> Mapping[str, Any]:
    """Predict steps with other numbers of ranks, by the model fitted to this recording alone.

    Returns:
        predicted_ns: One value for each of ``PREDICTED_RANKS``; empty where nothing can be predicted, as from one rank.
    """
    try:
        return {"predicted_ns": predict_step_times(analysis, PREDICTED_RANKS)}
    except OverlapScopeError:
        return {"predicted_ns": []}


def _draw_steps(rows: pd.DataFrame) -> Iterator[LineChart | str]:
    """Draw measured steps, and beyond the last of them the predictions from the recordings of all ranks."""
    for title, group in group_rows(rows, "model", "backend"):
        by_ranks = select_by(group, "ranks")
        steps = {ranks: estimate_step(own) for ranks, own in by_ranks.items()}
        least, most = min(steps), max(steps)
        lines = [make_line_series("measured", list(steps), list(steps.values()))]
        beyond = {ranks: ns for ranks, ns in _mean_predictions(by_ranks[most]).items() if ranks >= most}
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
        yield LineChart(title=title, x_label="ranks", y_label="step", lines=tuple(lines), is_log=True)
        if least < most:
            change = estimate_change(by_ranks[least], by_ranks[most])
            than = f"one of {count_of(least, 'rank')}"
            yield f"{title}: {format_difference(f'a step of {most} ranks', change, than)}."
        yield from (f"{title}: {each}" for each in _format_model_errors(by_ranks))
        if beyond and (farthest := max(beyond)) > most:
            ratio = beyond[farthest] / steps[most].value
            yield (
                f"{title}: for {farthest} ranks on links like these the model predicts {format_ns(beyond[farthest])}, "
                f"{ratio:.2f} times the step of {most}; nobody has measured that."
            )


def _mean_predictions(rows: pd.DataFrame) -> dict[int, float]:
    """Compute the mean prediction over repetitions, in nanoseconds, by number of ranks."""
    known = [values for values in rows["predicted_ns"] if len(values)]
    return dict(zip(PREDICTED_RANKS, np.mean(known, axis=0).tolist(), strict=True)) if known else {}


def _format_model_errors(by_ranks: dict[int, pd.DataFrame]) -> list[str]:
    """Compare the model with the measurements where there are any."""
    found = []
    for source, rows in by_ranks.items():
        predicted = _mean_predictions(rows)
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


SCALING: Final = Experiment(
    name="scaling",
    title="The step time by the number of ranks",
    figure="Figure 9",
    paper=(
        "From 1 to 256 GPUs ResNet-50's step took about twice as long with NCCL; with gloo it took about 3 times as "
        "long, and BERT's about 6 times."
    ),
    trials=_trials,
    content=_draw_steps,
    note=(
        "Each rank has the same batch, however many there are. Ranks on one machine share its cores, which makes "
        "compute slower with each. The model assumes links like those that were measured."
    ),
    observe=_observe_predictions,
)
