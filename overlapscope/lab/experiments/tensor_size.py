"""Figure 2: all-reduce time by tensor size, and when gradients are ready."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd

from overlapscope.analysis import Analysis
from overlapscope.lab.experiments.charts import FigureContent, LineChart, LineSeries, make_line_series
from overlapscope.lab.experiments.estimates import describe_setting, estimate_step, group_rows, select_rows
from overlapscope.lab.experiments.experiment import Experiment, ExperimentOptions
from overlapscope.lab.experiments.trial import Trial
from overlapscope.text import format_count, format_ns

NAME = "tensor-size"
TOTAL_ELEMENTS = 60_000_000
TENSOR_ELEMENTS = (10_000, 30_000, 100_000, 300_000, 1_000_000, 3_000_000, 10_000_000, 20_000_000)
_SATURATION_FACTOR = 1.1
"""Factor over the shortest time within which an operation is large enough."""


def trials(options: ExperimentOptions) -> list[Trial]:
    """Return all-reduces of the same gradients in each size, and a training of each model with parameter detail."""
    all_reduces = [
        options.trial(NAME, repetition, steps=0, total_elements=TOTAL_ELEMENTS, tensor_elements=elements)
        for repetition in range(options.repetitions)
        for elements in TENSOR_ELEMENTS
    ]
    trainings = [options.trial(NAME, 0, model=model, detail="parameters") for model in options.models]
    return [*all_reduces, *trainings]


def observe(analysis: Analysis) -> Mapping[str, Any]:
    """Compute when gradients are ready on rank 0: the median over counted steps, from the start of backward.

    Returns:
        ready_ns, and ready_elements: the number of elements that are ready then. Both are sorted by time.
    """
    trace, steps = analysis.trace, analysis.summary.steady.steps
    gradients = trace.gradients[(trace.gradients["rank"] == 0) & trace.gradients["step"].isin(steps)]
    backward = trace.phases[(trace.phases["rank"] == 0) & (trace.phases["phase"] == "backward")]
    since = gradients["step"].map(backward.groupby("step")["start_ns"].min())
    ready_ns = (gradients["ready_ns"] - since).groupby(gradients["parameter"]).median().sort_values()
    sizes = trace.plans.drop_duplicates("parameter").set_index("parameter")["elements"]
    elements = sizes.reindex(ready_ns.index).cumsum()
    return {"ready_ns": ready_ns.astype(float).tolist(), "ready_elements": elements.astype(int).tolist()}


def draw(rows: pd.DataFrame) -> FigureContent:
    """Draw a line for each number of ranks, and one of the gradients of each model."""
    alone, trained = rows[rows["model"] == ""], rows[rows["model"] != ""]
    charts: list[LineChart] = []
    here = []
    for settings, group in group_rows(alone, "ranks", "backend", "total_elements"):
        steps = {
            int(size): estimate_step(select_rows(group, tensor_elements=size))
            for size in sorted(group["tensor_elements"].unique())
        }
        total = format_count(int(settings["total_elements"]))
        title = f"{settings['ranks']} ranks, {settings['backend']}, {total} float32 values in all"
        charts.append(
            LineChart(
                title=title,
                x_label="values in an all-reduce",
                y_label="time of all of them",
                lines=(make_line_series("", list(steps), list(steps.values())),),
                is_log=True,
            )
        )
        shortest_ns = min(step.value for step in steps.values())
        enough = min(size for size, step in steps.items() if step.value <= _SATURATION_FACTOR * shortest_ns)
        least, first_ns = min(steps), steps[min(steps)].value
        here.append(
            f"{title}: from {format_count(enough)} values an operation on, larger ones gain at most "
            f"{100 * (_SATURATION_FACTOR - 1):.0f} %; with {format_count(least)} it takes "
            f"{first_ns / shortest_ns:.1f} times as long as at best "
            f"({format_ns(first_ns)} and {format_ns(shortest_ns)})."
        )
    for settings, group in group_rows(trained, "model", "ranks"):
        row = group.iloc[-1]
        ready_ns, elements = np.asarray(row["ready_ns"]), np.asarray(row["ready_elements"])
        line = LineSeries(
            label="", x=tuple(ready_ns.tolist()), y=tuple(elements.astype(float).tolist()), style="smooth"
        )
        charts.append(
            LineChart(
                title=f"{describe_setting(settings)}: gradients that are ready",
                x_label="since the backward began",
                y_label="values",
                lines=(line,),
                x_unit="ns",
                y_unit="count",
            )
        )
        half = int(np.searchsorted(elements, elements[-1] / 2))
        here.append(
            f"{describe_setting(settings)}: half of its {format_count(int(elements[-1]))} gradients are ready after "
            f"{format_ns(ready_ns[half])}, and all after {format_ns(ready_ns[-1])}."
        )
    return FigureContent(
        charts=tuple(charts),
        here=tuple(here),
        note="Bars are 90 % intervals. Gradients: the median over steps on rank 0, timed by a hook for each parameter.",
    )


EXPERIMENT = Experiment(
    name=NAME,
    title="All-reduce time by tensor size, and when gradients are ready",
    figure="Figure 2",
    paper=(
        "60 million parameters took the less time, the larger the operations: gloo was at its best near 500 thousand "
        "parameters (2 MB) in each, NCCL not yet at 20 million. ResNet-152's gradients came over about 250 ms on a "
        "GPU. (Where it talks about bucket sizes the paper recalls the former as 512 KB.)"
    ),
    trials=trials,
    draw=draw,
    observe=observe,
)
