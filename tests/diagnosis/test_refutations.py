"""A verdict that the evidence refutes is not given, whichever rule has found it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given

from overlapscope.diagnosis.evidence import Evidence, Failure, ModelParameters, RankEvidence, ReportedVerdict
from overlapscope.diagnosis.judge import judge
from overlapscope.diagnosis.refutations import is_refuted
from overlapscope.diagnosis.verdict import FaultKind, Verdict
from overlapscope.diagnosis.wait_graph import Facts
from tests.diagnosis.jobs import CLOSED, IN_LOADER, group, held_up, idle, job, rank, trained
from tests.diagnosis.test_bad_ends import jobs

OWN = Failure(type="ValueError", message="no such label")
LATE = idle(rank(1, phase="loop", step=2, since_ns=10**9, stacks=IN_LOADER), 5)


@pytest.mark.parametrize(
    ("kind", "true_of", "false_of"),
    [
        ("uneven inputs", rank(1, "ended"), rank(1, "ended", signaled_at_ns=1)),
        ("uneven inputs", rank(1, "ended"), rank(1, "failed", failure=OWN)),
        ("waits for data", LATE, replace(LATE, idle_ns=10**8)),
        ("stuck", LATE, replace(LATE, is_working=True)),
        ("stuck", LATE, replace(LATE, unrecorded_because="a full disk")),
        ("stopped", rank(1, "stopped"), rank(1, "sleeping")),
        ("holds the GIL", rank(1, "running"), rank(1, "running", silent_for_ns=0)),
        ("killed", rank(1, "gone", exit_status=-9), rank(1, "gone", exit_status=1)),
        ("killed", rank(1, "gone"), rank(1, "gone", exit_status=-15, signaled_at_ns=1)),
        ("failed", rank(1, "failed", failure=OWN), rank(1, "failed", failure=CLOSED)),
        ("failed", rank(1, "failed", exit_status=3), rank(1, "ended", exit_status=0)),
    ],
)
def test_each_kind_has_evidence_with_which_it_cannot_be_true(
    kind: FaultKind, true_of: RankEvidence, false_of: RankEvidence
) -> None:
    for one, expected in ((true_of, False), (false_of, True)):
        facts = Facts(held_up(one, is_live=True))
        for verdict in (
            Verdict(kind=kind, sentence="", blamed=(1,)),
            Verdict(kind=kind, sentence="", alternative="it may not be", suspected=(1,)),
        ):
            assert is_refuted(facts, verdict) is expected


def test_a_rank_with_collectives_has_started_and_a_bucket_in_the_log_was_launched() -> None:
    model = ModelParameters(model=0, class_name="Net", parameters=())
    facts = Facts(held_up(replace(LATE, models=(model,))))
    assert is_refuted(facts, Verdict(kind="never started", sentence="", blamed=(1,)))
    launched = Verdict(kind="gradients never ready", sentence="", blamed=(1,), bucket=2, step=1)
    assert is_refuted(facts, launched)
    assert not is_refuted(facts, replace(launched, step=2))


@pytest.mark.parametrize(("calls", "is_right"), [(1, False), (2, True)])
def test_ranks_that_have_trained_together_disagree_on_the_world_size_only_of_a_later_call(
    calls: int, is_right: bool
) -> None:
    ranks = [rank(number, "gone", world_size=2 + number, init_calls=calls, pid=7 + number) for number in range(2)]
    verdict = judge(job(*ranks, groups=[group({0: trained(9), 1: trained(9)})]))
    assert (verdict.kind == "wrong world size") == is_right


def test_what_was_reported_and_does_not_stop_a_job_is_not_forgotten_when_all_ranks_finish() -> None:
    """The log keeps the latest collectives only; the watchdog has seen them all."""
    same = group({0: trained(9), 1: trained(9)})
    ends = [rank(number, "ended") for number in range(2)]
    said = ReportedVerdict(
        rank=0, time_ns=1, kind="swapped collectives", sentence="Two sums are mixed up.", blamed=(1,)
    )
    verdict = judge(job(*ends, groups=[same], reports=(said,)))
    assert (verdict.kind, verdict.blamed, verdict.sentence) == ("swapped collectives", (1,), "Two sums are mixed up.")
    passed = replace(said, kind="stuck", alternative="it may go on", blamed=(), suspected=(1,))
    assert judge(job(*ends, groups=[same], reports=(passed,))).kind == "healthy"


@given(jobs())
def test_no_verdict_is_given_that_is_refuted(evidence: Evidence) -> None:
    assert not is_refuted(Facts(evidence), judge(evidence))
