"""Which cause is named where ranks have not launched the same, or wait for each other in several groups."""

from __future__ import annotations

from dataclasses import replace

import pytest

from overlapscope.diagnosis.evidence import Evidence, UnreducedStep
from overlapscope.diagnosis.judge import judge
from overlapscope.trace.schema import Signature
from tests.diagnosis.jobs import (
    CLOSED,
    HELD_UP,
    entry,
    group,
    idle,
    job,
    rank,
    site,
    trained,
)
from tests.ordered import all_reduce, bucket


def diverged(kind: str, mine: list[Signature], theirs: list[Signature], **more: object) -> Evidence:
    """Rank 1 has launched others than ranks 0 and 2, from the second on."""
    same = [entry(1, bucket(0))]
    usual = (*same, *(entry(number, one) for number, one in enumerate(theirs, start=2)))
    other = (*same, *(entry(number, one, line=88) for number, one in enumerate(mine, start=2)))
    order = group({0: usual, 1: other, 2: usual}, first_divergence=2, divergence=kind)
    return job(*(rank(n, "gone") for n in range(3)), groups=[order])


def test_an_extra_collective_is_told_by_what_follows_it() -> None:
    verdict = judge(diverged("signature", [all_reduce(), bucket(1), bucket(2)], [bucket(1), bucket(2), bucket(0)]))
    assert (verdict.kind, verdict.blamed, verdict.number) == ("missing collective", (1,), 2)
    assert "rank 1 has one collective too many" in verdict.sentence
    assert verdict.call_sites is not None
    assert str(verdict.call_sites[1]) == "train.py:88 (main)"
    assert set(verdict.windows or {}) == {0, 1, 2}


def test_a_missing_collective_is_told_by_what_follows_it() -> None:
    verdict = judge(diverged("signature", [bucket(2), bucket(0)], [all_reduce(), bucket(2), bucket(0)]))
    assert verdict.kind == "missing collective"
    assert "rank 1 is one collective short" in verdict.sentence


def test_the_same_place_with_another_size_is_a_different_collective() -> None:
    verdict = judge(diverged("signature", [all_reduce("x", 1001), bucket(2)], [all_reduce("x", 1000), bucket(2)]))
    assert (verdict.kind, verdict.blamed) == ("different collectives", (1,))
    assert "1,001 float32" in verdict.sentence


def test_two_collectives_in_exchanged_places_are_swapped() -> None:
    a, b = all_reduce("a", 5), all_reduce("b", 7)
    assert judge(diverged("signature", [a, b, bucket(2)], [b, a, bucket(2)])).kind == "swapped collectives"


def test_equal_shapes_under_swapped_names_are_swapped() -> None:
    verdict = judge(diverged("names", [all_reduce("a"), all_reduce("b")], [all_reduce("b"), all_reduce("a")]))
    assert (verdict.kind, verdict.blamed) == ("swapped collectives", (1,))


def test_a_bucket_of_another_step_means_that_a_rank_left_one_out() -> None:
    order = group(
        {n: (entry(4, bucket(0), step=2 if n == 1 else 1),) for n in range(3)}, first_divergence=4, divergence="step"
    )
    verdict = judge(job(*(rank(n, "ended") for n in range(3)), groups=[order]))
    assert (verdict.kind, verdict.blamed, verdict.step, verdict.bucket) == ("step behind", (1,), 1, 0)
    assert "rank 1 is in step 2 where ranks 0, 2 are in step 1" in verdict.sentence
    assert "launched no" not in verdict.sentence, "what it launched in step 1 is older than what is known"


def test_a_rank_of_which_all_is_known_and_no_bucket_left_one_out() -> None:
    windows = {n: (entry(3, bucket(0), step=0), entry(4, bucket(0), step=2 if n == 1 else 1)) for n in range(3)}
    order = group(windows, first_divergence=4, divergence="step")
    verdict = judge(job(*(rank(n, "ended") for n in range(3)), groups=[order]))
    assert "rank 1 launched no bucket in step 1" in verdict.sentence


