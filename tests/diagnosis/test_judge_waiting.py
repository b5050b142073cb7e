"""Which cause is named where ranks wait for others: in a data loader, for gradients, in no_sync(), elsewhere."""

from __future__ import annotations

from dataclasses import replace

import pytest

from overlapscope.diagnosis.evidence import (
    Evidence,
    ExitCall,
    Failure,
    InterruptedBackward,
    RankEvidence,
    UnreadyParameter,
)
from overlapscope.diagnosis.judge import judge
from overlapscope.diagnosis.wait_graph import Facts
from overlapscope.trace.schema import Signature
from tests.diagnosis.jobs import (
    CLOSED,
    HELD_UP,
    IN_LOADER,
    LATE,
    TIMED_OUT,
    WAITING,
    entry,
    group,
    held_up,
    idle,
    job,
    rank,
    site,
    trained,
)


def test_a_rank_in_its_data_loader_waits_for_data() -> None:
    late = rank(1, phase="loop", step=2, since_ns=10**9, stacks=IN_LOADER)
    verdict = judge(held_up(idle(late, 5), is_live=True))
    assert (verdict.kind, verdict.suspected, verdict.step, verdict.number) == ("waits for data", (1,), 2, 7)
    assert "ranks 0, 2 wait in collective 7" in verdict.sentence


@pytest.mark.parametrize(
    ("file", "said"),
    [
        ("/usr/lib/python3.11/threading.py", "has been waiting for a lock or another thread"),
        ("/usr/lib/python3.11/socket.py", "has been waiting for a socket"),
        ("/usr/lib/python3.11/subprocess.py", "has been waiting for another process"),
        ("/venv/lib/python3.11/site-packages/torch/serialization.py", "has been reading or writing a file"),
        ("/venv/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py", "in a call of torch.distributed"),
        ("/home/me/model.py", "has made no progress"),
    ],
)
def test_what_else_a_rank_does_between_two_steps_is_no_wait_for_data(file: str, said: str) -> None:
    stacks = (
        "Current thread 0x00007f (most recent call first):\n"
        f'  File "{file}", line 320 in wait\n'
        '  File "/home/me/train.py", line 12 in main\n'
    )
    late = rank(1, phase="loop", step=2, since_ns=10**9, stacks=stacks)
    verdict = judge(held_up(idle(late, 5), is_live=True))
    assert verdict.kind == "stuck"
    assert said in verdict.sentence
    assert "(between steps 1 and 2)" in verdict.sentence


def test_a_rank_in_forward_is_stuck_there() -> None:
    verdict = judge(held_up(idle(rank(1, phase="forward", step=2, since_ns=10**9), 5), is_live=True))
    assert (verdict.kind, verdict.blamed, verdict.suspected) == ("stuck", (), (1,))


def test_who_ended_while_the_others_wait_ran_out_of_data() -> None:
    verdict = judge(held_up(rank(1, "ended", phase="loop", step=2, since_ns=10**9)))
    assert (verdict.kind, verdict.blamed, verdict.step) == ("uneven inputs", (1,), 2)


def test_peers_that_timed_out_waited_for_a_rank_that_was_still_there() -> None:
    loader = rank(1, "gone", phase="loop", step=2, since_ns=10**9, stacks=IN_LOADER)
    ranks = (rank(0, "failed", step=2, failure=TIMED_OUT), loader, rank(2, "failed", step=2, failure=TIMED_OUT))
    verdict = judge(job(*ranks, groups=[HELD_UP]))
    assert (verdict.kind, verdict.blamed) == ("waits for data", (1,))


def test_a_collective_that_all_have_entered_and_that_never_ends_is_nobodys_fault() -> None:
    inside = group(dict.fromkeys(range(3), WAITING))
    verdict = judge(job(*(idle(rank(n, step=2), 9) for n in range(3)), groups=[inside], is_live=True))
    assert (verdict.kind, verdict.blamed, verdict.number) == ("stuck", (), 9)


