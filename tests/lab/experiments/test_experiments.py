"""Each experiment, from rows in which the answer is known to its sentences; and from what is wanted to its trials."""

from __future__ import annotations

from functools import cache

import numpy as np
import pandas as pd
import pytest

from overlapscope.errors import OverlapScopeError
from overlapscope.lab.experiments.charts import BoxPlotChart, FigureContent, LineChart
from overlapscope.lab.experiments.experiment import ExperimentOptions
from overlapscope.lab.experiments.registry import EXPERIMENTS, get_experiment
from overlapscope.lab.experiments.scaling import PREDICTED_RANKS
from tests.lab.experiments.rows import MS, rows_of, together

WANTED = ExperimentOptions(
    models=("convnet", "transformer"),
    ranks=4,
    backend="gloo",
    strategies=("overlapped", "ring"),
    steps=30,
    repetitions=2,
    seed=7,
)


@pytest.mark.parametrize("experiment", EXPERIMENTS, ids=lambda experiment: experiment.name)
def test_trials_differ_and_need_no_more_ranks_than_there_are(experiment):
    trials = experiment.trials(WANTED)
    assert len({trial.key for trial in trials}) == len({trial.folder_name for trial in trials}) == len(trials)
    assert {trial.experiment for trial in trials} == {experiment.name}
    assert max(trial.ranks for trial in trials) == 4
    assert {trial.seed for trial in trials} == {7, 8}


def test_an_unknown_experiment_is_named_with_the_nearest():
    with pytest.raises(OverlapScopeError, match=r"breakdwn: no such experiment; did you mean breakdown\?"):
        get_experiment("breakdwn")


def draw(name: str, *rows: pd.DataFrame) -> FigureContent:
    return get_experiment(name).draw(together(*rows))


NOT_OVERLAPPED = rows_of([100] * 3, {"backward_ns": 40 * MS, "exposed_ns": 60 * MS}, strategy="bucketed")
LOSSES = {1: (1.0, 1.1, 0.9), 2: (1.0, 1.2, 0.8), 4: (1.5, 1.6, 1.4)}
PREDICTED_NS = np.array([ranks * 10 * MS for ranks in PREDICTED_RANKS])


@cache
def figures() -> dict[str, FigureContent]:
    return {
        "breakdown": draw("breakdown", NOT_OVERLAPPED, rows_of([70] * 3)),
        "half of a comparison": draw("breakdown", rows_of([70] * 3)),
        "bucket-size": draw(
            "bucket-size",
            rows_of([150, 151, 149], bucket_cap_mb=0.0),
            rows_of([100, 101, 99], bucket_cap_mb=5.0),
            rows_of([100, 103, 99], bucket_cap_mb=25.0),
        ),
        "round-robin": draw(
            "round-robin",
            *(rows_of([ms] * 3, strategy="round_robin", groups=groups) for groups, ms in ((1, 100), (3, 80), (5, 100))),
        ),
        "skip-sync": draw("skip-sync", rows_of([100] * 3), rows_of([480] * 3, sync_every=8)),
        "convergence": draw(
            "convergence",
            *(
                rows_of(
                    [1],
                    {"losses": np.r_[np.full(90, 2.0), np.full(10, end)]},
                    batch=8,
                    learning_rate=0.02,
                    sync_every=every,
                ).assign(repetition=repetition)
                for every, losses in LOSSES.items()
                for repetition, end in enumerate(losses)
            ),
        ),
        "strategies": draw(
            "strategies",
            rows_of([100, 101, 99], strategy="overlapped"),
            rows_of([80, 81, 79], strategy="fp16"),
            rows_of([79, 82, 80], strategy="ring"),
        ),
        "too few repetitions": draw(
            "strategies", rows_of([100, 101], strategy="overlapped"), rows_of([80, 81], strategy="fp16")
        ),
        "the default is the fastest": draw("strategies", rows_of([100] * 3), rows_of([200] * 3, strategy="ring")),
        "tensor-size": draw(
            "tensor-size",
            *(
                rows_of([ms] * 3, model="", total_elements=60_000_000, tensor_elements=size)
                for size, ms in {10_000: 500, 100_000: 108, 1_000_000: 100, 10_000_000: 104}.items()
            ),
        ),
        "gradients": draw(
            "tensor-size",
            rows_of([5], {"ready_ns": [1 * MS, 3 * MS, 4 * MS], "ready_elements": [10, 60, 100]}, detail="parameters"),
        ),
        "scaling": draw(
            "scaling",
            rows_of([10] * 3, {"predicted_ns": []}, ranks=1),
            rows_of([20] * 3, {"predicted_ns": PREDICTED_NS}, ranks=2),
            rows_of([50] * 3, {"predicted_ns": PREDICTED_NS + 10 * MS}, ranks=4),
        ),
        "failed": draw(
            "breakdown", rows_of([70] * 3), rows_of([70], strategy="sharded").assign(failure="no optimizer")
        ),
        "no result": draw("breakdown", rows_of([70]).assign(failure="no")),
    }


def test_conclusions(golden):
    golden(
        "lab/experiments", "\n".join(f"{name}: {line}" for name, figure in figures().items() for line in figure.here)
    )


def test_bars_are_labelled_and_the_fastest_strategy_is_the_first():
    labels = {name: [bar.label for bar in figures()[name].charts[0].bars] for name in ("breakdown", "strategies")}
    assert labels == {"breakdown": ["not overlapped", "overlapped"], "strategies": ["fp16", "ring", "overlapped"]}


def test_half_of_a_comparison_is_drawn_and_nothing_said_of_it():
    assert len(figures()["half of a comparison"].charts) == 1
    assert figures()["half of a comparison"].here == ()


def test_a_box_has_the_steps_of_all_repetitions():
    (chart,) = figures()["bucket-size"].charts
    assert isinstance(chart, BoxPlotChart)
    assert [(box.label, box.median_ns / MS, box.count) for box in chart.boxes] == [
        ("0", 150.0, 12),
        ("5", 100.0, 12),
        ("25", 100.0, 12),
    ]


def test_the_time_of_a_pass_is_that_of_the_step_over_its_passes():
    (chart,) = figures()["skip-sync"].charts
    assert isinstance(chart, LineChart)
    assert chart.lines[0].x == (1, 8)
    assert chart.lines[0].y == (100 * MS, 60 * MS)


def test_a_prediction_begins_at_the_most_ranks_measured():
    measured, predicted = figures()["scaling"].charts[0].lines
    assert measured.x == (1, 2, 4)
    assert predicted.style == "predicted"
    assert predicted.x[0] == 4


def test_a_trial_that_failed_is_left_out_with_its_reason():
    assert figures()["failed"].left_out == ("convnet, 2 ranks, sharded: no optimizer",)
    assert [bar.label for bar in figures()["failed"].charts[0].bars] == ["overlapped"]


def test_without_a_result_there_is_no_chart():
    assert figures()["no result"].charts == ()
