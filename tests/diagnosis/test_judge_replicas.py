"""Replicas that differ: what is said of them, how surely, and when it is not."""

from __future__ import annotations

from dataclasses import replace

import pytest

from overlapscope.diagnosis.evidence import UnreducedStep
from overlapscope.diagnosis.judge import judge
from overlapscope.diagnosis.replica_drift import (
    ComparedReplicas,
    EndComparison,
    HyperparameterChange,
    OptimizerHyperparameters,
    ReplicaDifference,
)
from overlapscope.diagnosis.verdict import Verdict
from tests.diagnosis.jobs import entry, failing, group, held_up, idle, job, rank, trained
from tests.ordered import all_reduce

DIFFERENCE = ReplicaDifference(
    names=("stem.weight", "head.bias"),
    kind="trained",
    sides=((0, 2), (1,)),
    equal_at=12,
    equal_step=12,
    differs_at=13,
    differs_step=13,
    is_at_once=True,
)
DRIFTED = ComparedReplicas(
    model=0,
    class_name="Net",
    ranks=(0, 1, 2),
    tensors=2,
    moments=40,
    latest_step=50,
    difference=DIFFERENCE,
    buckets={"stem.weight": 1, "head.bias": 0},
    processors={"EPYC": (0, 1, 2)},
)
ORDER = group({number: trained(9) for number in range(3)})


def sgd(*changes: tuple[int, int, float], key: str = "a", updates: int = 40) -> tuple[OptimizerHyperparameters, ...]:
    """From (update, step, lr)."""
    told = tuple(HyperparameterChange(update=update, step=step, values=(lr, 0.9)) for update, step, lr in changes)
    return (
        OptimizerHyperparameters(key=key, class_name="SGD", names=("lr", "momentum"), changes=told, updates=updates),
    )


def verdict_of(
    *compared: ComparedReplicas, settings: tuple[tuple[OptimizerHyperparameters, ...], ...] = ((), (), ())
) -> Verdict:
    ranks = [rank(number, "ended", hyperparameters=own) for number, own in enumerate(settings)]
    return judge(job(*ranks, groups=[ORDER], replicas=compared))


def test_the_minority_the_step_and_the_parameters_are_named() -> None:
    verdict = verdict_of(DRIFTED)
    assert (verdict.kind, verdict.blamed, verdict.step, verdict.certainty) == ("replicas differ", (1,), 12, "certain")
    assert verdict.parameters == ("stem.weight", "head.bias")
    assert verdict.sentence == (
        "The replicas differ since step 12: both parameters of the model (Net) (stem.weight, head.bias) are not "
        "the same on rank 1 as on ranks 0, 2."
    )
    assert "They are in buckets 0, 1." in verdict.evidence


def test_of_two_ranks_nobody_is_blamed() -> None:
    verdict = verdict_of(replace(DRIFTED, ranks=(0, 1), difference=replace(DIFFERENCE, sides=((0,), (1,)))))
    assert verdict.blamed == ()
    assert "on rank 0 and rank 1" in verdict.sentence


def test_between_two_fingerprints_the_step_is_a_range() -> None:
    verdict = verdict_of(replace(DRIFTED, difference=replace(DIFFERENCE, names=("head.bias",), differs_step=29)))
    assert verdict.step == 12
    assert "since a step from 12 to 28: 1 of 2 parameters of the model (Net) (head.bias) is" in verdict.sentence
    assert verdict.bucket == 0


@pytest.mark.parametrize(("init_sync", "said"), [(True, "had made the replicas equal"), (False, "init_sync=False")])
def test_a_difference_from_the_start_is_of_what_was_loaded(init_sync: bool, said: str) -> None:
    difference = replace(DIFFERENCE, equal_at=None, equal_step=None, differs_at=0, differs_step=0)
    verdict = verdict_of(replace(DRIFTED, difference=difference, init_sync=init_sync))
    assert verdict.step is None
    assert verdict.sentence.startswith("Before the first step both parameters")
    assert said in verdict.sentence


def test_a_setting_that_differs_on_the_same_ranks_explains_it_and_tells_the_step() -> None:
    settings = (sgd((0, 0, 0.1)), sgd((0, 0, 0.1), (20, 20, 0.01)), sgd((0, 0, 0.1)))
    difference = replace(DIFFERENCE, differs_step=29)
    verdict = verdict_of(replace(DRIFTED, difference=difference), settings=settings)
    assert verdict.step == 20
    assert verdict.sentence.endswith("The lr of SGD is 0.01 on rank 1 and 0.1 on ranks 0, 2 since step 20.")


@pytest.mark.parametrize(
    "settings",
    [
        (sgd((0, 0, 0.1)), sgd((0, 0, 0.1)), sgd((0, 0, 0.1), (5, 5, 0.01))),  # on another rank
        (sgd((0, 0, 0.1)), sgd((0, 0, 0.1), (30, 30, 0.01)), sgd((0, 0, 0.1))),  # later
        (sgd((0, 0, 0.1)), sgd((0, 0, 0.01), key="b"), sgd((0, 0, 0.1))),  # of other parameters
    ],
)
def test_a_setting_that_does_not_fit_is_no_explanation(
    settings: tuple[tuple[OptimizerHyperparameters, ...], ...],
) -> None:
    verdict = verdict_of(DRIFTED, settings=settings)
    assert (verdict.kind, verdict.step) == ("replicas differ", 12)
    assert "The lr" not in verdict.sentence


def test_settings_that_differ_are_no_fault_while_parameters_are_the_same() -> None:
    settings = (sgd((0, 0, 0.1)), sgd((0, 0, 0.01)), sgd((0, 0, 0.1)))
    verdict = verdict_of(replace(DRIFTED, difference=None), settings=settings)
    assert verdict.kind == "healthy"
    assert verdict.evidence == (
        "2 parameters of the model (Net) are the same on ranks 0-2 in 40 comparisons, the latest at the beginning of "
        "step 50.",
    )