UNREADY = (
    UnreadyParameter(model=0, name="branch.weight", module="branch (Linear)", bucket=1),
    UnreadyParameter(model=0, name="branch.bias", module="branch (Linear)", bucket=1),
)


@pytest.mark.parametrize(("seen_in", "is_said"), [(2, True), (3, True), (1, False), (None, False)])
def test_who_was_frozen_after_it_was_wrapped_is_said_to_be(seen_in: int | None, is_said: bool) -> None:
    at_bucket_1 = group({0: WAITING, 1: trained(7), 2: WAITING})
    unready = (replace(UNREADY[0], frozen_in=seen_in), UNREADY[1])
    late = rank(1, "sleeping", phase="optimizer", step=2, since_ns=10**9, unready=unready)
    verdict = judge(job(rank(0, step=2), late, rank(2, step=2), groups=[at_bucket_1]))
    assert ("branch.weight is frozen on rank 1 (requires_grad is False)" in verdict.sentence) == is_said


def test_an_exception_that_came_out_of_the_backward_is_the_reason() -> None:
    at_bucket_1 = group({0: WAITING, 1: trained(7), 2: WAITING})
    left = InterruptedBackward(step=2, call_site=site(30))
    next_forward = idle(rank(1, "sleeping", phase="forward", step=2, since_ns=10**9, unready=UNREADY), 5)
    late = replace(next_forward, interrupted_backwards=(InterruptedBackward(step=1, call_site=site(20)), left))
    verdict = judge(job(rank(0, step=2), late, rank(2, step=2), groups=[at_bucket_1], is_live=True))
    assert (verdict.kind, verdict.certainty, verdict.step) == ("gradients never ready", "certain", 2)
    assert f"exception at {site(30)}" in verdict.sentence
    assert (verdict.call_sites or {})[1] == site(30)
    assert "Log the exception" in verdict.advice[0]


def test_a_backward_that_ctrl_c_has_ended_is_not_said_to_have_left_gradients_out() -> None:
    trace = '  File "torch/autograd/graph.py", line 979, in _engine_run_backward\nKeyboardInterrupt\n'
    interrupted = Failure(type="KeyboardInterrupt", message="", traceback=trace, time_ns=2 * 10**9)
    late = rank(1, "failed", phase="loop", step=2, since_ns=10**9, unready=UNREADY, failure=interrupted)
    assert judge(held_up(late)).kind != "gradients never ready"
    elsewhere = replace(interrupted, traceback='  File "train.py", line 42, in main\n')
    assert judge(held_up(replace(late, failure=elsewhere))).kind == "gradients never ready"


def test_an_exception_is_no_reason_for_what_a_second_attempt_leaves_out() -> None:
    left = (InterruptedBackward(step=2, call_site=site(30)),)
    again = idle(rank(1, "sleeping", phase="backward", step=2, since_ns=10**9, unready=UNREADY), 5)
    verdict = judge(held_up(replace(again, interrupted_backwards=left), is_live=True))
    assert (verdict.kind, verdict.certainty) == ("gradients never ready", "likely")
    assert "exception" not in verdict.sentence


def test_exceptions_that_came_out_of_earlier_backwards_are_no_reason_but_are_noticed() -> None:
    left = (InterruptedBackward(step=1, call_site=site(20)),)
    late = rank(1, "ended", phase="loop", step=2, since_ns=10**9)
    verdict = judge(held_up(replace(late, interrupted_backwards=left)))
    assert verdict.kind == "uneven inputs"
    assert len(verdict.evidence) == len(judge(held_up(late)).evidence) + 1
    assert any("step 1" in note and str(site(20)) in note for note in verdict.evidence)