def test_a_bucket_of_another_step_after_one_of_this_means_that_a_rank_has_not_updated() -> None:
    """All ranks have reduced step 1; rank 1 then left its update out, so that it counts one step less."""
    windows = {n: (entry(3, bucket(0), step=1), entry(4, bucket(0), step=1 if n == 1 else 2)) for n in range(3)}
    order = group(windows, first_divergence=4, divergence="step")
    verdict = judge(job(*(rank(n, "ended") for n in range(3)), groups=[order]))
    assert (verdict.kind, verdict.blamed, verdict.step) == ("step behind", (1,), 1)
    assert "rank 1 has reduced again in step 1, without an update of the optimizer in between" in verdict.sentence
    assert "launched no" not in verdict.sentence


def test_a_rank_whose_batch_goes_on_by_two_has_skipped_one() -> None:
    def window(*batches: int) -> list[object]:
        return [replace(entry(n, bucket(0), step=n), batch=batch) for n, batch in enumerate(batches, start=1)]

    windows = {0: window(5, 6, 7), 1: window(15, 17, 18), 2: window(5, 6, 7)}
    order = group(windows, first_divergence=2, divergence="batch")  # type: ignore[arg-type]
    verdict = judge(job(*(rank(n, "ended") for n in range(3)), groups=[order]))
    assert (verdict.kind, verdict.blamed, verdict.step) == ("batch skipped", (1,), 2)


def test_how_far_ranks_are_in_their_data_is_said_where_they_launch_something_else() -> None:
    def window(batch: int, launched: Signature) -> list[object]:
        return [
            replace(entry(1, bucket(0), step=1), batch=5),
            replace(entry(2, launched, step=2), batch=batch),
        ]

    windows = {0: window(6, bucket(0)), 1: window(7, all_reduce()), 2: window(6, bucket(0))}
    order = group(windows, first_divergence=2, divergence="signature")  # type: ignore[arg-type]
    verdict = judge(job(*(rank(n) for n in range(3)), groups=[order]))
    said = "By then they had reached different batches: ranks 0, 2 to batch 6 and rank 1 to batch 7."
    assert said in verdict.evidence
    windows[1] = window(6, all_reduce())
    order = group(windows, first_divergence=2, divergence="signature")  # type: ignore[arg-type]
    assert not any("In their data" in line for line in judge(job(rank(0), rank(1), rank(2), groups=[order])).evidence)


def test_a_rank_that_has_updated_without_reducing_has_skipped_no_batch() -> None:
    def window(*batches: int) -> list[object]:
        return [replace(entry(n, bucket(0), step=n), batch=batch) for n, batch in enumerate(batches, start=1)]

    windows = {0: window(1, 2, 3), 1: window(1, 3, 4), 2: window(1, 2, 3)}
    order = group(windows, first_divergence=2, divergence="batch")  # type: ignore[arg-type]
    unreduced = UnreducedStep(model=0, step=2, call_site=site(20))
    verdict = judge(job(rank(0), rank(1, unreduced=unreduced), rank(2), groups=[order]))
    assert (verdict.kind, verdict.blamed, verdict.step) == ("not reduced", (1,), 2)
    another = replace(unreduced, step=1)
    assert judge(job(rank(0), rank(1, unreduced=another), rank(2), groups=[order])).kind == "batch skipped"


def test_a_rank_whose_batch_does_not_go_on_has_replayed_one_also_if_it_is_not_known_which() -> None:
    def window(*batches: int | None) -> list[object]:
        return [replace(entry(n, bucket(0), step=n), batch=batch) for n, batch in enumerate(batches, start=1)]

    for repeated, number in ((5, 2), (None, 3)):
        windows = {0: window(5, 6, 7), 1: window(15, repeated and 15, 16), 2: window(5, 6, 7)}
        order = group(windows, first_divergence=number, divergence="batch")  # type: ignore[arg-type]
        verdict = judge(job(*(rank(n, "ended") for n in range(3)), groups=[order]))
        assert (verdict.kind, verdict.blamed, verdict.step) == ("batch skipped", (1,), number)


