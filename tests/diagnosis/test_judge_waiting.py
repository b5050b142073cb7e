"""Which cause is named where ranks wait for others: in a data loader, for gradients, in no_sync(), elsewhere."""

from __future__ import annotations

from dataclasses import replace

import pytest

from overlapscope.diagnosis.evidence import (
    Evidence,
    ExitCall,
    Failure,
    InterruptedBackward,
    Liveness,
    ModelParameters,
    RankEvidence,
    ReportedVerdict,
    UnreadyParameter,
)
from overlapscope.diagnosis.judge import judge
from overlapscope.diagnosis.wait_graph import Facts
from overlapscope.trace.collective_log import UNEVEN_INPUTS
from tests.diagnosis.jobs import (
    CLOSED,
    HELD_UP,
    IN_LOADER,
    LATE,
    TIMED_OUT,
    UNREADY,
    WAITING,
    entry,
    given_up,
    group,
    held_up,
    idle,
    job,
    rank,
    site,
    trained,
    without_gradients,
)
from tests.ordered import all_reduce


@pytest.mark.parametrize(("seen_in", "is_said"), [(2, True), (3, True), (1, False), (None, False)])
def test_who_was_frozen_after_it_was_wrapped_is_said_to_be(seen_in: int | None, is_said: bool) -> None:
    verdict = judge(without_gradients(unready=(replace(UNREADY[0], frozen_in=seen_in), UNREADY[1])))
    assert (verdict.bucket, verdict.parameters) == (1, ("branch.weight", "branch.bias"))
    assert ("frozen" in verdict.sentence) == is_said


def test_of_an_exception_that_came_out_of_the_backward_the_line_is_named() -> None:
    left = tuple(InterruptedBackward(step=step, call_site=site(10 * (step + 1))) for step in (1, 2))
    verdict = judge(without_gradients(phase="forward", interrupted_backwards=left))
    assert verdict.call_sites[1] == site(30)


def test_a_backward_that_computes_is_slow() -> None:
    late = idle(rank(1, phase="backward", step=2, since_ns=10**9, unready=UNREADY, cpu_share=0.9), 5)
    assert judge(held_up(late, is_live=True)).kind == "slow"


def test_a_backward_that_ctrl_c_has_ended_is_not_said_to_have_left_gradients_out() -> None:
    trace = '  File "torch/autograd/graph.py", line 979, in _engine_run_backward\nKeyboardInterrupt\n'
    interrupted = Failure(type="KeyboardInterrupt", message="", traceback=trace, time_ns=2 * 10**9)
    late = rank(1, "failed", phase="loop", step=2, since_ns=10**9, unready=UNREADY, failure=interrupted)
    assert judge(held_up(late)).kind != "gradients never ready"
    elsewhere = replace(interrupted, traceback='  File "train.py", line 42, in main\n')
    assert judge(held_up(replace(late, failure=elsewhere))).kind == "gradients never ready"


def test_a_backward_of_which_nobody_knows_how_long_it_took_has_left_nothing_out() -> None:
    """Nothing is known of the process, and it may have ended there: its heartbeat is lost."""
    late = rank(1, "unknown", phase="backward", step=2, since_ns=10**9, unready=UNREADY)
    assert judge(held_up(late)).kind != "gradients never ready"
    assert judge(held_up(idle(late, 5))).kind == "gradients never ready"


def test_an_exception_is_no_reason_for_what_a_second_attempt_leaves_out() -> None:
    left = (InterruptedBackward(step=2, call_site=site(30)),)
    again = idle(rank(1, "sleeping", phase="backward", step=2, since_ns=10**9, unready=UNREADY), 5)
    verdict = judge(held_up(replace(again, interrupted_backwards=left), is_live=True))
    assert (verdict.kind, verdict.certainty) == ("gradients never ready", "likely")
    assert "exception" not in verdict.sentence


def test_ddps_own_complaint_about_the_last_backward_is_a_gradient_that_never_came() -> None:
    complaint = Failure(type="RuntimeError", message="Expected to have finished reduction in the prior iteration ...")
    late = rank(1, "failed", phase="forward", step=3, failure=complaint, unready=UNREADY)
    verdict = judge(job(rank(0, "failed", failure=CLOSED), late, rank(2, "failed", failure=CLOSED)))
    assert (verdict.kind, verdict.blamed) == ("gradients never ready", (1,))


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
    assert (verdict.kind, verdict.certainty, verdict.blamed, verdict.step) == (kind, "likely", (), 2)


def test_of_a_job_that_was_ended_a_busy_rank_is_suspected_and_not_said_to_have_made_no_progress() -> None:
    late = replace(idle(rank(1, "gone", phase="loop", step=2, since_ns=10**9), 20), is_working=True)
    ranks = (rank(0, "failed", step=2, failure=CLOSED), late, rank(2, "failed", step=2, failure=CLOSED))
    verdict = judge(job(*ranks, groups=[HELD_UP]))
    assert (verdict.kind, verdict.suspected, verdict.certainty) == ("stuck", (1,), "likely")


def test_who_was_waited_for_until_the_time_was_up_is_to_blame() -> None:
    late = idle(rank(1, "gone", phase="loop", step=2, since_ns=10**9, stacks=IN_LOADER), 20)
    ranks = (rank(0, "failed", step=2, failure=TIMED_OUT), late, rank(2, "failed", step=2, failure=TIMED_OUT))
    verdict = judge(job(*ranks, groups=[HELD_UP]))
    assert (verdict.kind, verdict.blamed, verdict.certainty) == ("waits for data", (1,), "certain")