def test_gradients_that_never_came_are_named_with_their_modules() -> None:
    at_bucket_1 = group({0: WAITING, 1: trained(7), 2: WAITING})
    late = rank(1, "sleeping", phase="optimizer", step=2, since_ns=10**9, unready=UNREADY)
    verdict = judge(job(rank(0, step=2), late, rank(2, step=2), groups=[at_bucket_1]))
    assert (verdict.kind, verdict.blamed, verdict.bucket) == ("gradients never ready", (1,), 1)
    assert (verdict.parameters, verdict.step) == (("branch.weight", "branch.bias"), 2)
    assert "branch (Linear)" in verdict.sentence


def test_ddps_own_complaint_about_the_last_backward_is_a_gradient_that_never_came() -> None:
    complaint = Failure(type="RuntimeError", message="Expected to have finished reduction in the prior iteration ...")
    late = rank(1, "failed", phase="forward", step=3, failure=complaint, unready=UNREADY)
    verdict = judge(job(rank(0, "failed", failure=CLOSED), late, rank(2, "failed", failure=CLOSED)))
    assert (verdict.kind, verdict.blamed) == ("gradients never ready", (1,))


def test_a_backward_that_may_still_run_is_not_said_to_have_left_parameters_without_gradients() -> None:
    late = idle(rank(1, "sleeping", phase="backward", step=2, since_ns=10**9, unready=UNREADY), 5)
    verdict = judge(held_up(late, is_live=True))
    assert (verdict.kind, verdict.certainty) == ("gradients never ready", "likely")
    assert "Rank 1 has not launched bucket 1" in verdict.sentence
    assert "may still have been running" in verdict.alternative
    assert judge(held_up(replace(late, cpu_share=0.9), is_live=True)).kind == "slow"


@pytest.mark.parametrize(
    ("idle_s", "step_s", "longest_pause_s", "kind"),
    [(5, 0.1, 0, "slow"), (59, 0.1, 0, "slow"), (61, 0.1, 0, "stuck"), (61, 10, 0, "slow"), (100, 0.1, 40, "slow")],
)
def test_a_busy_rank_is_only_slow_until_nothing_in_its_history_explains_it(
    idle_s: float, step_s: float, longest_pause_s: float, kind: str
) -> None:
    late = replace(
        idle(rank(1, phase="loop", step=2, since_ns=10**9), idle_s, step_s),
        is_working=True,
        longest_recovered_stall_ns=round(longest_pause_s * 1e9),
    )
    verdict = judge(held_up(late, is_live=True))
    assert (verdict.kind, verdict.certainty, verdict.blamed) == (kind, "likely", ())
    assert "busy" in verdict.sentence
    assert verdict.step == 2


def test_of_a_job_that_was_ended_a_busy_rank_is_suspected_and_not_said_to_have_made_no_progress() -> None:
    late = replace(idle(rank(1, "gone", phase="loop", step=2, since_ns=10**9), 20), is_working=True)
    ranks = (rank(0, "failed", step=2, failure=CLOSED), late, rank(2, "failed", step=2, failure=CLOSED))
    verdict = judge(job(*ranks, groups=[HELD_UP]))
    assert (verdict.kind, verdict.suspected, verdict.certainty) == ("stuck", (1,), "likely")
    assert "Rank 1 has been busy without getting anywhere for 20 s" in verdict.sentence


def test_who_was_waited_for_until_the_time_was_up_is_to_blame() -> None:
    late = idle(rank(1, "gone", phase="loop", step=2, since_ns=10**9, stacks=IN_LOADER), 20)
    ranks = (rank(0, "failed", step=2, failure=TIMED_OUT), late, rank(2, "failed", step=2, failure=TIMED_OUT))
    verdict = judge(job(*ranks, groups=[HELD_UP]))
    assert (verdict.kind, verdict.blamed, verdict.certainty) == ("waits for data", (1,), "certain")