def test_with_two_ranks_a_disagreement_is_nobodys_fault() -> None:
    windows = {0: [entry(1, all_reduce("x", 1000))], 1: [entry(1, all_reduce("x", 1001))]}
    order = group(windows, first_divergence=1, divergence="signature")
    verdict = judge(job(rank(0, "gone"), rank(1, "gone"), groups=[order]))
    assert (verdict.kind, verdict.blamed, verdict.concerned) == ("different collectives", (), (0, 1))


def test_the_disagreement_is_the_cause_and_the_abort_its_consequence() -> None:
    evidence = diverged("signature", [all_reduce()], [bucket(1)])
    failed = replace(evidence.ranks[0], liveness="failed", failure=CLOSED)
    verdict = judge(replace(evidence, ranks=evidence.ranks | {0: failed}))
    assert verdict.kind == "different collectives"
    assert any("without logging an error" in sentence for sentence in verdict.also)


def test_one_rank_being_further_on_is_no_disagreement() -> None:
    ranks = (idle(rank(n, phase="backward", step=2), 0.01) for n in range(3))
    assert judge(job(*ranks, groups=[HELD_UP], is_live=True)).kind == "healthy"


def test_groups_entered_in_different_orders_wait_for_each_other() -> None:
    a = group({0: trained(1, is_waiting=True)}, name="a", ranks=(0, 1))
    b = group({1: trained(1, is_waiting=True)}, name="b", ranks=(0, 1))
    verdict = judge(job(rank(0), rank(1), groups=[a, b]))
    assert (verdict.kind, verdict.blamed, verdict.concerned) == ("groups interleaved", (), (0, 1))
    assert "rank 0 waits in group 'a'" in verdict.sentence


def test_of_interleaved_groups_the_minority_is_named() -> None:
    a = group({0: trained(1, is_waiting=True), 2: trained(1, is_waiting=True)}, name="a", ranks=(0, 1, 2))
    b = group({1: trained(1, is_waiting=True)}, name="b", ranks=(0, 1, 2))
    verdict = judge(job(rank(0), rank(1), rank(2), groups=[a, b]))
    assert (verdict.suspected, verdict.blamed) == ((1,), ())


def test_a_member_that_is_in_the_next_step_has_left_the_collective_of_its_subgroup_out() -> None:
    waits = replace(entry(4, all_reduce("metric"), step=2, is_done=False, line=88), announced_ns=10**6)
    pair = group({0: [waits], 1: [entry(3, all_reduce("metric"), step=1)]}, name="pair", ranks=(0, 1))
    later = [replace(entry(9, bucket(0), step=3, is_done=False), announced_ns=10**9)]
    everyone = group({0: trained(8), 1: later, 2: later}, ranks=(0, 1, 2))
    late = rank(0, step=2, phase="loop")
    verdict = judge(job(late, rank(1, step=3), rank(2, step=3), groups=[everyone, pair]))
    assert (verdict.kind, verdict.blamed, verdict.step, verdict.number) == ("missing collective", (1,), 2, 4)
    assert (verdict.call_sites or {})[0].line == 88


@pytest.mark.parametrize(("batch", "kind"), [(2, "groups interleaved"), (5, "missing collective")])
def test_a_rank_that_is_at_a_later_batch_of_the_same_step_has_left_the_collective_out(batch: int, kind: str) -> None:
    """Gradients are accumulated, so that many batches are one step."""
    before = [entry(1, bucket(0), step=1)]
    waits = replace(entry(4, all_reduce("metric"), step=2, is_done=False), batch=2, announced_ns=10**6)
    pair = group({0: [waits]}, name="pair", ranks=(0, 1))
    further = replace(entry(2, bucket(0), step=2, is_done=False), batch=batch, announced_ns=10**6)
    everyone = group({0: before, 1: [*before, further], 2: [*before, further]}, ranks=(0, 1, 2))
    assert judge(job(rank(0, step=2), rank(1, step=2), rank(2, step=2), groups=[everyone, pair])).kind == kind