@pytest.mark.parametrize("idle_s", [0.0, 14.9], ids=["it went on elsewhere", "it stood still"])
def test_whoever_others_have_given_up_on_is_late_for_good_though_their_own_clocks_begin_anew(idle_s: float) -> None:
    late = idle(rank(1, "running", phase="loop", step=2), idle_s)
    verdict = judge(given_up(late, is_live=True))
    assert (verdict.kind, verdict.blamed, verdict.certainty) == ("stuck", (1,), "certain")
    assert "after 15 s" in verdict.sentence


def test_a_suspicion_that_the_time_of_the_others_has_proved_is_certain() -> None:
    report = ReportedVerdict(
        rank=0, time_ns=3 * 10**9, kind="stuck", sentence="Rank 1 for 3.0 s", alternative="slow", suspected=(1,)
    )
    late = idle(rank(1, "gone", phase="loop", step=2, signaled_at_ns=1), 16)
    verdict = judge(given_up(late, reports=(report,)))
    assert (verdict.kind, verdict.blamed, verdict.certainty) == ("stuck", (1,), "certain")


def test_a_rank_that_stood_still_before_the_others_began_to_wait_does_not_go_on() -> None:
    ranks = [idle(rank(number, step=2), 3.2) for number in (0, 2)]
    for idle_s, goes_on in ((3.3, False), (0.2, True)):
        late = idle(rank(1, phase="loop", step=2), idle_s, step_s=2.0)
        verdict = judge(job(ranks[0], late, ranks[1], groups=[HELD_UP], is_live=True))
        assert (verdict.kind, "goes on" in verdict.sentence) == ("slow", goes_on)


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
    assert judge(waiting_for(2.9, late)).kind == "healthy"


@pytest.mark.parametrize("flags", [0, UNEVEN_INPUTS])
def test_after_join_a_later_step_is_no_sign_of_having_gone_on_without_a_collective(flags: int) -> None:
    ahead = [replace(one, step=one.step + 5, flags=flags) for one in trained(9)]
    waits = [replace(one, flags=flags) for one in trained(10, is_waiting=True)]
    verdict = judge(job(rank(0, "gone", step=8), rank(1, "gone", step=3), groups=[group({0: ahead, 1: waits})]))
    assert (verdict.kind == "missing collective") == (flags == 0)


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


@pytest.mark.parametrize("phase", ["loop", "forward", "backward", None])
@pytest.mark.parametrize("liveness", ["sleeping", "running", "ended", "unknown"])
@pytest.mark.parametrize("is_live", [True, False])
def test_nobody_is_accused_of_what_was_not_recorded(phase: str | None, liveness: Liveness, is_live: bool) -> None:
    unready = (UnreadyParameter(model=0, name="a", module="A", bucket=0),)
    model = ModelParameters(model=0, class_name="Net", parameters=(("a", (2,), "float32"), ("b", (2,), "float32")))
    lost = rank(1, liveness, phase=phase, step=1, unrecorded_because="disk", unready=unready, models=(model,))
    others = [idle(rank(n, step=2), 60) for n in (0, 2)]
    verdict = judge(job(others[0], idle(lost, 60), others[1], groups=[HELD_UP], is_live=is_live))
    assert (verdict.kind, verdict.blamed) == ("cannot tell", ())


def test_a_job_that_was_recorded_in_part_is_not_called_healthy() -> None:
    lost = rank(1, "ended", unrecorded_because="disk")
    order = group({0: trained(9), 1: trained(6), 2: trained(9)})
    verdict = judge(job(rank(0, "ended"), lost, rank(2, "ended"), groups=[order]))
    assert (verdict.kind, verdict.blamed) == ("cannot tell", ())


def test_what_was_recorded_of_a_rank_still_counts() -> None:
    lost = rank(1, "ended", unrecorded_because="disk")
    order = group({0: trained(9), 1: (*trained(3), entry(4, all_reduce())), 2: trained(9)}, first_divergence=4)
    verdict = judge(job(rank(0), lost, rank(2), groups=[replace(order, divergence="signature")]))
    assert (verdict.number, verdict.blamed) == (4, (1,))


def test_a_job_that_goes_on_is_healthy_although_ranks_are_not_at_the_same_collective() -> None:
    ranks = (idle(rank(n, phase="backward", step=2), 0.01) for n in range(3))
    assert judge(job(*ranks, groups=[HELD_UP], is_live=True)).kind == "healthy"


def test_steps_of_a_minute_are_no_reason_to_call_a_rank_stuck_after_three() -> None:
    late = idle(rank(1, phase="forward", step=2, since_ns=10**9), 180, step_s=60)
    assert judge(held_up(late, is_live=True)).kind == "slow"


def test_a_first_step_that_takes_long_is_a_fact_and_no_fault() -> None:
    starting = replace(rank(1, phase="forward", step=0, since_ns=10**9), is_starting=True, idle_ns=6 * 10**9)
    starting = replace(starting, position=replace(starting.position, call_site=site(7)))
    waiting = group({0: trained(1, is_waiting=True), 2: trained(1, is_waiting=True)}, ranks=(0, 1, 2))
    early = judge(job(rank(0), starting, rank(2), groups=[waiting], is_live=True))
    assert (early.kind, early.is_fault) == ("slow", False)
    later = replace(starting, idle_ns=21 * 10**9)
    late = judge(job(rank(0), later, rank(2), groups=[waiting], is_live=True))
    assert (late.kind, late.certainty) == ("stuck", "likely")
