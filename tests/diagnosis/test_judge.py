"""Which cause is named, given what is known: a job a test, three ranks unless it says otherwise."""

from __future__ import annotations

from dataclasses import replace

import pytest

from overlapscope.diagnosis.evidence import (
    JOINING,
    EarlierVerdict,
    Evidence,
    ModelParameters,
    Unreduced,
)
from overlapscope.diagnosis.judge import judge
from overlapscope.trace.signature import Signature
from tests.diagnosis.jobs import (
    CLOSED,
    HELD_UP,
    entry,
    group,
    held_up,
    idle,
    job,
    rank,
    site,
    trained,
)
from tests.ordered import all_reduce, bucket

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


IN_TORCH = (
    "Current thread 0x00007f (most recent call first):\n"
    '  File "/venv/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py", line 9 in all_reduce\n'
    '  File "/home/me/train.py", line 42 in main\n'
)


@pytest.mark.parametrize(("world", "blamed"), [(3, (1,)), (2, ())])
def test_a_group_that_only_some_ranks_make(world: int, blamed: tuple[int, ...]) -> None:
    """Rank 0 is in new_group of ranks 0 and 1, and rank 1, which has not called it, waits for rank 0 elsewhere."""
    waiting = {number: trained(1, is_waiting=True) for number in range(1, world)}
    ranks = [
        replace(idle(rank(number, phase=None), 5), new_groups=2 if number != 1 else 1, stacks=IN_TORCH)
        for number in range(world)
    ]
    ranks[0] = replace(ranks[0], making_group=(0, 1))
    logs = group(waiting, ranks=range(world))
    verdict = judge(job(*ranks, groups=[logs], is_live=True))
    assert (verdict.kind, verdict.blamed, verdict.certainty) == ("missing collective", blamed, "certain")
    assert verdict.sentence.startswith("Rank 0 waits in new_group([0, 1]) for rank 1, which has not called it")
    all_have = [replace(one, new_groups=2) for one in ranks]
    assert "new_group" not in judge(job(*all_have, groups=[logs], is_live=True)).sentence
    away = [replace(one, stacks="") for one in ranks]
    assert judge(job(*away, groups=[logs], is_live=True)).certainty == "likely"


def test_a_first_step_that_takes_long_is_a_fact_and_no_fault() -> None:
    starting = replace(rank(1, phase="forward", step=0, since_ns=10**9), is_starting=True, idle_ns=6 * 10**9)
    starting = replace(starting, standing=replace(starting.standing, call_site=site(7)))
    waiting = group({0: trained(1, is_waiting=True), 2: trained(1, is_waiting=True)}, ranks=(0, 1, 2))
    early = judge(job(rank(0), starting, rank(2), groups=[waiting], is_live=True))
    assert (early.kind, early.is_fault) == ("slow", False)
    assert "Rank 1 has been in forward of step 0, at train.py:7 (main) for 6.0 s" in early.sentence
    assert "ranks 0 and 2 wait for it" in early.sentence
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
    assert "parameter 0 is 'left.weight' (4×4 float32) on ranks 0 and 2 and 'right.weight'" in verdict.sentence
    assert "They hold the same parameters in a different order." in verdict.evidence


def test_of_two_ranks_with_different_models_nobody_is_blamed() -> None:
    verdict = judge(job(rank(0, models=model(A, B)), rank(1, models=model(A))))
    assert (verdict.kind, verdict.blamed, verdict.concerned) == ("models differ", (), (0, 1))
    assert "rank 0 has a parameter 1, 'right.weight' (4×4 float32), and rank 1 has only 1." in verdict.sentence


def test_a_parameter_that_is_frozen_on_one_rank_is_named() -> None:
    verdict = judge(
        job(
            rank(0, models=model(A, B)), rank(1, models=model(A, frozen=("right.weight",))), rank(2, models=model(A, B))
        )
    )
    assert (verdict.kind, verdict.blamed, verdict.parameters) == ("models differ", (1,), ("right.weight",))


# -- the order of collectives


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
    late = rank(0, step=2, phase="data_wait")
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


def test_a_send_that_nobody_receives_is_a_missing_one() -> None:
    sends = Signature(op="send", elements=10, dtype="float32", peer=1)
    later = [replace(entry(9, bucket(0), step=3, is_done=False), announced_ns=10**9)]
    everyone = group({0: trained(8), 1: later, 2: later}, ranks=(0, 1, 2))
    sent = replace(entry(1, sends, step=2, is_done=False), announced_ns=10**6)
    talk = group({0: [sent]}, name="default", ranks=(0, 1, 2))
    ranks = (rank(0, step=2, phase="data_wait"), rank(1, step=3), rank(2, step=3))
    verdict = judge(replace(job(*ranks, groups=[everyone]), conversations=(talk,)))
    assert (verdict.kind, verdict.suspected, verdict.step) == ("missing collective", (1,), 2)
    assert "the send of rank 0 may be one too many" in verdict.alternative


# -- what harms without stopping anything, and what was seen before


def test_gradients_that_were_never_reduced_are_a_fault_of_a_job_that_ended_well() -> None:
    unreduced = Unreduced(model=0, step=12, call_site=site(20))
    verdict = judge(job(*(rank(n, "ended", unreduced=unreduced) for n in range(3))))
    assert (verdict.kind, verdict.blamed, verdict.step, verdict.is_fault) == ("not reduced", (), 12, True)


def test_ranks_that_were_killed_at_once_are_both_named_whoever_waited_for_whom() -> None:
    order = group({0: trained(7, is_waiting=True), 1: trained(6), 2: trained(7, is_waiting=True)})
    killed = [rank(n, "gone", phase="backward", step=2, heard_ns_ago=600_000_000) for n in (1, 2)]
    verdict = judge(job(rank(0, "failed", failure=CLOSED), *killed, groups=[order]))
    assert (verdict.kind, verdict.blamed) == ("killed", (1, 2))
    assert "Their logs don't say which of them died first." in verdict.evidence


def test_when_all_are_killed_at_once_nobody_is_blamed_and_it_is_said_that_nobody_saw_it() -> None:
    order = group({n: trained(7) for n in range(3)})
    verdict = judge(job(*(rank(n, "gone", heard_ns_ago=0, idle_ns=10**8) for n in range(3)), groups=[order]))
    assert (verdict.kind, verdict.blamed, verdict.concerned) == ("killed", (), (0, 1, 2))
    assert "No rank survived to see the others die." in verdict.evidence


def test_what_a_watchdog_has_seen_is_believed_when_all_are_gone() -> None:
    report = EarlierVerdict(rank=0, time_ns=1, kind="stopped", sentence="Rank 1 is stopped.", blamed=(1,))
    verdict = judge(job(*(rank(n, "gone") for n in range(3)), reports=(report,)))
    assert (verdict.kind, verdict.blamed) == ("stopped", (1,))
    assert "The watchdog of rank 0 reported this while the job ran." in verdict.evidence


def test_nothing_at_all_is_not_healthy() -> None:
    verdict = judge(Evidence(expected_ranks=(0, 1), ranks={}, groups=()))
    assert (verdict.kind, verdict.is_fault) == ("cannot tell", True)
