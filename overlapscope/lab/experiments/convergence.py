"""Figure 11: effect on the loss of reducing only after every n passes."""

from __future__ import annotations

import numpy as np
import pandas as pd

from overlapscope.account.intervals import Float64Array
from overlapscope.lab.experiments.charts import Figure, Line, Lines
from overlapscope.lab.experiments.estimates import estimate, groups_of, is_told, select, where
from overlapscope.lab.experiments.experiment import Experiment, Wanted
from overlapscope.lab.experiments.smoothing import smoothed
from overlapscope.lab.trials.trial import Trial

NAME = "convergence"
MODEL = "small-convnet"
EVERY = (1, 2, 4, 8)
SETTINGS = ((8, 0.02), (256, 0.06))
"""Samples per rank and pass, and learning rate: those of the paper."""
PASSES_A_STEP = 16
"""Factor by which a loss curve needs more passes than a timing needs steps."""
CUTOFF = 0.1
"""Cutoff of the low-pass filter, as a share of the Nyquist frequency; the paper does not state it."""
_AT_THE_END = 0.1
"""Share of the passes, at the end, whose losses are compared."""


def trials(wanted: Wanted) -> list[Trial]:
    """Return trials with the same number of passes each, of a small network that learns digits."""
    passes = wanted.steps * PASSES_A_STEP
    return [
        wanted.trial(
            NAME,
            repetition,
            model=MODEL,
            sync_every=every,
            steps=passes // every,
            batch=batch,
            learning_rate=learning_rate,
        )
        for repetition in range(wanted.repetitions)
        for batch, learning_rate in SETTINGS
        for every in EVERY
    ]


def draw(rows: pd.DataFrame) -> Figure:
    """Draw the mean loss of all repetitions, smoothed, with the unsmoothed one behind it."""
    rows = rows.assign(end_loss=[_end_of(np.asarray(losses)) for losses in rows["losses"]])
    charts, here = [], []
    for settings, group in groups_of(rows, "model", "ranks", "batch", "learning_rate"):
        title = f"{where(settings)}, batch {settings['batch']:g}, learning rate {settings['learning_rate']:g}"
        by_every = {int(every): select(group, sync_every=every) for every in sorted(group["sync_every"].unique())}
        lines = tuple(_line(every, own, place) for place, (every, own) in enumerate(by_every.items()))
        charts.append(Lines(title=title, x_label="pass", y_label="loss", lines=lines, y_unit="loss"))
        if 1 in by_every:
            here.append(f"{title}: {_verdict(by_every)}.")
    return Figure(
        charts=tuple(charts),
        here=tuple(here),
        note=(
            "The loss of each pass, as the mean of ranks and repetitions, smoothed by a third-order low-pass that runs "
            "both ways. Gradients of the n passes are summed, as no_sync() does, and then there is one update. "
            "Sentences compare the mean of the last tenth."
        ),
    )


def _verdict(by_every: dict[int, pd.DataFrame]) -> str:
    """Compare the losses at the end; as a difference, because a share of a loss near zero is meaningless."""
    each = by_every[1].set_index("repetition")["end_loss"]
    said = [f"training ends with a loss of {each.mean():.3g}"]
    for every, rows in by_every.items():
        if every > 1:
            own = rows.set_index("repetition")["end_loss"]
            difference = estimate((own - each).dropna().tolist())
            text = f"reducing every {every}, with {own.mean():.3g}"
            if is_told(difference):
                low, high = sorted((abs(difference.low), abs(difference.high)))
                text += f", {low:.2g} to {high:.2g} {'lower' if difference.value < 0 else 'higher'}"
            else:
                text += ", which can't be told from it"
            said.append(text)
    return "; ".join(said)


def _line(every: int, rows: pd.DataFrame, colour: int) -> Line:
    losses = np.mean(np.stack(rows["losses"].tolist()), axis=0)
    return Line(
        label=f"every {every}" if every > 1 else "each pass",
        x=tuple(range(len(losses))),
        y=tuple(smoothed(losses, CUTOFF).tolist()),
        style="smooth",
        colour=colour,
        faint_y=tuple(losses.tolist()),
    )


def _end_of(losses: Float64Array) -> float:
    return float(losses[-max(1, int(_AT_THE_END * len(losses))) :].mean())


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