def test_lines_that_were_apart_before_the_first_difference_are_said() -> None:
    """An extra forward of DDP on one rank: its buffers are first matched with those of the others' next forward."""
    buffers = Signature(op="broadcast", elements=9, dtype="float32", role="buffers")
    others = [entry(n, one, line=80 + n) for n, one in enumerate([bucket(0), buffers, bucket(0)], start=1)]
    own = [others[0], replace(others[1], call_site=site(99)), entry(3, buffers, line=81)]
    order = group({0: others, 1: own, 2: others}, first_divergence=3, divergence="signature")
    verdict = judge(job(*(rank(n) for n in range(3)), groups=[order]))
    assert verdict.blamed == (1,)
    assert any("Already collective 2 was launched at different lines" in said for said in verdict.evidence)
    assert (verdict.call_sites or {})[1] == site(99)


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
    assert "the send of rank 0 may be one too many" in verdict.alternative


def after_update(step: int, rank_1: list[Signature], **more: object) -> Evidence:
    """Ranks 0 and 2 reduce in a step in which rank 1 has launched something else, after its update."""
    same = tuple(entry(number, bucket(number - 1), step=step - 1) for number in (1, 2))
    usual = (*same, *(entry(number, bucket(number - 3), step=step) for number in (3, 4)))
    other = (*same, *(entry(number, one, step=step + 1, line=88) for number, one in enumerate(rank_1, start=3)))
    order = group({0: usual, 1: other, 2: usual}, first_divergence=3, divergence="signature")
    return job(*(rank(n, "gone") for n in range(3)), groups=[order])


def test_a_rank_that_has_updated_and_not_reduced_is_a_step_behind_whatever_it_launches_next() -> None:
    verdict = judge(after_update(7, [all_reduce()]))
    assert (verdict.kind, verdict.blamed, verdict.step) == ("step behind", (1,), 7)
    assert verdict.sentence.startswith("Rank 1 launched no bucket in step 7: ")


def test_a_rank_whose_log_does_not_reach_back_to_the_step_before_may_have_reduced() -> None:
    evidence = after_update(7, [all_reduce()])
    order = evidence.groups[0]
    windows = {one: window[2:] for one, window in order.windows.items()}
    assert judge(replace(evidence, groups=(replace(order, windows=windows),))).kind == "different collectives"


def test_a_rank_that_has_made_the_default_group_again_waits_there_and_nobody_is_to_blame() -> None:
    old = group({n: trained(9, is_waiting=n != 1) for n in range(3)}, name="0")
    again = group(
        {1: [replace(entry(1, all_reduce(), is_done=False), announced_ns=10**7)]}, name="0 (2)", ranks=(0, 1, 2)
    )
    ranks = [idle(rank(n, step=2), 30) for n in range(3)]
    verdict = judge(job(*ranks, groups=[old, again], is_live=True))
    assert (verdict.kind, verdict.certainty, verdict.blamed) == ("missing collective", "likely", ())
    assert "Rank 1 has called destroy_process_group() and init_process_group() again" in verdict.sentence
    assert verdict.alternative == "ranks 0, 2 may still do the same"


def test_a_forward_begun_where_the_others_reduce_is_explained() -> None:
    buffers = Signature(op="broadcast", elements=9, dtype="float32", role="buffers")
    verdict = judge(diverged("signature", [buffers], [bucket(1)]))
    assert any("rank 1 has begun another one instead of reducing" in said for said in verdict.evidence)
    verdict = judge(diverged("signature", [all_reduce()], [bucket(1)]))
    assert not any("begins a forward" in said for said in verdict.evidence)
