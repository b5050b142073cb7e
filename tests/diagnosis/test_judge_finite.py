"""Gradients that were not finite: whose they were first, and when that is no fault."""

from __future__ import annotations

from dataclasses import replace

import pytest

from overlapscope.diagnosis.evidence import Evidence, NonFiniteGradients, UnreducedStep
from overlapscope.diagnosis.judge import judge
from tests.diagnosis.jobs import DIFFERENCE, DRIFTED, job, rank

FIRST = NonFiniteGradients(
    model=0,
    step=12,
    bucket=1,
    parameters=("head.weight",),
    tensors=1,
    has_nan=True,
    weights_after=("head.weight",),
    finite_steps=(10, 11),
)
FOLLOWING = NonFiniteGradients(
    model=0,
    step=13,
    bucket=0,
    parameters=("head.bias",),
    tensors=8,
    has_nan=True,
    weights_before=("head.weight",),
    finite_steps=(10, 11, 12),
)
LATE = replace(FOLLOWING, step=16, unseen_since_step=9, finite_steps=(0, 8))
"""Seen by a rank that looks at one step in eight."""


def ended(*found: tuple[NonFiniteGradients, ...], **more: object) -> Evidence:
    return job(*(rank(number, "ended", non_finite=one) for number, one in enumerate(found)), **more)


@pytest.mark.parametrize("world", [2, 3])
def test_the_rank_that_had_it_first_is_blamed_as_that_is_no_disagreement(world: int) -> None:
    verdict = judge(ended((FOLLOWING,), (FIRST,), *[(FOLLOWING,)] * (world - 2)))
    assert (verdict.kind, verdict.certainty, verdict.blamed, verdict.step) == ("not finite", "certain", (1,), 12)
    assert (verdict.bucket, verdict.parameters) == (1, ("head.weight",))


def test_where_all_ranks_had_it_in_one_step_nobody_is_blamed() -> None:
    verdict = judge(ended((FIRST,), (FIRST,)))
    assert (verdict.kind, verdict.blamed, verdict.step) == ("not finite", (), 12)


def test_what_was_only_seen_in_the_weights_has_no_rank_but_parameters() -> None:
    verdict = judge(ended((FOLLOWING,), (FOLLOWING,)))
    assert (verdict.kind, verdict.blamed, verdict.step) == ("not finite", (), 12)
    assert verdict.parameters == ("head.weight",)


def test_a_rank_that_never_saw_the_weights_again_is_blamed_by_what_the_others_saw() -> None:
    verdict = judge(ended((FOLLOWING,), (replace(FIRST, weights_after=()),), (FOLLOWING,)))
    assert (verdict.kind, verdict.blamed, verdict.step) == ("not finite", (1,), 12)


def test_weights_that_were_wrong_from_the_start_are_in_the_first_step() -> None:
    verdict = judge(ended(*[(replace(FOLLOWING, step=0),)] * 2))
    assert (verdict.kind, verdict.blamed, verdict.step) == ("not finite", (), 0)


@pytest.mark.parametrize("harmless", [replace(FIRST, weights_after=()), replace(FIRST, weights_after=(), last_step=12)])
def test_an_update_that_was_left_out_is_a_note(harmless: NonFiniteGradients) -> None:
    verdict = judge(ended((), (harmless,)))
    assert verdict.kind == "healthy"
    (remark,) = verdict.remarks
    assert (remark.kind, remark.ranks, remark.step) == ("gradients not finite", (1,), 12)


def test_weights_that_were_restored_are_a_note() -> None:
    verdict = judge(ended((replace(FOLLOWING, last_step=15),), (replace(FIRST, last_step=15),)))
    assert verdict.kind == "healthy"
    assert [one.ranks for one in verdict.remarks] == [(0,), (1,)]
    assert all("step 15" in one.sentence for one in verdict.remarks)


def test_replicas_that_had_drifted_before_are_the_cause() -> None:
    drifted = replace(DRIFTED, difference=replace(DIFFERENCE, equal_step=3, differs_step=5))
    verdict = judge(ended((FOLLOWING,), (FIRST,), (FOLLOWING,), replicas=(drifted,)))
    assert verdict.kind == "replicas differ"


def test_gradients_that_were_not_reduced_before_are_the_cause() -> None:
    evidence = ended((FOLLOWING,), (FIRST,), (FOLLOWING,))
    lost = UnreducedStep(model=0, step=3, call_site=None)
    ranks = {number: replace(one, unreduced=(lost,)) for number, one in evidence.ranks.items()}
    assert judge(replace(evidence, ranks=ranks)).kind == "not reduced"


@pytest.mark.parametrize("world", [2, 3])
def test_ranks_whose_files_are_lost_are_not_said_to_have_been_finite(world: int) -> None:
    lost = judge(ended((), *[(FIRST,)] * (world - 1)))
    assert (lost.kind, lost.blamed, lost.step) == ("not finite", (), 12)
    missing = judge(job(*(rank(n, "ended", non_finite=(FIRST,)) for n in range(1, world)), world=world))
    assert (missing.kind, missing.blamed, missing.step) == ("not finite", (), 12)


def test_a_rank_that_did_not_look_in_that_step_is_not_said_to_have_been_finite() -> None:
    verdict = judge(ended((LATE,), (FIRST,)))
    assert (verdict.kind, verdict.blamed, verdict.concerned, verdict.step) == ("not finite", (), (1,), 12)
    assert any("rank 0" in line and "not known" in line for line in verdict.evidence)


def test_a_rank_is_blamed_if_one_that_did_look_was_finite_and_no_more_is_said_of_the_others() -> None:
    verdict = judge(ended((LATE,), (FIRST,), (FOLLOWING,)))
    assert (verdict.kind, verdict.blamed, verdict.step) == ("not finite", (1,), 12)
    assert any("rank 0" in line and "not known" in line for line in verdict.evidence)
    assert any("rank 2" in line and "were finite" in line for line in verdict.evidence)


def test_what_was_seen_after_steps_that_were_skipped_is_since_one_of_them() -> None:
    verdict = judge(ended((LATE,), (LATE,)))
    assert (verdict.kind, verdict.blamed, verdict.step, verdict.last_step) == ("not finite", (), 9, 15)
    assert "steps 9 to 15" in verdict.sentence


def test_weights_that_were_not_seen_after_that_step_have_been_wrong_since_it_or_a_later_one() -> None:
    verdict = judge(ended((LATE,), (replace(FIRST, weights_after=()),)))
    assert (verdict.kind, verdict.blamed, verdict.step, verdict.last_step) == ("not finite", (), 12, 15)
    assert "steps 12 to 15" in verdict.sentence


def test_weights_that_were_restored_after_skipped_steps_are_said_to_have_been_wrong_for_up_to_so_many_more() -> None:
    verdict = judge(ended((replace(LATE, last_step=20),), (replace(LATE, last_step=20),)))
    assert verdict.kind == "healthy"
    said = [one.sentence for one in verdict.remarks]
    assert len(said) == 2
    assert all("step 16" in one and "7 steps" in one and "step 20" in one for one in said)
