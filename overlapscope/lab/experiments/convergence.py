"""Figure 11: what reducing only after every n passes does to the loss."""

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
"""Samples a rank and pass, and learning rate: those of the paper."""
PASSES_A_STEP = 16
"""A loss curve takes so many times as many passes as a time does steps."""
CUTOFF = 0.1
"""Of the low-pass, as a share of half a cycle a pass; the paper does not say its own."""
_AT_THE_END = 0.1
"""Share of the passes whose losses are compared."""


def trials(wanted: Wanted) -> list[Trial]:
    """As many passes with each, of a small network that learns digits."""
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
    """The mean loss of all repetitions, smoothed, and unsmoothed behind it."""
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
    """The loss at the end; as a difference, because a share of next to nothing would say nothing."""
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
