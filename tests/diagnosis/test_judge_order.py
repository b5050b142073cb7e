"""Which cause is named where ranks have not launched the same, or wait for each other in several groups."""

from __future__ import annotations

from dataclasses import replace

import pytest

from overlapscope.diagnosis.evidence import Evidence, UnreducedStep
from overlapscope.diagnosis.judge import judge
from overlapscope.trace.collective_log import Signature
from tests.diagnosis.jobs import after_update, at_batches, diverged, entry, group, in_steps, job, rank, site, trained
from tests.ordered import all_reduce, bucket


def test_an_extra_collective_is_told_by_what_follows_it() -> None:
    verdict = judge(diverged("signature", [all_reduce(), bucket(1), bucket(2)], [bucket(1), bucket(2), bucket(0)]))
    assert (verdict.kind, verdict.blamed, verdict.number) == ("missing collective", (1,), 2)
    assert verdict.call_sites[1] == site(88)
    assert set(verdict.windows) == {0, 1, 2}


def test_two_collectives_in_exchanged_places_are_swapped() -> None:
    a, b = all_reduce("a", 5), all_reduce("b", 7)
    assert judge(diverged("signature", [a, b, bucket(2)], [b, a, bucket(2)])).kind == "swapped collectives"


def test_of_interleaved_groups_the_minority_is_named() -> None:
    a = group({0: trained(1, is_waiting=True), 2: trained(1, is_waiting=True)}, name="a", ranks=(0, 1, 2))
    b = group({1: trained(1, is_waiting=True)}, name="b", ranks=(0, 1, 2))
    verdict = judge(job(rank(0), rank(1), rank(2), groups=[a, b]))
    assert (verdict.suspected, verdict.blamed) == ((1,), ())


def test_a_rank_whose_batch_goes_on_by_two_has_skipped_one_and_one_whose_batch_stays_has_replayed_it() -> None:
    """Also if it is not known which."""
    usual = (5, 6, 7)
    for own, number in (((15, 17, 18), 2), ((15, 15, 16), 2), ((15, None, 16), 3)):
        verdict = judge(at_batches(usual, own, usual, number=number))
        assert (verdict.kind, verdict.blamed, verdict.step) == ("batch skipped", (1,), number)


def test_a_rank_that_has_updated_without_reducing_has_skipped_a_batch_of_another_step() -> None:
    evidence = at_batches((1, 2, 3), (1, 3, 4), (1, 2, 3))
    unreduced = UnreducedStep(model=0, step=1, call_site=site(20))
    assert judge(replace(evidence, ranks=evidence.ranks | {1: rank(1, unreduced=(unreduced,))})).kind == "batch skipped"


@pytest.mark.parametrize(("batch", "kind"), [(2, "groups interleaved"), (5, "missing collective")])
def test_a_rank_that_is_at_a_later_batch_of_the_same_step_has_left_the_collective_out(batch: int, kind: str) -> None:
    """Gradients are accumulated, so that many batches are one step."""
    before = [entry(1, bucket(0), step=1)]
    waits = replace(entry(4, all_reduce("metric"), step=2, is_done=False), batch=2, announced_ns=10**6)
    pair = group({0: [waits]}, name="pair", ranks=(0, 1))
    further = replace(entry(2, bucket(0), step=2, is_done=False), batch=batch, announced_ns=10**6)
    everyone = group({0: before, 1: [*before, further], 2: [*before, further]}, ranks=(0, 1, 2))
    assert judge(job(rank(0, step=2), rank(1, step=2), rank(2, step=2), groups=[everyone, pair])).kind == kind


@pytest.mark.parametrize("was_answered_before", [False, True])
def test_a_send_that_nobody_receives_is_a_missing_one_or_one_too_many(was_answered_before: bool) -> None:
    sends = Signature(op="send", elements=10, dtype="float32", peer=1)
    later = [replace(entry(9, bucket(0), step=3, is_done=False), announced_ns=10**9)]
    everyone = group({0: trained(8), 1: later, 2: later}, ranks=(0, 1, 2))
    sent = replace(entry(1, sends, step=2, is_done=False), announced_ns=10**6)
    before = [replace(entry(0, sends, step=1), announced_ns=10**5)] if was_answered_before else []
    talk = group({0: [*before, sent]}, name="default", ranks=(0, 1, 2))
    ranks = (rank(0, step=2, phase="loop"), rank(1, step=3), rank(2, step=3))
    verdict = judge(replace(job(*ranks, groups=[everyone]), point_to_point_orders=(talk,)))
    suspected = (1,) if was_answered_before else ()
    assert (verdict.kind, verdict.suspected, verdict.step) == ("missing collective", suspected, 2)
    assert verdict.certainty == "likely"


