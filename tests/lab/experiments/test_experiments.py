"""Each experiment, from rows in which the answer is known to its sentences; and from what is wanted to its trials."""

from __future__ import annotations

import numpy as np
import pytest

from overlapscope.errors import OverlapScopeError
from overlapscope.lab.experiments import (
    breakdown,
    bucket_size,
    convergence,
    round_robin,
    scaling,
    skip_sync,
    strategies,
    tensor_size,
)
from overlapscope.lab.experiments.charts import BoxPlotChart, LineChart
from overlapscope.lab.experiments.experiment import ExperimentOptions
from overlapscope.lab.experiments.registry import EXPERIMENTS, draw_figure, get_experiment
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


def test_what_overlap_gains_and_what_share_communication_has():
    without = rows_of([100, 100, 100], {"backward_ns": 40 * MS, "exposed_ns": 60 * MS}, strategy="bucketed")
    figure = breakdown.draw(together(without, rows_of([70, 70, 70])))
    assert figure.here == (
        "convnet, 2 ranks, gloo: a step with overlap takes 30.0 % less than one without (30.0 to 30.0 %); without it, "
        "communication is 60.0 % (60.0 to 60.0 %) of the backward's time.",
    )
    (chart,) = figure.charts
    assert [bar.label for bar in chart.bars] == ["not overlapped", "overlapped"]


def test_half_of_a_comparison_is_drawn_and_nothing_said_of_it():
    figure = breakdown.draw(rows_of([70, 70, 70]))
    assert len(figure.charts) == 1
    assert figure.here == ()


def test_the_fastest_bucket_size_with_those_that_may_be_as_fast():
    rows = together(
        rows_of([150, 151, 149], bucket_cap_mb=0.0),
        rows_of([100, 101, 99], bucket_cap_mb=5.0),
        rows_of([100, 103, 99], bucket_cap_mb=25.0),
    )
    (sentence,) = bucket_size.draw(rows).here
    assert sentence.startswith(
        "convnet, 2 ranks, gloo: 5 MB is the fastest with steps of 100 ms, but 25 MB can't be told from it; a bucket "
        "for each parameter takes 50.0 % longer than 5 MB (49."
    )
    (chart,) = bucket_size.draw(rows).charts
    assert isinstance(chart, BoxPlotChart)
    assert [(box.label, box.median_ns / MS, box.count) for box in chart.boxes] == [
        ("0", 150.0, 12),
        ("5", 100.0, 12),
        ("25", 100.0, 12),
    ]


def test_several_process_groups_are_held_against_one():
    rows = together(
        *(rows_of([ms] * 3, strategy="round_robin", groups=groups) for groups, ms in ((1, 100), (3, 80), (5, 100)))
    )
    assert round_robin.draw(rows).here == (
        "convnet, 2 ranks, gloo: 3 groups take 20.0 % less than one (20.0 to 20.0 %); 5 groups and one can't be told "
        "apart (0 to 0 %).",
    )


def test_the_time_of_a_pass_is_that_of_the_step_over_its_passes():
    rows = together(rows_of([100] * 3), rows_of([480] * 3, sync_every=8))
    figure = skip_sync.draw(rows)
    (chart,) = figure.charts
    assert isinstance(chart, LineChart)
    assert chart.lines[0].x == (1, 8)
    assert chart.lines[0].y == (100 * MS, 60 * MS)
    assert figure.here == (
        "convnet, 2 ranks, gloo: a pass with a reduction every 8 takes 40.0 % less than one with a reduction each time "
        "(40.0 to 40.0 %).",
    )


def test_losses_are_compared_at_the_end():
    settings = {"batch": 8, "learning_rate": 0.02}
    ends = {1: (1.0, 1.1, 0.9), 2: (1.0, 1.2, 0.8), 4: (1.5, 1.6, 1.4)}
    rows = [
        rows_of([1], {"losses": np.r_[np.full(90, 2.0), np.full(10, end)]}, **settings, sync_every=every).assign(
            repetition=repetition
        )
        for every, losses in ends.items()
        for repetition, end in enumerate(losses)
    ]
    figure = convergence.draw(together(*rows))
    assert figure.here == (
        "convnet, 2 ranks, batch 8, learning rate 0.02: training ends with a loss of 1; reducing every 2, with 1, "
        "which can't be told from it; reducing every 4, with 1.5, 0.5 to 0.5 higher.",
    )


