"""Experiments on the size of what is reduced: tensors (Figure 2), buckets (7, 8), and buckets of groups (12)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

import numpy as np
import pandas as pd

from overlapscope.analysis import Analysis
from overlapscope.diagnosis.text import join_and
from overlapscope.lab.experiments.charts import (
    BoxPlotChart,
    LineChart,
    LineSeries,
    compute_box,
    make_line_series,
)
from overlapscope.lab.experiments.estimates import (
    estimate_change,
    estimate_step,
    format_difference,
    group_rows,
    is_significant,
    select_by,
)
from overlapscope.lab.experiments.experiment import Experiment, ExperimentOptions
from overlapscope.lab.experiments.trial import ExperimentTrial
from overlapscope.text import format_count, format_ns

_TOTAL_ELEMENTS: Final = 60_000_000
_TENSOR_ELEMENTS: Final = (10_000, 30_000, 100_000, 300_000, 1_000_000, 3_000_000, 10_000_000, 20_000_000)
_SATURATION_FACTOR: Final = 1.1
"""Factor over the shortest time within which an operation is large enough."""
_SIZES_MB: Final = (0.0, 1.0, 5.0, 10.0, 25.0, 50.0)
_GROUPS: Final = (1, 3, 5)
_SIZE_OF_GROUPS_MB: Final = 5.0
"""Bucket size with several groups: of 25 MB, the default, the models of this lab have too few buckets to alternate."""


# All-reduce time by tensor size, and when gradients are ready.


def _tensor_size_trials(options: ExperimentOptions) -> list[ExperimentTrial]:
    """Return all-reduces of the same gradients in each size, and a training of each model with parameter detail."""
    all_reduces = options.trials(
        "tensor-size", steps=(0,), total_elements=(_TOTAL_ELEMENTS,), tensor_elements=_TENSOR_ELEMENTS
    )
    trainings = options.trials("tensor-size", model=options.models, detail=("parameters",))
    return [*all_reduces, *(trial for trial in trainings if trial.repetition == 0)]


def _observe_ready_gradients(analysis: Analysis) -> Mapping[str, Any]:
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


def _draw_tensor_sizes(rows: pd.DataFrame) -> Iterator[LineChart | str]:
    """Draw a line for each number of ranks, and one of the gradients of each model."""
    for title, group in group_rows(rows[rows["model"] == ""], "ranks", "backend", "total_elements"):
        steps = {size: estimate_step(own) for size, own in select_by(group, "tensor_elements").items()}
        yield LineChart(
            title=title,
            x_label="values in an all-reduce",
            y_label="time of all of them",
            lines=(make_line_series("", list(steps), list(steps.values())),),
            is_log=True,
        )
        shortest_ns = min(step.value for step in steps.values())
        enough = min(size for size, step in steps.items() if step.value <= _SATURATION_FACTOR * shortest_ns)
        least, first_ns = min(steps), steps[min(steps)].value
        yield (
            f"{title}: from {format_count(enough)} values an operation on, larger ones gain at most "
            f"{100 * (_SATURATION_FACTOR - 1):.0f} %; with {format_count(least)} it takes "
            f"{first_ns / shortest_ns:.1f} times as long as at best "
            f"({format_ns(first_ns)} and {format_ns(shortest_ns)})."
        )
    for title, group in group_rows(rows[rows["model"] != ""], "model", "ranks"):
        row = group.iloc[-1]
        ready_ns, elements = np.asarray(row["ready_ns"]), np.asarray(row["ready_elements"])
        yield LineChart(
            title=f"{title}: gradients that are ready",
            x_label="since the backward began",
            y_label="values",
            lines=(LineSeries(label="", x=tuple(ready_ns.tolist()), y=tuple(map(float, elements)), style="smooth"),),
            x_unit="ns",
            y_unit="count",
        )
        half = int(np.searchsorted(elements, elements[-1] / 2))
        yield (
            f"{title}: half of its {format_count(int(elements[-1]))} gradients are ready after "
            f"{format_ns(ready_ns[half])}, and all after {format_ns(ready_ns[-1])}."
        )


TENSOR_SIZE: Final = Experiment(
    name="tensor-size",
    title="All-reduce time by tensor size, and when gradients are ready",
    figure="Figure 2",
    paper=(
        "60 million parameters took the less time, the larger the operations: gloo was at its best near 500 thousand "
        "parameters (2 MB) in each, NCCL not yet at 20 million. ResNet-152's gradients came over about 250 ms on a "
        "GPU. (Where it talks about bucket sizes the paper recalls the former as 512 KB.)"
    ),
    trials=_tensor_size_trials,
    content=_draw_tensor_sizes,
    note="Bars are 90 % intervals. Gradients: the median over steps on rank 0, timed by a hook for each parameter.",
    observe=_observe_ready_gradients,
)


# The step time by bucket size, and by the number of groups that reduce buckets in turn.


def _draw_boxes(title: str, x_label: str, by_value: Mapping[float, pd.DataFrame]) -> BoxPlotChart:
    """Draw a box of all counted steps for each value of a setting."""
    boxes = [compute_box(f"{value:g}", own["steps_ns"].explode().tolist()) for value, own in by_value.items()]
    return BoxPlotChart(title=title, x_label=x_label, boxes=tuple(boxes))


def _draw_bucket_sizes(rows: pd.DataFrame) -> Iterator[BoxPlotChart | str]:
    for title, group in group_rows(rows, "model", "ranks", "backend"):
        by_size = select_by(group, "bucket_cap_mb")
        yield _draw_boxes(title, "bucket size in MB; 0 is a bucket for each parameter", by_size)
        best = min(by_size, key=lambda size: estimate_step(by_size[size]).value)
        others = [size for size in by_size if size != best]
        equal = [size for size in others if not is_significant(estimate_change(by_size[best], by_size[size]))]
        text = f"{title}: {best:g} MB is the fastest with steps of {format_ns(estimate_step(by_size[best]).value)}"
        if equal:
            text += f", but {join_and([f'{size:g}' for size in equal])} MB can't be told from it"
        elif others:
            text += ", and no other size comes near it"
        if 0.0 in by_size and best != 0.0:
            change = estimate_change(by_size[best], by_size[0.0])
            text += f"; {format_difference('a bucket for each parameter', change, f'{best:g} MB')}"
        yield f"{text}."


BUCKET_SIZE: Final = Experiment(
    name="bucket-size",
    title="The step time by bucket size",
    figure="Figures 7 and 8",
    paper=(
        "On 16 GPUs ResNet-50 was fastest with 10 to 25 MB and BERT with 50 MB over NCCL, and both with 5 MB over "
        "gloo. On 32 a bucket for each parameter was clearly worse than on 16, and from 5 MB up nothing was."
    ),
    trials=lambda options: options.trials(
        "bucket-size", model=options.models, ranks=options.rank_counts, bucket_cap_mb=_SIZES_MB
    ),
    content=_draw_bucket_sizes,
    note="Boxes are quartiles of all steps, whiskers what nine of ten lie in; sentences compare repetitions.",
)


def _draw_groups(rows: pd.DataFrame) -> Iterator[BoxPlotChart | str]:
    for title, group in group_rows(rows, "model", "ranks", "backend"):
        by_groups = select_by(group, "groups")
        yield _draw_boxes(title, "process groups", by_groups)
        if 1 in by_groups:
            compared = [
                format_difference(f"{groups:g} groups", estimate_change(by_groups[1], own), "one", is_plural=True)
                for groups, own in by_groups.items()
                if groups != 1
            ]
            yield f"{title}: {'; '.join(compared)}."


ROUND_ROBIN: Final = Experiment(
    name="round-robin",
    title="Process groups that take turns",
    figure="Figure 12",
    paper=(
        "With BERT over NCCL three groups made training 33 % faster on 16 GPUs; with ResNet-50 over NCCL it made no "
        "difference, and over gloo three groups always beat one."
    ),
    trials=lambda options: options.trials(
        "round-robin",
        model=options.models,
        ranks=options.rank_counts,
        strategy=("round_robin",),
        groups=_GROUPS,
        bucket_cap_mb=(_SIZE_OF_GROUPS_MB,),
    ),
    content=_draw_groups,
    note=f"Buckets of {_SIZE_OF_GROUPS_MB:g} MB, so that there are some to take turns with.",
)