def test_parameters_that_differ_only_at_the_end_are_told_without_an_accusation() -> None:
    """One rank may have loaded the best checkpoint."""
    at_end = EndComparison(differing=("stem.weight", "head.bias"), sides=((1, 2), (0,)), is_all_trained=True)
    verdict = verdict_of(replace(DRIFTED, difference=None, at_end=at_end))
    assert (verdict.kind, verdict.blamed, verdict.suspected) == ("healthy", (), ())
    assert "2 of them (stem.weight, head.bias) were not the same on rank 0 as on ranks 1, 2" in verdict.evidence[1]


def test_some_parameters_that_differ_at_the_end_are_no_checkpoint_that_was_loaded() -> None:
    at_end = EndComparison(differing=("head.bias",), sides=((1, 2), (0,)), equal_step=45)
    verdict = verdict_of(replace(DRIFTED, difference=None, at_end=at_end))
    assert (verdict.kind, verdict.certainty, verdict.suspected) == ("replicas differ", "likely", (0,))
    assert (verdict.step, verdict.parameters) == (45, ("head.bias",))
    assert "(head.bias) was not the same on rank 0 as on ranks 1, 2: in step 45 or later" in verdict.sentence


@pytest.mark.parametrize("change", [{"comm_hook": "post_localSGD_hook"}, {"was_different": (3, 7)}])
def test_replicas_that_are_averaged_now_and_then_may_differ_at_the_end(change: dict[str, object]) -> None:
    at_end = EndComparison(differing=("head.bias",), sides=((1, 2), (0,)))
    assert verdict_of(replace(DRIFTED, difference=None, at_end=at_end, **change)).kind == "healthy"


def test_parameters_that_are_the_same_at_the_end_are_told_so() -> None:
    verdict = verdict_of(replace(DRIFTED, difference=None, at_end=EndComparison(differing=(), sides=((0, 1, 2),))))
    assert verdict.evidence[0].endswith("and when the recording ended.")


@pytest.mark.parametrize(
    ("change", "alternative"),
    [
        ({"processors": {"EPYC": (0, 2), "Xeon": (1,)}}, "may round differently"),
        ({"comm_hook": "my_hook"}, "the communication hook my_hook"),
        ({"difference": replace(DIFFERENCE, kind="frozen")}, "these parameters are not trained"),
    ],
)
def test_what_may_make_replicas_differ_in_a_healthy_job_is_said(change: dict[str, object], alternative: str) -> None:
    verdict = verdict_of(replace(DRIFTED, **change))
    assert (verdict.kind, verdict.certainty) == ("replicas differ", "likely")
    assert alternative in verdict.alternative


@pytest.mark.parametrize(
    "change",
    [
        {"comm_hook": "post_localSGD_hook"},
        {"difference": replace(DIFFERENCE, was_made_equal=True)},
        {"difference": None, "was_different": (3, 7)},
        {"difference": None, "buffers": replace(DIFFERENCE, kind="buffer", names=("norm.running_mean",))},
    ],
)
def test_what_differs_on_purpose_is_a_note(change: dict[str, object]) -> None:
    verdict = verdict_of(replace(DRIFTED, **change))
    assert verdict.kind == "healthy"
    assert any("iffer" in said for said in verdict.evidence)


def test_a_cause_that_is_known_stays_the_verdict_and_drift_is_not_said_twice() -> None:
    unreduced = UnreducedStep(model=0, step=3, call_site=None)
    verdict = judge(job(*(rank(number, "ended", unreduced=unreduced) for number in range(3)), replicas=(DRIFTED,)))
    assert verdict.kind == "not reduced"
    assert not any("replicas differ" in said for said in (*verdict.evidence, *verdict.also))
    order = group({0: trained(9), 1: (*trained(3), entry(4, all_reduce())), 2: trained(9)}, first_divergence=4)
    ranks = [rank(number, "ended") for number in range(3)]
    verdict = judge(job(*ranks, groups=[replace(order, divergence="signature")], replicas=(DRIFTED,)))
    assert verdict.kind != "replicas differ"
    assert not any("replicas differ" in said for said in (*verdict.evidence, *verdict.also))


def test_ranks_that_finished_apart_explain_what_differs_at_the_end() -> None:
    at_end = EndComparison(differing=("head.bias",), sides=((1, 2), (0,)), equal_step=45)
    logs = group({0: trained(6), 1: failing(trained(9)), 2: failing(trained(9))})
    drifted = replace(DRIFTED, difference=None, at_end=at_end)
    verdict = judge(job(*[rank(n, "ended") for n in range(3)], groups=[logs], replicas=(drifted,)))
    assert (verdict.kind, verdict.blamed) == ("missing collective", (0,))


def test_a_rank_that_dies_while_python_shuts_down_does_not_hide_that_replicas_differ() -> None:
    ranks = [rank(number, "ended", exit_status=-6 if number == 2 else 0) for number in range(3)]
    verdict = judge(job(*ranks, groups=[ORDER], replicas=(DRIFTED,)))
    assert (verdict.kind, verdict.blamed) == ("replicas differ", (1,))
    assert any("killed by signal 6 (SIGABRT)" in said for said in verdict.also)


def test_a_hang_that_has_another_cause_does_not_hide_that_replicas_differ() -> None:
    verdict = judge(held_up(idle(rank(1, "stopped", step=2), 60), replicas=(DRIFTED,)))
    assert verdict.kind == "stopped"
    assert any("The replicas differ since step 12" in said for said in verdict.evidence)
