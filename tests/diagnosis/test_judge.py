"""Which cause is named, given what is known: a job a test, three ranks unless it says otherwise."""

from __future__ import annotations

from dataclasses import replace

import pytest

from overlapscope.diagnosis.evidence import (
    ModelParameters,
    UnreducedStep,
)
from overlapscope.diagnosis.judge import judge
from tests.diagnosis.jobs import (
    CLOSED,
    HELD_UP,
    group,
    held_up,
    idle,
    job,
    rank,
    site,
    trained,
)

# -- nothing is wrong


def test_a_job_that_goes_on_is_healthy_although_ranks_are_not_at_the_same_collective() -> None:
    ranks = (idle(rank(n, phase="backward", step=2), 0.01) for n in range(3))
    assert judge(job(*ranks, groups=[HELD_UP], is_live=True)).kind == "healthy"


def test_steps_of_a_minute_are_no_reason_to_call_a_rank_stuck_after_three() -> None:
    late = idle(rank(1, phase="forward", step=2, since_ns=10**9), 180, step_s=60)
    assert judge(held_up(late, is_live=True)).kind == "slow"


# -- before the first step


def test_a_first_step_that_takes_long_is_a_fact_and_no_fault() -> None:
    starting = replace(rank(1, phase="forward", step=0, since_ns=10**9), is_starting=True, idle_ns=6 * 10**9)
    starting = replace(starting, position=replace(starting.position, call_site=site(7)))
    waiting = group({0: trained(1, is_waiting=True), 2: trained(1, is_waiting=True)}, ranks=(0, 1, 2))
    early = judge(job(rank(0), starting, rank(2), groups=[waiting], is_live=True))
    assert (early.kind, early.is_fault) == ("slow", False)
    later = replace(starting, idle_ns=21 * 10**9)
    late = judge(job(rank(0), later, rank(2), groups=[waiting], is_live=True))
    assert (late.kind, late.certainty) == ("stuck", "likely")


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


# -- what harms without stopping anything, and what was seen before


def test_gradients_that_were_never_reduced_are_a_fault_of_a_job_that_ended_well() -> None:
    unreduced = UnreducedStep(model=0, step=12, call_site=site(20))
    verdict = judge(job(*(rank(n, "ended", unreduced=unreduced) for n in range(3))))
    assert (verdict.kind, verdict.blamed, verdict.step, verdict.is_fault) == ("not reduced", (), 12, True)


def test_ranks_that_were_killed_at_once_are_both_named_whoever_waited_for_whom() -> None:
    order = group({0: trained(7, is_waiting=True), 1: trained(6), 2: trained(7, is_waiting=True)})
    killed = [rank(n, "gone", phase="backward", step=2, silent_for_ns=600_000_000) for n in (1, 2)]
    verdict = judge(job(rank(0, "failed", failure=CLOSED), *killed, groups=[order]))
    assert (verdict.kind, verdict.blamed) == ("killed", (1, 2))


def test_when_all_are_killed_at_once_nobody_is_blamed() -> None:
    order = group({n: trained(7) for n in range(3)})
    verdict = judge(job(*(rank(n, "gone", silent_for_ns=0, idle_ns=10**8) for n in range(3)), groups=[order]))
    assert (verdict.kind, verdict.blamed, verdict.concerned) == ("killed", (), (0, 1, 2))