def test_what_follows_an_update_belongs_to_its_step() -> None:
    late = idle(rank(1, phase="loop", step=2, since_ns=10**9), 5)
    for has_begun_next_iteration, step, said in (
        (False, 1, "after the update of step 1"),
        (True, 2, "before the forward of step 2"),
    ):
        position = replace(late.position, has_begun_next_iteration=has_begun_next_iteration)
        verdict = judge(held_up(replace(late, position=position), is_live=True))
        assert verdict.step == step
        assert said in verdict.sentence


@pytest.mark.parametrize("is_caught", [False, True])
def test_a_rank_that_failed_in_backward_has_unready_gradients_because_of_that(is_caught: bool) -> None:
    own = Failure(type="RuntimeError", message="element 0 of tensors does not require grad", call_site=site(30))
    ended = {"exit_status": 1, "exit_call": ExitCall(status=1, caught=own)} if is_caught else {"failure": own}
    late = rank(1, "failed", phase="optimizer", step=2, unready=UNREADY, **ended)
    ranks = (rank(0, "failed", step=2, failure=CLOSED), late, rank(2, "failed", step=2, failure=CLOSED))
    verdict = judge(job(*ranks, groups=[HELD_UP]))
    assert (verdict.kind, verdict.blamed, verdict.also) == ("failed", (1,), ())


def test_a_rank_that_was_killed_in_backward_has_unready_gradients_for_another_reason() -> None:
    late = rank(1, "gone", phase="backward", step=2, unready=UNREADY)
    ranks = (rank(0, "failed", step=2, failure=CLOSED), late, rank(2, "failed", step=2, failure=CLOSED))
    assert judge(job(*ranks, groups=[HELD_UP])).kind == "killed"


def test_a_rank_that_never_leaves_no_sync_has_not_run_out_of_data() -> None:
    late = rank(1, "ended", step=60, no_sync_since=2, steps_done=60)
    verdict = judge(held_up(late))
    assert (verdict.kind, verdict.blamed, verdict.step) == ("not reduced", (1,), 2)
    assert (
        "Rank 1 has run every backward from step 2 on under no_sync(), and ranks 0, 2 wait for it" in verdict.sentence
    )


def test_a_rank_that_accumulates_in_the_step_in_which_others_wait_is_only_slow() -> None:
    late = idle(rank(1, phase="forward", step=2, since_ns=10**9, no_sync_since=None, steps_done=2), 2.0)
    assert judge(held_up(late, is_live=True)).kind == "slow"


def waiting_for(seconds: float, late: RankEvidence) -> Evidence:
    """The others have waited for rank 1 for so long."""
    return job(idle(rank(0, step=2), seconds), late, idle(rank(2, step=2), seconds), groups=[HELD_UP], is_live=True)


def test_a_rank_that_goes_on_is_late_and_no_reason_to_raise_an_alarm() -> None:
    """Not "can't tell", which would be reported."""
    late = idle(rank(1, phase="loop", step=2, since_ns=10**9), 0.4)
    verdict = judge(waiting_for(3.1, late))
    assert (verdict.kind, verdict.is_fault) == ("slow", False)
    assert "Rank 1 is slow, and goes on" in verdict.sentence
    assert "rank 0 has waited for 3.1 s in all_reduce" in verdict.sentence
    assert judge(waiting_for(2.9, late)).kind == "healthy"


def test_who_goes_on_may_be_waited_for_by_way_of_others() -> None:
    """Rank 0 waits for rank 1, which waits for rank 2, and only for a moment."""
    pair = group({1: trained(12, is_waiting=True), 2: trained(11)}, name="pair")
    world = group({0: WAITING, 1: LATE}, name="other")
    ranks = (idle(rank(n, step=2), seconds) for n, seconds in enumerate((5, 0.2, 0.2)))
    verdict = judge(job(*ranks, groups=[pair, world], is_live=True))
    assert (verdict.kind, verdict.concerned) == ("slow", (2, 0))


