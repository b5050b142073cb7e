"""Experiments on reducing gradients only after every n passes: what it gains (Figure 10), and its loss (Figure 11)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Final

import numpy as np
import pandas as pd

from overlapscope.breakdown.spans import Float64Array
from overlapscope.lab.experiments.charts import LineChart, LineSeries, make_line_series
from overlapscope.lab.experiments.estimates import (
    estimate_change,
    estimate_mean,
    format_difference,
    group_rows,
    is_significant,
    select_by,
)
from overlapscope.lab.experiments.experiment import Experiment, ExperimentOptions
from overlapscope.lab.experiments.trial import ExperimentTrial

_SYNC_INTERVALS: Final = (1, 2, 4, 8)

# The time of a pass.

_MIN_STEPS: Final = 10


def _skip_sync_trials(options: ExperimentOptions) -> list[ExperimentTrial]:
    """Return trials with about as many passes each."""
    trials = options.trials("skip-sync", model=options.models, ranks=options.rank_counts, sync_every=_SYNC_INTERVALS)
    return [replace(trial, steps=max(_MIN_STEPS, options.steps // trial.sync_every)) for trial in trials]


def _draw_passes(rows: pd.DataFrame) -> Iterator[LineChart | str]:
    """Draw the time of one pass, with a line for each number of ranks."""
    rows = rows.assign(pass_ns=rows["step_ns"] / rows["sync_every"])
    for title, of_model in group_rows(rows, "model", "backend"):
        lines = []
        for color, (ranks, group) in enumerate(group_rows(of_model, "ranks")):
            by_every = select_by(group, "sync_every")
            passes = [estimate_mean(own["pass_ns"].tolist()) for own in by_every.values()]
            lines.append(make_line_series(ranks, list(by_every), passes, color=color))
        yield LineChart(
            title=title,
            x_label="forward and backward passes to a reduction",
            y_label="time of a pass",
            lines=tuple(lines),
            is_log=True,
        )
    for title, group in group_rows(rows, "model", "ranks", "backend"):
        by_every = select_by(group, "sync_every")
        most = max(by_every)
        if 1 in by_every and most > 1:
            change = estimate_change(by_every[1], by_every[most], "pass_ns")
            what = f"a pass with a reduction every {most}"
            yield f"{title}: {format_difference(what, change, 'one with a reduction each time')}."


SKIP_SYNC: Final = Experiment(
    name="skip-sync",
    title="Reducing gradients only after every n passes",
    figure="Figure 10",
    paper=(
        "Reducing every 8 passes made ResNet-50's 38 % shorter with NCCL and 57 % with gloo, on 256 GPUs; with NCCL "
        "times jumped from 128 to 256 GPUs."
    ),
    trials=_skip_sync_trials,
    content=_draw_passes,
    note="A step is n passes under no_sync() but for the last, and one update; bars are 90 % intervals.",
)


# The loss.

_MODEL: Final = "small-convnet"
_BATCHES: Final = ((8, 0.02), (256, 0.06))
"""Samples per rank and pass, and learning rate: those of the paper."""
_PASSES_PER_STEP: Final = 16
"""Factor by which a loss curve needs more passes than a timing needs steps."""
_CUTOFF: Final = 0.1
"""Cutoff of the low-pass filter, as a share of the Nyquist frequency; the paper does not state it."""
_FINAL_SHARE: Final = 0.1
"""Share of the passes, at the end, whose losses are compared."""


def smooth(series: Float64Array, cutoff: float) -> Float64Array:
    """Remove everything that changes faster than the cutoff, without a phase shift.

    The paper's smoothing of loss curves: a third-order low-pass filter run forward and backward.

    Args:
        series: (S,) more than 12 values.
        cutoff: Cutoff as a share of the Nyquist frequency, between 0 and 1.
    """
    from scipy import signal  # slow to import, and only the figures of this experiment need it

    smoothed: Float64Array = signal.filtfilt(*signal.butter(3, cutoff), series)
    return smoothed


def _convergence_trials(options: ExperimentOptions) -> list[ExperimentTrial]:
    """Return trials with the same number of passes each, of a small network that learns digits."""
    passes = options.steps * _PASSES_PER_STEP
    return [
        replace(trial, steps=passes // trial.sync_every, batch=batch, learning_rate=learning_rate)
        for batch, learning_rate in _BATCHES
        for trial in options.trials("convergence", model=(_MODEL,), sync_every=_SYNC_INTERVALS)
    ]


def _draw_losses(rows: pd.DataFrame) -> Iterator[LineChart | str]:
    """Draw the mean loss of all repetitions, smoothed, with the unsmoothed one behind it."""
    for title, group in group_rows(rows, "model", "ranks", "batch", "learning_rate"):
        by_every = select_by(group, "sync_every")
        lines = tuple(_draw_line(every, own, color) for color, (every, own) in enumerate(by_every.items()))
        yield LineChart(title=title, x_label="pass", y_label="loss", lines=lines, y_unit="loss")
        if 1 in by_every:
            yield f"{title}: {_format_conclusion(by_every)}."


def _draw_line(every: int, rows: pd.DataFrame, color: int) -> LineSeries:
    losses = np.mean(np.stack(rows["losses"].tolist()), axis=0)
    return LineSeries(
        label=f"every {every}" if every > 1 else "each pass",
        x=tuple(range(len(losses))),
        y=tuple(smooth(losses, _CUTOFF).tolist()),
        style="smooth",
        color=color,
        unsmoothed_y=tuple(losses.tolist()),
    )


def _format_conclusion(by_every: dict[int, pd.DataFrame]) -> str:
    """Compare the losses at the end; as a difference, because a share of a loss near zero is meaningless."""
    each = _final_losses(by_every[1])
    said = [f"training ends with a loss of {each.mean():.3g}"]
    for every, rows in by_every.items():
        if every > 1:
            own = _final_losses(rows)
            difference = estimate_mean((own - each).dropna().tolist())
            text = f"reducing every {every}, with {own.mean():.3g}"
            if is_significant(difference):
                low, high = sorted((abs(difference.low), abs(difference.high)))
                text += f", {low:.2g} to {high:.2g} {'lower' if difference.value < 0 else 'higher'}"
            else:
                text += ", which can't be told from it"
            said.append(text)
    return "; ".join(said)


def _final_losses(rows: pd.DataFrame) -> pd.Series[float]:
    """Compute the mean loss at the end of each repetition."""
    return rows.set_index("repetition")["losses"].map(
        lambda losses: float(np.mean(losses[-max(1, int(_FINAL_SHARE * len(losses))) :]))
    )


CONVERGENCE: Final = Experiment(
    name="convergence",
    title="What reducing only after every n passes does to the loss",
    figure="Figure 11",
    paper=(
        "With a batch of 8 and a learning rate of 0.02 it made hardly a difference; with 256 and 0.06 training ended "
        "with a higher loss."
    ),
    trials=_convergence_trials,
    content=_draw_losses,
    note=(
        "The loss of each pass, as the mean of ranks and repetitions, smoothed by a third-order low-pass that runs "
        "both ways. Gradients of the n passes are summed, as no_sync() does, and then there is one update. "
        "Sentences compare the mean of the last tenth."
    ),
)
