"""An exception that did not end its rank is the cause if the rank has done nothing since, and it harms nobody else."""

from __future__ import annotations

from dataclasses import replace

import pytest

from overlapscope.diagnosis.evidence import CaughtError, Failure, RankEvidence
from overlapscope.diagnosis.judge import judge
from tests.diagnosis.jobs import (
    AGAIN,
    BEFORE_SECOND,
    CLOSED,
    GAVE_UP,
    HELD_UP,
    IN_QUEUE,
    LATE,
    OF_CHILD,
    OF_TASK,
    OF_THREAD,
    STEP_NS,
    at_batches,
    caught,
    given_up,
    group,
    held_up,
    idle,
    job,
    rank,
    site,
    survivor,
)


@pytest.mark.parametrize(
    "one",
    [
        survivor(OF_THREAD),
        survivor(replace(OF_THREAD, last_step=1)),
        survivor(replace(OF_THREAD, step=0, last_step=0), stacks=IN_QUEUE),
        survivor(OF_TASK),
        survivor(replace(OF_CHILD, last_ns=1), stacks=IN_QUEUE),
        survivor(replace(OF_CHILD, how="caught")),
        survivor(caught("forward")),
        survivor(caught()),
        survivor(AGAIN),
        survivor(AGAIN, is_working=True),
        survivor(replace(AGAIN, failure=replace(AGAIN.failure, time_ns=0), step=1, count=25)),
        survivor(caught(), liveness="ended", idle_ns=None),
        survivor(replace(OF_THREAD, last_step=0), liveness="ended", idle_ns=None),
    ],
    ids=[
        "in a thread",
        "in a thread, in the step before",
        "in a thread that has worked ahead",
        "in a task",
        "in a child process",
        "in a child process that goes on",
        "in forward",
        "in the loop",
        "again and again",
        "again and again, without a pause",
        "again and again, after a try that went well",
        "caught, and the loop left",
        "in a thread, and the loop left",
    ],
)
@pytest.mark.parametrize("is_live", [True, False], ids=["live", "from files"])
def test_the_exception_since_which_a_rank_has_done_nothing_is_named(one: RankEvidence, is_live: bool) -> None:
    verdict = judge(held_up(one, is_live=is_live))
    assert (verdict.kind, verdict.suspected, verdict.certainty) == ("failed", (1,), "likely")
    assert (verdict.step, verdict.call_sites[1]) == (2 if one.liveness == "ended" else verdict.step, site(31))
    assert "ValueError: bad shard" in verdict.sentence


def test_a_rank_that_tries_again_in_its_forward_is_found_though_it_never_stands_still() -> None:
    again = idle(rank(1, phase="forward", step=2, since_ns=9 * STEP_NS, caught=(AGAIN,), is_working=True), 0.1)
    for waited_s, is_named in ((5, True), (1, False)):
        waiting = [idle(rank(number, step=2), waited_s) for number in (0, 2)]
        verdict = judge(job(waiting[0], again, waiting[1], groups=[HELD_UP], is_live=True))
        assert (verdict.kind == "failed") == is_named


@pytest.mark.parametrize(
    "one",
    [
        survivor(caught(step=1)),
        survivor(replace(OF_THREAD, last_step=0)),
        survivor(replace(OF_CHILD, last_ns=1)),
        survivor(caught(), since_ns=STEP_NS + 2),
        survivor(caught(last_ns=1, failure=replace(OF_THREAD.failure, time_ns=1)), since_ns=0),
        survivor(replace(caught(), step=0, count=2)),
        survivor(replace(OF_TASK, step=0, count=2)),
        survivor(replace(AGAIN, step=0, count=60)),
        survivor(replace(OF_THREAD, step=0, last_step=0), OF_THREAD),
        survivor(replace(caught(), failure=replace(CLOSED, time_ns=STEP_NS + 1))),
    ],
    ids=[
        "a step has ended since",
        "a thread that died long ago, and nobody waits for",
        "a child process that nobody waits for",
        "a phase has begun since",
        "a collective was launched since",
        "it did no harm before",
        "tasks that failed before did no harm",
        "it was raised as often in the steps before",
        "another thread failed so before",
        "another rank's end",
    ],
)
def test_an_exception_after_which_a_rank_went_on_is_not_the_cause(one: RankEvidence) -> None:
    verdict = judge(held_up(one))
    assert verdict.kind == "stuck"
    assert "ValueError" not in verdict.sentence


