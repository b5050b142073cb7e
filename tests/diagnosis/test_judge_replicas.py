"""Models, gradients and replicas that differ: what is said of them, how surely, and when it is not."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from overlapscope.diagnosis.evidence import (
    GroupOrder,
    ModelParameters,
    UnreducedCause,
    UnreducedStep,
)
from overlapscope.diagnosis.judge import judge
from overlapscope.diagnosis.loop_facts import LoopFacts, UserReducedUpdates
from overlapscope.diagnosis.replica_drift import (
    OUTSIDE_MODELS,
    ComparedReplicas,
    EndComparison,
    OptimizerHyperparameters,
    ReplicaDifference,
)
from overlapscope.diagnosis.verdict import Verdict
from tests.diagnosis.jobs import (
    ALIKE,
    ALIKE_UNDER_JOIN,
    CLOSED,
    DIFFERENCE,
    DRIFTED,
    HELD_UP,
    WAITING,
    drifted,
    entry,
    failing,
    group,
    job,
    rank,
    sgd,
    site,
    trained,
)
from tests.ordered import all_reduce


def judge_drifted(*compared: ComparedReplicas, **more: Any) -> Verdict:
    return judge(drifted(*compared, **more))


def test_the_parameters_their_bucket_and_the_last_step_in_which_they_may_have_begun_to_differ_are_named() -> None:
    verdict = judge_drifted(replace(DRIFTED, difference=replace(DIFFERENCE, names=("head.bias",), differs_step=29)))
    assert (verdict.step, verdict.last_step, verdict.parameters, verdict.bucket) == (12, 28, ("head.bias",), 0)


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
    verdict = judge_drifted(DRIFTED, settings=settings)
    assert (verdict.kind, verdict.step) == ("replicas differ", 12)


def test_settings_that_differ_are_no_fault_while_parameters_are_the_same() -> None:
    settings = (sgd((0, 0, 0.1)), sgd((0, 0, 0.01)), sgd((0, 0, 0.1)))
    assert judge_drifted(replace(DRIFTED, difference=None), settings=settings).kind == "healthy"


@pytest.mark.parametrize("change", [{"comm_hook": "post_localSGD_hook"}, {"was_different": (3, 7)}])
def test_replicas_that_are_averaged_now_and_then_may_differ_at_the_end(change: dict[str, object]) -> None:
    at_end = EndComparison(differing=("head.bias",), sides=((1, 2), (0,)))
    assert judge_drifted(replace(DRIFTED, difference=None, at_end=at_end, **change)).kind == "healthy"


def test_a_cause_that_is_known_stays_the_verdict_and_drift_is_not_said_twice() -> None:
    unreduced = UnreducedStep(model=0, step=3, call_site=None)
    verdict = judge(job(*(rank(number, "ended", unreduced=(unreduced,)) for number in range(3)), replicas=(DRIFTED,)))
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
    verdict = judge(job(*ranks, groups=[ALIKE], replicas=(DRIFTED,)))
    assert (verdict.kind, verdict.blamed) == ("replicas differ", (1,))
    assert len(verdict.also) == 1


A, B = ("left.weight", (4, 4), "float32"), ("right.weight", (4, 4), "float32")


def model(*parameters: tuple[str, tuple[int, ...], str], frozen: tuple[str, ...] = ()) -> tuple[ModelParameters, ...]:
    return (ModelParameters(model=0, class_name="Net", parameters=parameters, frozen=frozen),)


@pytest.mark.parametrize(
    ("models", "blamed", "parameter"),
    [
        ((model(A, B), model(B, A), model(A, B)), (1,), "left.weight"),
        ((model(A, B), model(A)), (), "right.weight"),
        ((model(A, B), model(A, frozen=("right.weight",)), model(A, B)), (1,), "right.weight"),
    ],
    ids=["another order", "two ranks", "frozen on one"],
)
def test_the_first_parameter_that_differs_is_named_whatever_comes_of_it(
    models: tuple[tuple[ModelParameters, ...], ...], blamed: tuple[int, ...], parameter: str
) -> None:
    ranks = [rank(n, "failed", models=one, failure=CLOSED) for n, one in enumerate(models)]
    verdict = judge(job(*ranks))
    assert (verdict.kind, verdict.blamed, verdict.parameters) == ("models differ", blamed, (parameter,))


NO_SYNC = UnreducedStep(model=0, step=3, call_site=None, cause="no_sync", updates=20, last_step=22)
EQUAL = replace(DRIFTED, difference=None)


@pytest.mark.parametrize("cause", ["bypassed", "no_sync", "late", "incomplete", "hooks lost"])
@pytest.mark.parametrize(
    "compared",
    [EQUAL, replace(EQUAL, latest_step=3, at_end=EndComparison(differing=(), sides=((0, 1, 2),)))],
)
def test_replicas_that_stay_the_same_refute_that_anything_was_not_reduced(
    cause: UnreducedCause, compared: ComparedReplicas
) -> None:
    unreduced = (replace(NO_SYNC, cause=cause),)
    ranks = [rank(n, "ended", unreduced=unreduced) for n in range(3)]
    assert judge(job(*ranks, groups=[ALIKE], replicas=(compared,))).kind == "healthy"
    before = replace(EQUAL, latest_step=3)  # the beginning of the step that was not reduced
    assert judge(job(*ranks, groups=[ALIKE], replicas=(before,))).kind == "not reduced"


OUTSIDE = replace(NO_SYNC, model=OUTSIDE_MODELS, cause="outside", step=0)


@pytest.mark.parametrize(
    ("difference", "kind"),
    [
        (replace(DIFFERENCE, equal_step=0, equal_at=0, differs_step=1), "not reduced"),
        (
            replace(DIFFERENCE, equal_step=None, equal_at=None, differs_step=0, differs_at=0),
            "healthy",
        ),  # its own values
        (replace(DIFFERENCE, was_made_equal=True), "healthy"),
        (None, "healthy"),
    ],
)
def test_parameters_outside_of_ddp_are_replicas_only_if_they_were_the_same(
    difference: ReplicaDifference | None, kind: str
) -> None:
    compared = replace(DRIFTED, model=OUTSIDE_MODELS, difference=difference)
    ranks = [rank(n, "ended", unreduced=(OUTSIDE,)) for n in range(3)]
    verdict = judge(job(*ranks, groups=[ALIKE], replicas=(compared,)))
    assert (verdict.kind, verdict.blamed) == (kind, ())
    if kind == "not reduced":
        assert (verdict.step, verdict.certainty) == (0, "likely")


@pytest.mark.parametrize(
    ("step", "kind", "certainty"), [(0, "not reduced", "likely"), (5, "healthy", "certain")], ids=["first", "later"]
)
def test_an_update_that_leaves_out_what_all_others_do_parts_ranks_that_are_compared_only_afterwards(
    step: int, kind: str, certainty: str
) -> None:
    """Whether ranks are to be compared is known when gradients are reduced, and what differs by then is older."""
    difference = replace(DIFFERENCE, equal_step=None, equal_at=None, differs_step=1, differs_at=1)
    compared = replace(DRIFTED, model=OUTSIDE_MODELS, difference=difference)
    left_out = replace(OUTSIDE, cause="left out", step=step, last_step=step)
    ranks = [rank(n, "ended", unreduced=(left_out,)) for n in range(3)]
    verdict = judge(job(*ranks, groups=[ALIKE], replicas=(compared,)))
    assert (verdict.kind, verdict.certainty) == (kind, certainty)


def test_models_that_the_user_averages_need_no_reduction() -> None:
    ranks = [rank(n, "ended", unreduced=(replace(NO_SYNC, is_averaged_by_user=True),)) for n in range(3)]
    for was_made_equal in (True, False):  # fingerprints may be taken between two averages alone
        averaged = replace(DRIFTED, difference=replace(DIFFERENCE, was_made_equal=was_made_equal))
        assert judge(job(*ranks, groups=[ALIKE], replicas=(averaged,))).kind == "healthy"


def test_what_join_makes_equal_at_its_end_is_not_averaged_on_purpose() -> None:
    """It leaves out the state of the optimizers."""
    evidence = drifted(replace(DRIFTED, difference=replace(DIFFERENCE, was_made_equal=True)))
    assert judge(evidence).kind == "healthy"
    verdict = judge(replace(evidence, groups=(ALIKE_UNDER_JOIN,)))
    assert (verdict.kind, verdict.certainty) == ("replicas differ", "certain")
    assert len(verdict.advice) == 2


def test_updates_without_any_reduction_are_certain_once_they_have_ended_apart() -> None:
    ranks = [rank(n, "ended", unreduced=(NO_SYNC,)) for n in range(3)]
    apart = replace(DRIFTED, difference=replace(DIFFERENCE, equal_step=3, differs_step=4))
    verdict = judge(job(*ranks, groups=[ALIKE], replicas=(apart,)))
    assert (verdict.kind, verdict.step, verdict.certainty) == ("not reduced", 3, "certain")
    verdict = judge(replace(job(*ranks, groups=[ALIKE], replicas=(apart,)), is_live=True))
    assert (verdict.kind, verdict.step, verdict.certainty) == ("not reduced", 3, "likely")
    mixed = [rank(n, unreduced=(replace(NO_SYNC, reduced_backwards=1),)) for n in range(3)]
    verdict = judge(replace(job(*mixed, groups=[ALIKE]), is_live=True))
    assert (verdict.kind, verdict.step, verdict.certainty) == ("not reduced", 3, "certain")


def test_gradients_that_were_never_reduced_are_a_fault_of_a_job_that_ended_well() -> None:
    unreduced = UnreducedStep(model=0, step=12, call_site=site(20))
    verdict = judge(job(*(rank(n, "ended", unreduced=(unreduced,)) for n in range(3))))
    assert (verdict.kind, verdict.blamed, verdict.step, verdict.is_fault) == ("not reduced", (), 12, True)


BYPASSED = UnreducedStep(model=0, step=2, call_site=site(20))
MET_IN_STEP_2 = group(dict.fromkeys(range(3), WAITING))


@pytest.mark.parametrize("is_live", [True, False])
@pytest.mark.parametrize(
    ("others", "order", "blamed", "unknown"),
    [
        ({"steps_done": 3}, ALIKE, (1,), ""),
        ({"steps_done": 2}, ALIKE, (), "ranks 0, 2"),
        ({"steps_done": 2}, HELD_UP, (1,), ""),
        ({"steps_done": 2}, MET_IN_STEP_2, (), "ranks 0, 2"),  # perhaps a gradient comes after that reduction there too
        ({"steps_done": 3, "liveness": "silent"}, ALIKE, (), "ranks 0, 2"),
        ({"steps_done": 3, "unrecorded_because": "its disk is full"}, ALIKE, (), "ranks 0, 2"),
        ({"steps_done": 3, "unreduced": (replace(BYPASSED, cause="late"),)}, ALIKE, (), ""),
    ],
    ids=["past it", "before it", "waiting for it", "in a bucket with it", "silent", "not recorded", "another cause"],
)
def test_ranks_are_no_majority_before_it_is_known_that_they_reduce(
    others: dict[str, Any], order: GroupOrder, blamed: tuple[int, ...], unknown: str, *, is_live: bool
) -> None:
    """The first of all that get to an update which none of them reduces is alone until the others get there."""
    ranks = [rank(n, unreduced=(BYPASSED,)) if n == 1 else rank(n, **others) for n in range(3)]
    verdict = judge(job(*ranks, groups=[order], is_live=is_live))
    assert (verdict.kind, verdict.step, verdict.blamed) == ("not reduced", 2, blamed)
    assert [said for said in verdict.evidence if said.startswith("Whether")] == [
        f"Whether {each} reduced theirs in step 2 is not known." for each in filter(None, [unknown])
    ]


def test_ranks_that_reduce_are_not_blamed_because_most_do_not() -> None:
    for step in (2, 3):
        ranks = [rank(n, unreduced=(BYPASSED,)) if n != 1 else rank(1, steps_done=step) for n in range(3)]
        verdict = judge(job(*ranks, groups=[ALIKE], is_live=True))
        assert (verdict.kind, verdict.blamed, verdict.concerned) == ("not reduced", (), (0, 2))


LOST_HOOKS = UnreducedStep(model=0, step=1, call_site=site(20), cause="hooks lost", last_step=1)


@pytest.mark.parametrize("world", [2, 3])
def test_a_rank_that_no_longer_reduces_is_told_by_that_and_not_by_what_it_launches_next(world: int) -> None:
    """Its logging meets the others' buckets, or it is an update ahead in the same bucket."""
    others = [rank(n, "sleeping", step=1) for n in range(world) if n != 1]
    lost = rank(1, step=2, unreduced=(LOST_HOOKS,))
    first = trained(4, is_waiting=True)
    for entered, divergence in (
        (entry(4, all_reduce(), step=1), "signature"),
        (entry(4, first[3].signature, step=4), "step"),
    ):
        windows = {n: (*trained(3), entered) if n == 1 else first for n in range(world)}
        order = replace(group(windows, first_divergence=4), divergence=divergence)
        verdict = judge(job(*others, lost, groups=[order]))
        assert (verdict.kind, verdict.step, verdict.number) == ("not reduced", 1, 4)
        assert verdict.blamed == ((1,) if world > 2 else ())


