"""Figure 11: effect on the loss of reducing only after every n passes."""

from __future__ import annotations

import math
from typing import Final

import numpy as np
import pandas as pd

from overlapscope.breakdown.spans import Float64Array
from overlapscope.lab.experiments.charts import FigureContent, LineChart, LineSeries
from overlapscope.lab.experiments.estimates import (
    describe_setting,
    estimate_mean,
    group_rows,
    is_significant,
    select_rows,
)
from overlapscope.lab.experiments.experiment import Experiment, ExperimentOptions
from overlapscope.lab.experiments.trial import Trial

# The paper's smoothing of loss curves: a third-order low-pass filter run forward and backward, like filtfilt.
#
# It is SciPy's ``butter(3, cutoff)`` and ``filtfilt`` (tests compare it with these), in a few lines, because nothing
# else here needs SciPy.

ORDER: Final = 3
_PADDING: Final = 3 * (ORDER + 1)


def smooth(series: Float64Array, cutoff: float) -> Float64Array:
    """Remove everything that changes faster than the cutoff, without a phase shift.

    Args:
        series: (S,) more than 12 values.
        cutoff: Cutoff as a share of the Nyquist frequency, between 0 and 1.
    """
    numerator, denominator = _butterworth(cutoff)
    # Both ends are extended point-symmetrically, so that the filter has settled where the series begins.
    before = 2 * series[0] - series[_PADDING:0:-1]
    after = 2 * series[-1] - series[-2 : -_PADDING - 2 : -1]
    forward = _apply_filter(np.concatenate([before, series, after]), numerator, denominator)
    backward = _apply_filter(forward[::-1], numerator, denominator)[::-1]
    return backward[_PADDING:-_PADDING]


def _butterworth(cutoff: float) -> tuple[Float64Array, Float64Array]:
    """Compute the coefficients of 1 / ((s + 1)(s² + s + 1)) by the bilinear transform; the denominator's first is 1."""
    warp = math.tan(math.pi * cutoff / 2)
    denominator = np.convolve([warp + 1, warp - 1], [warp**2 + warp + 1, 2 * warp**2 - 2, warp**2 - warp + 1])
    numerator = warp**3 * np.array([1.0, 3.0, 3.0, 1.0])
    return numerator / denominator[0], denominator / denominator[0]


def _apply_filter(series: Float64Array, numerator: Float64Array, denominator: Float64Array) -> Float64Array:
    """Apply the filter in transposed direct form, as if the first value had been constant before."""
    state = [float(series[0] * (numerator[index:] - denominator[index:]).sum()) for index in range(1, ORDER + 1)]
    result = np.empty_like(series, dtype=np.float64)
    for index, value in enumerate(series.tolist()):
        out = numerator[0] * value + state[0]
        state = [
            numerator[n] * value - denominator[n] * out + (state[n] if n < ORDER else 0.0) for n in range(1, ORDER + 1)
        ]
        result[index] = out
    return result


NAME = "convergence"
MODEL = "small-convnet"
SYNC_INTERVALS = (1, 2, 4, 8)
SETTINGS = ((8, 0.02), (256, 0.06))
"""Samples per rank and pass, and learning rate: those of the paper."""
PASSES_PER_STEP = 16
"""Factor by which a loss curve needs more passes than a timing needs steps."""
CUTOFF = 0.1
"""Cutoff of the low-pass filter, as a share of the Nyquist frequency; the paper does not state it."""
_FINAL_SHARE = 0.1
"""Share of the passes, at the end, whose losses are compared."""


def trials(options: ExperimentOptions) -> list[Trial]:
    """Return trials with the same number of passes each, of a small network that learns digits."""
    passes = options.steps * PASSES_PER_STEP
    return [
        options.trial(
            NAME,
            repetition,
            model=MODEL,
            sync_every=every,
            steps=passes // every,
            batch=batch,
            learning_rate=learning_rate,
        )
        for repetition in range(options.repetitions)
        for batch, learning_rate in SETTINGS
        for every in SYNC_INTERVALS
    ]


def draw(rows: pd.DataFrame) -> FigureContent:
    """Draw the mean loss of all repetitions, smoothed, with the unsmoothed one behind it."""
    rows = rows.assign(end_loss=[_final_loss(np.asarray(losses)) for losses in rows["losses"]])
    charts, here = [], []
    for settings, group in group_rows(rows, "model", "ranks", "batch", "learning_rate"):
        title = (
            f"{describe_setting(settings)}, batch {settings['batch']:g}, learning rate {settings['learning_rate']:g}"
        )
        by_every = {int(every): select_rows(group, sync_every=every) for every in sorted(group["sync_every"].unique())}
        lines = tuple(_line(every, own, color_index) for color_index, (every, own) in enumerate(by_every.items()))
        charts.append(LineChart(title=title, x_label="pass", y_label="loss", lines=lines, y_unit="loss"))
        if 1 in by_every:
            here.append(f"{title}: {_format_conclusion(by_every)}.")
    return FigureContent(
        charts=tuple(charts),
        here=tuple(here),
        note=(
            "The loss of each pass, as the mean of ranks and repetitions, smoothed by a third-order low-pass that runs "
            "both ways. Gradients of the n passes are summed, as no_sync() does, and then there is one update. "
            "Sentences compare the mean of the last tenth."
        ),
    )


def _format_conclusion(by_every: dict[int, pd.DataFrame]) -> str:
    """Compare the losses at the end; as a difference, because a share of a loss near zero is meaningless."""
    each = by_every[1].set_index("repetition")["end_loss"]
    said = [f"training ends with a loss of {each.mean():.3g}"]
    for every, rows in by_every.items():
        if every > 1:
            own = rows.set_index("repetition")["end_loss"]
            difference = estimate_mean((own - each).dropna().tolist())
            text = f"reducing every {every}, with {own.mean():.3g}"
            if is_significant(difference):
                low, high = sorted((abs(difference.low), abs(difference.high)))
                text += f", {low:.2g} to {high:.2g} {'lower' if difference.value < 0 else 'higher'}"
            else:
                text += ", which can't be told from it"
            said.append(text)
    return "; ".join(said)


def _line(every: int, rows: pd.DataFrame, color: int) -> LineSeries:
    losses = np.mean(np.stack(rows["losses"].tolist()), axis=0)
    return LineSeries(
        label=f"every {every}" if every > 1 else "each pass",
        x=tuple(range(len(losses))),
        y=tuple(smooth(losses, CUTOFF).tolist()),
        style="smooth",
        color=color,
        unsmoothed_y=tuple(losses.tolist()),
    )


def _final_loss(losses: Float64Array) -> float:
    return float(losses[-max(1, int(_FINAL_SHARE * len(losses))) :].mean())


EXPERIMENT = Experiment(
    name=NAME,
    title="What reducing only after every n passes does to the loss",
    figure="Figure 11",
    paper=(
        "With a batch of 8 and a learning rate of 0.02 it made hardly a difference; with 256 and 0.06 training ended "
        "with a higher loss."
    ),
    trials=trials,
    draw=draw,
)