@pytest.mark.parametrize("error", [OF_THREAD, OF_TASK, caught(), AGAIN], ids=lambda error: error.how)
def test_an_exception_that_others_survive_is_not_the_cause(error: CaughtError) -> None:
    ranks = rank(0, step=2, caught=(error,)), survivor(error), rank(2, step=2)
    assert judge(job(*ranks, groups=[HELD_UP])).kind == "stuck"
    fewer = replace(ranks[0], caught=(replace(error, count=1, count_in_step=1),))
    kind = judge(job(fewer, *ranks[1:], groups=[HELD_UP])).kind
    assert kind == ("failed" if error is AGAIN else "stuck")


def test_while_a_job_runs_a_short_pause_after_an_exception_is_no_fault() -> None:
    one = idle(survivor(caught()), 1)
    assert judge(held_up(one, is_live=True)).kind == "slow"


def test_of_an_exception_that_others_have_given_up_on_its_rank_is_still_named() -> None:
    verdict = judge(given_up(survivor(OF_THREAD, liveness="gone", signaled_at_ns=1)))
    assert (verdict.kind, verdict.suspected) == ("failed", (1,))


def test_tries_that_have_all_failed_until_the_others_gave_up_are_certainly_the_cause() -> None:
    verdict = judge(given_up(survivor(AGAIN), is_live=True))
    assert (verdict.kind, verdict.blamed, verdict.certainty) == ("failed", (1,), "certain")
    assert "after 15 s" in verdict.sentence


def test_memory_that_ran_out_and_was_caught_is_that() -> None:
    error = caught("forward", failure=replace(OF_THREAD.failure, type="OutOfMemoryError", message="CUDA out of memory"))
    assert judge(held_up(survivor(error))).kind == "out of memory"


def test_what_a_rank_has_caught_is_said_with_another_fault() -> None:
    order = group({0: GAVE_UP, 1: LATE, 2: GAVE_UP})
    failed = rank(1, "failed", step=2, caught=(OF_CHILD,), failure=Failure(type="EOFError", message="", time_ns=5))
    verdict = judge(job(rank(0, step=2), failed, rank(2, step=2), groups=[order]))
    assert (verdict.kind, verdict.blamed) == ("failed", (1,))
    assert "EOFError" in verdict.sentence
    assert any("ValueError: bad shard" in note for note in verdict.evidence)


@pytest.mark.parametrize(
    ("errors", "suspected"),
    [
        ({1: BEFORE_SECOND}, (1,)),
        ({1: replace(BEFORE_SECOND, step=1, last_step=1)}, (1,)),
        ({1: replace(BEFORE_SECOND, step=4, last_step=4)}, ()),
        ({1: caught("forward")}, ()),
        ({0: BEFORE_SECOND, 1: BEFORE_SECOND}, ()),
        ({1: replace(BEFORE_SECOND, step=1, count=2)}, ()),
    ],
    ids=["just there", "in the step before", "later", "in that collective", "on both", "also in the step before"],
)
def test_of_two_ranks_at_different_batches_the_one_that_has_caught_an_exception_just_there_is_suspected(
    errors: dict[int, CaughtError], suspected: tuple[int, ...]
) -> None:
    evidence = at_batches((1, 2, 3), (1, 3, 4))
    with_errors = {number: replace(evidence.ranks[number], caught=(error,)) for number, error in errors.items()}
    verdict = judge(replace(evidence, ranks=evidence.ranks | with_errors))
    assert (verdict.kind, verdict.step, verdict.suspected, verdict.blamed) == ("batch skipped", 2, suspected, ())
    assert ("ValueError" in verdict.sentence) == bool(suspected)


def test_what_came_out_of_a_pass_of_a_rank_that_is_named_is_said_many_steps_later() -> None:
    evidence = at_batches((1, 2, 3), (1, 3, 4), (1, 2, 3))
    for error, is_said in ((caught("backward", step=0), True), (caught(step=0), False)):
        ended = rank(1, "ended", step=9, caught=(error,))
        verdict = judge(replace(evidence, ranks=evidence.ranks | {1: ended}))
        assert (verdict.kind, verdict.blamed) == ("batch skipped", (1,))
        assert any("ValueError: bad shard" in note for note in verdict.evidence) == is_said