def test_a_rank_whose_log_does_not_reach_back_to_the_step_before_may_have_reduced() -> None:
    evidence = after_update(7, [all_reduce()])
    order = evidence.groups[0]
    windows = {one: window[2:] for one, window in order.windows.items()}
    assert judge(replace(evidence, groups=(replace(order, windows=windows),))).kind == "different collectives"


@pytest.mark.parametrize(
    ("evidence", "kind", "suspected"),
    [
        (in_steps((9, 10, 11, 12), (9, 10, 11, 13), (9, 10, 11, 13)), "step behind", (1, 2)),
        (at_batches((0, 1, 2, 3), (0, 1, 2, 4), (0, 1, 2, 4), number=4), "batch skipped", (1, 2)),
    ],
    ids=["a step", "a batch"],
)
def test_most_ranks_are_suspected_if_they_have_left_out_what_they_always_did(
    evidence: Evidence, kind: str, suspected: tuple[int, ...]
) -> None:
    verdict = judge(evidence)
    assert (verdict.kind, verdict.suspected, verdict.blamed) == (kind, suspected, ())


@pytest.mark.parametrize(
    "evidence",
    [
        in_steps((9, 10, 11, 12), (9, 10, 11, 12), (9, 10, 11, 13)),
        at_batches((0, 1, 2, 4), (0, 1, 2, 4), (0, 1, 2, 5), number=4),
        at_batches((0, 1, 2, 3), (0, 1, 2, 3), (0, 1, 2, 4), number=4),
        at_batches((0, 1, 2, 3), (0, 1, 2, 3), (0, 1, 2, 2), number=4),
    ],
    ids=["one left out a step", "one left out a batch more", "one left out a batch", "one has a batch again"],
)
def test_one_that_has_left_out_what_the_others_did_is_blamed(evidence: Evidence) -> None:
    assert judge(evidence).blamed == (2,)


def test_one_that_does_now_and_then_what_the_others_leave_out_is_blamed() -> None:
    assert judge(diverged("signature", [all_reduce(), bucket(1)], [bucket(1), bucket(2)])).blamed == (1,)


def test_a_window_of_two_steps_tells_that_most_ranks_have_left_out_a_batch() -> None:
    windows = {n: [entry(4, bucket(0), step=11), entry(5, bucket(0), step=12)] for n in range(3)}
    behind = [replace(one, batch=one.step + 1) for one in windows[0]]
    ahead = [behind[0], replace(behind[1], batch=14)]
    for one, several, named in ((behind, ahead, (0, 2)), (ahead, behind, (1,))):
        order = group({0: several, 1: one, 2: several}, first_divergence=5, divergence="batch")
        verdict = judge(job(*(rank(n, "ended") for n in range(3)), groups=[order]))
        assert (verdict.kind, verdict.named) == ("batch skipped", named)


@pytest.mark.parametrize(
    ("steps_before", "blamed"),
    [({0: (1, 4, 7, 10), 1: (1, 4, 7, 10)}, (2,)), ({0: (0, 4, 8, 12)}, ()), ({0: (0, 3, 8, 12)}, (2,)), ({}, (2,))],
    ids=["in its turn", "a step too soon", "in no turn", "unknown"],
)
def test_a_majority_that_launches_what_comes_every_few_steps_a_step_too_soon_proves_nothing(
    steps_before: dict[int, tuple[int, ...]], blamed: tuple[int, ...]
) -> None:
    """It may have left out an update earlier, and the rank that goes on as before is not to blame."""
    now = 13 if steps_before.get(0, ())[:2] == (1, 4) else 15
    shown, further = [entry(9, all_reduce("loss"), step=now)], [entry(9, bucket(0), step=now + 1)]
    order = group({0: shown, 1: shown, 2: further}, first_divergence=9, divergence="signature")
    verdict = judge(job(*(rank(n, "gone") for n in range(3)), groups=[replace(order, steps_before=steps_before)]))
    assert (verdict.kind, verdict.blamed) == ("different collectives", blamed)


@pytest.mark.parametrize(("latest", "blamed"), [(70, ()), (66, (2,))], ids=["an update too few", "between updates"])
def test_a_majority_with_more_batches_since_its_latest_update_than_usual_proves_nothing(
    latest: int, blamed: tuple[int, ...]
) -> None:
    """Gradients of four batches are accumulated, and a loss is shown now and then."""
    updates = [replace(entry(number, bucket(0), step=step), batch=4 * step - 1) for number, step in ((7, 15), (8, 16))]
    shown = [*updates, replace(entry(9, all_reduce("loss"), step=17), batch=latest)]
    reduced = [*updates, replace(entry(9, bucket(0), step=17), batch=67)]
    order = group({0: shown, 1: shown, 2: reduced}, first_divergence=9, divergence="signature")
    verdict = judge(job(*(rank(n, "gone") for n in range(3)), groups=[order]))
    assert (verdict.kind, verdict.blamed) == ("different collectives", blamed)