def test_the_winner_is_named_with_those_that_may_be_as_fast_and_what_it_gains():
    rows = together(
        rows_of([100, 101, 99], strategy="overlapped"),
        rows_of([80, 81, 79], strategy="fp16"),
        rows_of([79, 82, 80], strategy="ring"),
    )
    figure = strategies.draw(rows)
    assert figure.here[0].startswith("convnet, 2 ranks, gloo: fp16 is the fastest with steps of 80.0 ms (")
    assert "but ring can't be told from it; it takes 20.0 % less than the default, overlapped (" in figure.here[0]
    assert [bar.label for bar in figure.charts[0].bars] == ["fp16", "ring", "overlapped"]


def test_of_too_few_repetitions_no_winner_is_named():
    figure = strategies.draw(together(rows_of([100, 101], strategy="overlapped"), rows_of([80, 81], strategy="fp16")))
    assert figure.here == (
        "convnet, 2 ranks, gloo: fp16 had the shortest steps, 80.5 ms, of too few repetitions to name the fastest.",
    )


def test_the_default_is_not_compared_with_itself():
    figure = strategies.draw(together(rows_of([100] * 3), rows_of([200] * 3, strategy="ring")))
    assert figure.here == ("convnet, 2 ranks, gloo: overlapped is the fastest with steps of 100 ms (100 to 100 ms).",)


def test_from_which_size_on_an_operation_is_large_enough():
    sizes = {10_000: 500, 100_000: 108, 1_000_000: 100, 10_000_000: 104}
    rows = together(
        *(rows_of([ms] * 3, model="", total_elements=60_000_000, tensor_elements=size) for size, ms in sizes.items())
    )
    assert tensor_size.draw(rows).here == (
        "2 ranks, gloo, 60 M float32 values in all: from 100 k values an operation on, larger ones gain at most 10 %; "
        "with 10 k it takes 5.0 times as long as at best (500 ms and 100 ms).",
    )


def test_gradients_are_drawn_as_they_come():
    ready = {"ready_ns": [1 * MS, 3 * MS, 4 * MS], "ready_elements": [10, 60, 100]}
    figure = tensor_size.draw(rows_of([5], ready, detail="parameters"))
    assert figure.here == (
        "convnet, 2 ranks: half of its 100 gradients are ready after 3.00 ms, and all after 4.00 ms.",
    )


def test_a_prediction_is_held_against_what_was_measured():
    predicted = np.array([ranks * 10 * MS for ranks in scaling.PREDICTED_RANKS])
    rows = together(
        rows_of([10] * 3, {"predicted_ns": []}, ranks=1),
        rows_of([20] * 3, {"predicted_ns": predicted}, ranks=2),
        rows_of([50] * 3, {"predicted_ns": predicted + 10 * MS}, ranks=4),
    )
    figure = scaling.draw(rows)
    assert figure.here == (
        "convnet, gloo: a step of 4 ranks takes 400.0 % longer than one of 1 rank (400.0 to 400.0 %).",
        "convnet, gloo: predicted from 2 ranks, the model is off for 4 ranks by −20 %.",
        "convnet, gloo: predicted from 4 ranks, the model is off for 2 ranks by +50 %.",
        "convnet, gloo: for 256 ranks on links like these the model predicts 2.57 s, 51.40 times the step of 4; nobody "
        "has measured that.",
    )
    measured, line = figure.charts[0].lines
    assert measured.x == (1, 2, 4)
    assert line.style == "predicted"
    assert line.x[0] == 4


def test_a_trial_that_failed_is_left_out_with_its_reason():
    rows = together(rows_of([70, 70, 70]), rows_of([70], strategy="sharded").assign(failure="needs an optimizer"))
    figure = draw_figure(breakdown.EXPERIMENT, rows)
    assert figure.left_out == ("convnet, 2 ranks, sharded: needs an optimizer",)
    assert [bar.label for bar in figure.charts[0].bars] == ["overlapped"]


def test_without_a_result_the_figure_says_so():
    figure = draw_figure(breakdown.EXPERIMENT, rows_of([70]).assign(failure="no"))
    assert figure.here == ("There is no result yet.",)
    assert figure.charts == ()
