"""Which cause is named, given what is known: a job a test, three ranks unless it says otherwise."""

from __future__ import annotations

from dataclasses import replace

import pytest

from overlapscope.diagnosis.evidence import (
    JOINING,
    Evidence,
    ModelParameters,
    ReportedVerdict,
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


def test_a_job_that_has_come_to_its_end_is_healthy() -> None:
    verdict = judge(job(*(rank(n, "ended") for n in range(3)), groups=[group(dict.fromkeys(range(3), trained(9)))]))
    assert (verdict.kind, verdict.is_fault, verdict.blamed) == ("healthy", False, ())


def test_a_job_that_goes_on_is_healthy_although_ranks_are_not_at_the_same_collective() -> None:
    ranks = (idle(rank(n, phase="backward", step=2), 0.01) for n in range(3))
    assert judge(job(*ranks, groups=[HELD_UP], is_live=True)).kind == "healthy"


def test_a_rank_that_takes_longer_once_is_slow_and_not_stuck() -> None:
    late = idle(rank(1, phase="forward", step=2, since_ns=10**9), 2.0)
    verdict = judge(held_up(late, is_live=True))
    assert (verdict.kind, verdict.is_fault, verdict.blamed) == ("slow", False, ())
    assert "Rank 1 is slow" in verdict.sentence


def test_steps_of_a_minute_are_no_reason_to_call_a_rank_stuck_after_three() -> None:
    late = idle(rank(1, phase="forward", step=2, since_ns=10**9), 180, step_s=60)
    assert judge(held_up(late, is_live=True)).kind == "slow"


# -- before the first step


def test_a_rank_that_has_left_nothing_never_started_if_nobody_got_anything_done_with_it() -> None:
    waiting = group({0: trained(1, is_waiting=True), 1: trained(1, is_waiting=True)}, ranks=(0, 1, 2))
    verdict = judge(job(rank(0), rank(1), groups=[waiting], world=3))
    assert (verdict.kind, verdict.blamed) == ("never started", (2,))


def test_while_a_job_runs_who_is_missing_has_not_joined_so_far() -> None:
    joining = [replace(rank(number, phase=JOINING), idle_ns=11 * 10**9) for number in (0, 1)]
    verdict = judge(job(*joining, world=3, is_live=True))
    assert (verdict.kind, verdict.suspected, verdict.certainty) == ("never started", (2,), "likely")
    assert verdict.sentence.startswith("Rank 2 of 3 has not joined after 11 s")


def test_a_first_step_that_takes_long_is_a_fact_and_no_fault() -> None:
    starting = replace(rank(1, phase="forward", step=0, since_ns=10**9), is_starting=True, idle_ns=6 * 10**9)
    starting = replace(starting, position=replace(starting.position, call_site=site(7)))
    waiting = group({0: trained(1, is_waiting=True), 2: trained(1, is_waiting=True)}, ranks=(0, 1, 2))
    early = judge(job(rank(0), starting, rank(2), groups=[waiting], is_live=True))
    assert (early.kind, early.is_fault) == ("slow", False)
    assert "Rank 1 has been in forward of step 0, at train.py:7 (main) for 6.0 s" in early.sentence
    assert "ranks 0, 2 wait for it" in early.sentence
    later = replace(starting, idle_ns=21 * 10**9)
    late = judge(job(rank(0), later, rank(2), groups=[waiting], is_live=True))
    assert (late.kind, late.certainty) == ("stuck", "likely")


def test_a_rank_whose_folder_is_lost_was_there() -> None:
    logs = group({0: trained(9), 1: trained(9)}, ranks=(0, 1, 2))
    verdict = judge(job(rank(0, "ended"), rank(1, "ended"), groups=[logs], world=3))
    assert verdict.kind == "healthy"
    assert "Rank 2 left no log" in verdict.evidence[-1]


@pytest.mark.parametrize(("sizes", "blamed"), [((4, 3, 3), (0,)), ((2, 2, 2), (2,))])
def test_ranks_that_believe_in_other_world_sizes(sizes: tuple[int, ...], blamed: tuple[int, ...]) -> None:
    verdict = judge(job(*(rank(n, world_size=size) for n, size in enumerate(sizes))))
    assert (verdict.kind, verdict.blamed) == ("wrong world size", blamed)


A, B = ("left.weight", (4, 4), "float32"), ("right.weight", (4, 4), "float32")


def model(*parameters: tuple[str, tuple[int, ...], str], frozen: tuple[str, ...] = ()) -> tuple[ModelParameters, ...]:
    return (ModelParameters(model=0, class_name="Net", parameters=parameters, frozen=frozen),)


def test_equal_shapes_in_another_order_are_another_model_whatever_comes_of_it() -> None:
    closed = rank(1, "failed", models=model(B, A), failure=CLOSED)
    verdict = judge(job(rank(0, "gone", models=model(A, B)), closed, rank(2, "failed", models=model(A, B))))
    assert (verdict.kind, verdict.blamed, verdict.parameters) == ("models differ", (1,), ("left.weight",))
    assert "parameter 0 is 'left.weight' (4×4 float32) on ranks 0, 2 and 'right.weight'" in verdict.sentence
    assert "They hold the same parameters in a different order." in verdict.evidence


def test_of_two_ranks_with_different_models_nobody_is_blamed() -> None:
    verdict = judge(job(rank(0, models=model(A, B)), rank(1, models=model(A))))
    assert (verdict.kind, verdict.blamed, verdict.concerned) == ("models differ", (), (0, 1))
    assert verdict.parameters == ("right.weight",)


def test_a_parameter_that_is_frozen_on_one_rank_is_named() -> None:
    verdict = judge(
        job(
            rank(0, models=model(A, B)), rank(1, models=model(A, frozen=("right.weight",))), rank(2, models=model(A, B))
        )
    )
    assert (verdict.kind, verdict.blamed, verdict.parameters) == ("models differ", (1,), ("right.weight",))


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
    assert "Their logs don't say which of them died first." in verdict.evidence


def test_when_all_are_killed_at_once_nobody_is_blamed_and_it_is_said_that_nobody_saw_it() -> None:
    order = group({n: trained(7) for n in range(3)})
    verdict = judge(job(*(rank(n, "gone", silent_for_ns=0, idle_ns=10**8) for n in range(3)), groups=[order]))
    assert (verdict.kind, verdict.blamed, verdict.concerned) == ("killed", (), (0, 1, 2))
    assert "No rank survived to see the others die." in verdict.evidence


def test_what_a_watchdog_has_seen_is_believed_when_all_are_gone() -> None:
    report = ReportedVerdict(rank=0, time_ns=1, kind="stopped", sentence="Rank 1 is stopped.", blamed=(1,))
    verdict = judge(job(*(rank(n, "gone") for n in range(3)), reports=(report,)))
    assert (verdict.kind, verdict.blamed) == ("stopped", (1,))
    assert "The watchdog of rank 0 reported this while the job ran." in verdict.evidence


def test_nothing_at_all_is_not_healthy() -> None:
    verdict = judge(Evidence(expected_ranks=(0, 1), ranks={}, groups=()))
    assert (verdict.kind, verdict.is_fault) == ("cannot tell", True)