def test_a_rank_that_leaves_one_reduction_out_and_goes_on_is_a_step_behind() -> None:
    """As opposed to one whose hooks are lost: it was one backward under no_sync()."""
    first = trained(4, is_waiting=True)
    windows = {n: (*trained(3), entry(4, first[3].signature, step=2)) if n == 1 else first for n in range(3)}
    order = replace(group(windows, first_divergence=4), divergence="step")
    once = rank(1, step=2, unreduced=(replace(LOST_HOOKS, cause="no_sync"),))
    verdict = judge(job(rank(0, step=1), once, rank(2, step=1), groups=[order]))
    assert (verdict.kind, verdict.blamed) == ("step behind", (1,))


def test_a_rank_that_no_longer_reduces_is_told_while_others_wait_for_its_bucket() -> None:
    windows = {n: trained(3) if n == 1 else trained(4, is_waiting=True) for n in range(3)}
    lost = rank(1, "ended", step=9, unreduced=(LOST_HOOKS,))
    verdict = judge(job(rank(0, step=1), lost, rank(2, step=1), groups=[group(windows)]))
    assert (verdict.kind, verdict.step, verdict.blamed) == ("not reduced", 1, (1,))


def test_what_ranks_launch_before_gradients_were_left_unreduced_is_the_cause() -> None:
    lost = rank(1, step=5, unreduced=(replace(LOST_HOOKS, step=4),))
    windows = {n: (*trained(3), entry(4, all_reduce(), step=1)) if n == 1 else trained(4) for n in range(3)}
    order = replace(group(windows, first_divergence=4), divergence="signature")
    verdict = judge(job(rank(0, step=1), lost, rank(2, step=1), groups=[order]))
    assert verdict.kind != "not reduced"
    assert verdict.step == 1


def test_ranks_that_train_alone_without_ddp_are_left_alone() -> None:
    apart = replace(DRIFTED, model=OUTSIDE_MODELS)
    verdict = judge(job(*[rank(n, "ended") for n in range(3)], groups=[ALIKE], replicas=(apart,)))
    assert (verdict.kind, verdict.evidence) == ("healthy", ())
    for reduced, kind in ((UserReducedUpdates(model=OUTSIDE_MODELS, all=9), "replicas differ"), (None, "healthy")):
        loop = LoopFacts(user_reduced=(reduced,) if reduced else ())
        ranks = [rank(n, "ended", loop=loop) for n in range(3)]
        assert judge(job(*ranks, groups=[ALIKE], replicas=(apart,))).kind == kind