@pytest.mark.parametrize(("seconds", "kind"), [(0.1, "healthy"), (3.5, "stuck")])
def test_who_has_waited_for_a_late_rank_is_not_late_itself_as_soon_as_that_one_is_ahead(
    seconds: float, kind: str
) -> None:
    """Rank 1 said where it stood, and that it had waited for six seconds, a moment before rank 0 came and went on."""
    came, waited = idle(rank(0, step=3), seconds), idle(rank(1, step=2), 6)
    in_step_3, in_step_2 = trained(10, is_waiting=True), trained(9, is_waiting=True)
    verdict = judge(job(came, waited, groups=[group({0: in_step_3, 1: in_step_2})], is_live=True))
    assert (verdict.kind, verdict.suspected) == (kind, (1,) if kind == "stuck" else ())


def test_who_waits_has_waited_for_long_also_if_others_have_just_come_to_wait_for_it() -> None:
    late, waits = idle(rank(2, phase="loop", step=2, since_ns=10**9), 0.4), idle(rank(1, step=2), 5)
    pair = group({1: trained(12, is_waiting=True), 2: trained(11)}, name="pair")
    world = group({0: WAITING, 1: LATE}, name="other")
    verdict = judge(job(idle(rank(0, step=2), 0.1), waits, late, groups=[pair, world], is_live=True))
    assert (verdict.kind, verdict.concerned) == ("slow", (2, 1))


@pytest.mark.parametrize(
    ("late_idle_s", "is_working", "left_s"), [(2.9, None, 0.1), (3.2, None, None), (2, True, None)]
)
def test_it_is_known_when_a_rank_that_is_only_slow_will_have_stood_still_for_too_long(
    late_idle_s: float, is_working: bool | None, left_s: float | None
) -> None:
    late = replace(idle(rank(1, phase="loop", step=2, since_ns=10**9), late_idle_s), is_working=is_working)
    left_ns = Facts(waiting_for(3.1, late)).undecided_time_ns
    assert left_ns == (None if left_s is None else pytest.approx(left_s * 1e9))


def test_where_all_are_in_a_collective_the_last_one_that_came_tells_when_that_has_taken_too_long() -> None:
    inside = [idle(rank(n, step=2), seconds) for n, seconds in enumerate((3.1, 2.9, 2.5))]
    evidence = job(*inside, groups=[group(dict.fromkeys(range(3), WAITING))], is_live=True)
    assert judge(evidence).kind == "healthy"
    assert Facts(evidence).undecided_time_ns == pytest.approx(0.5e9)


def test_if_all_ranks_skip_the_same_branch_nobody_is_blamed_and_the_step_is_that_of_the_backward() -> None:
    complaint = Failure(type="RuntimeError", message="Expected to have finished reduction ...", call_site=site(30))
    ranks = (rank(n, "failed", phase="forward", step=13, failure=complaint, unready=UNREADY) for n in range(3))
    verdict = judge(job(*ranks))
    assert (verdict.kind, verdict.blamed, verdict.step) == ("gradients never ready", (), 12)
    assert verdict.sentence.startswith("No rank launched bucket 1 of step 12: 2 of its parameters got no gradient")
    assert verdict.call_sites == {0: site(30)}


def test_a_recv_that_is_never_answered_is_no_matter_of_two_groups() -> None:
    recv = entry(1, Signature(op="recv", dtype="float32", elements=5, peer=1), step=2, is_done=False, line=50)
    reduced = group({0: trained(6), 1: WAITING}, ranks=(0, 1))
    talk = group({0: (replace(recv, announced_ns=10**8),)}, ranks=(0, 1))
    evidence = job(rank(0, step=2, phase=None), rank(1, step=2), groups=[reduced], point_to_point_orders=(talk,))
    verdict = judge(evidence)
    assert verdict.kind == "missing collective"
    assert "Rank 0 waits in recv of 5 float32 from rank 1 at train.py:50 (main) in step 2" in verdict.sentence
    assert "rank 1 has not sent: it waits for rank 0 in all_reduce(sum) of bucket 2" in verdict.sentence
