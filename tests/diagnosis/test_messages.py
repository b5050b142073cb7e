"""Sends and receives of user code that don't meet: who waits for whom, and what is said of it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from overlapscope.diagnosis.evidence import Evidence, GroupOrder, RankEvidence
from overlapscope.diagnosis.judge import judge
from overlapscope.diagnosis.verdict import Verdict
from overlapscope.diagnosis.wait_graph import Facts
from overlapscope.trace.collective_log import Signature
from tests.diagnosis.jobs import TIMED_OUT, entry, group, idle, job, rank
from tests.ordered import all_reduce

Message = tuple[str, int | None]
"""A send or a recv, and its peer."""


def message(op: str, peer: int | None, *, tag: int = 0, elements: int = 8) -> Signature:
    return Signature(
        op=op, peer=peer, tag=tag, elements=elements, bytes=4 * elements, shapes=((elements,),), dtype="float32"
    )


def talk(launched: dict[int, list[Signature]], *, first: int = 1, done: dict[int, int] | None = None) -> GroupOrder:
    """Sends and receives; all but the newest of each rank are over, or so many.

    Args:
        first: number of the first entry of each rank that is left.
    """
    windows = {
        one: [
            replace(
                entry(number, each, line=10 * (one + 1), is_done=number - first < (done or {}).get(one, len(all_) - 1)),
                announced_ns=10**9 + number,
            )
            for number, each in enumerate(all_, start=first)
        ]
        for one, all_ in launched.items()
    }
    return group(windows, ranks=range(max(launched) + 1))


def verdict_on(messages: GroupOrder, *, groups: tuple[GroupOrder, ...] = (), **more: Any) -> Verdict:
    """All ranks have waited until their timeouts."""
    return judge(evidence_of(messages, groups, **more))


def evidence_of(messages: GroupOrder, groups: tuple[GroupOrder, ...] = (), **more: Any) -> Evidence:
    late = replace(TIMED_OUT, time_ns=10**12)
    ranks = [rank(one, "failed", phase=None, failure=late, **more) for one in messages.ranks]
    return replace(job(*ranks, groups=groups), point_to_point_orders=(messages,))


@pytest.mark.parametrize("op", ["recv", "send"])
@pytest.mark.parametrize("world", [2, 3, 5])
def test_ranks_that_each_wait_for_the_next_one_are_a_cycle(op: str, world: int) -> None:
    cycle = {one: [message(op, (one + 1) % world)] for one in range(world)}
    verdict = verdict_on(talk(cycle))
    assert (verdict.kind, verdict.certainty, verdict.blamed) == ("missing collective", "certain", ())
    assert verdict.concerned == tuple(range(world))
    assert {one: site.line for one, site in verdict.call_sites.items()} == {one: 10 * (one + 1) for one in range(world)}


@pytest.mark.parametrize("before", [0, 40, 100])
def test_a_cycle_is_found_however_many_messages_came_before(before: int) -> None:
    """Of long logs only the latest messages are left, so they can't be counted."""
    kept = min(before, 30)
    own = [message("send", 1), message("recv", 1)] * (kept // 2)
    other = [message("recv", 0), message("send", 0)] * (kept // 2)
    messages = talk({0: [*own, message("recv", 1)], 1: [*other, message("recv", 0)]}, first=before - kept + 1)
    verdict = verdict_on(messages)
    assert (verdict.kind, verdict.concerned) == ("missing collective", (0, 1))


def test_a_send_and_a_recv_that_meet_are_no_cycle_whichever_is_waited_for_first() -> None:
    """Both launch a send without waiting, and wait for what the other one sends: it is on its way."""
    both = talk({one: [message("send", 1 - one), message("recv", 1 - one)] for one in (0, 1)}, done={0: 0, 1: 0})
    assert Facts(evidence_of(both)).waiting == ()
    running = [replace(idle(rank(one, phase=None), 30), stacks="") for one in (0, 1)]
    verdict = judge(replace(job(*running, is_live=True), point_to_point_orders=(both,)))
    assert (verdict.kind, verdict.named, verdict.certainty) == ("stuck", (), "likely")


def test_messages_with_different_tags_do_not_meet() -> None:
    verdict = verdict_on(talk({0: [message("send", 1, tag=9)], 1: [message("recv", 0, tag=10)]}))
    assert (verdict.kind, verdict.concerned) == ("missing collective", (0, 1))
    assert "9" in verdict.sentence
    assert "10" in verdict.sentence
    over_nccl = replace(talk({0: [message("send", 1, tag=9)], 1: [message("recv", 0, tag=10)]}), backend="nccl")
    assert Facts(evidence_of(over_nccl)).waits == ()


def test_of_several_messages_in_flight_the_one_without_another_side_is_waited_for() -> None:
    """A batch of sends and receives in a ring: rank 2 does not receive from rank 1."""
    ring = {one: [message("send", (one + 1) % 3), message("recv", (one - 1) % 3)] for one in range(3)}
    ring[2].pop()
    facts = Facts(evidence_of(talk(ring, done={0: 0, 1: 0, 2: 0})))
    assert [(wait.rank, wait.late, wait.entry.signature.op) for wait in facts.waits] == [(1, (2,), "send")]


def test_a_late_stage_of_a_pipeline_is_named_and_not_those_that_wait_for_it() -> None:
    stages = {
        0: [message("send", 1), message("send", 1)],
        1: [message("recv", 0), message("send", 2)],
        2: [message("recv", 1), message("recv", 1)],
    }
    running = [idle(rank(0, phase=None), 30), idle(rank(1, phase=None), 30), idle(rank(2, phase=None), 30)]
    evidence = replace(job(*running, is_live=True), point_to_point_orders=(talk(stages, done={0: 1, 1: 2, 2: 1}),))
    verdict = judge(evidence)
    assert (verdict.kind, verdict.suspected, verdict.concerned) == ("stuck", (1,), (0, 1, 2))
    assert verdict.windows == {}


def test_a_recv_from_any_rank_waits_for_all_once_none_of_them_can_send() -> None:
    messages = talk({0: [message("recv", None)]})
    waiting = group({one: [entry(1, all_reduce(), is_done=False)] for one in (1, 2)}, ranks=(0, 1, 2))
    ranks = [rank(one, "failed", phase=None, failure=TIMED_OUT) for one in range(3)]
    everyone = replace(messages, ranks=(0, 1, 2))
    verdict = judge(replace(job(*ranks, groups=[waiting]), point_to_point_orders=(everyone,)))
    assert (verdict.kind, verdict.concerned) == ("missing collective", (0, 1, 2))
    one_computes = group({1: [entry(1, all_reduce(), is_done=False)]}, ranks=(0, 1, 2))
    facts = Facts(replace(job(*ranks, groups=[one_computes]), point_to_point_orders=(everyone,)))
    assert [wait.rank for wait in facts.waits] == [1]


def test_a_recv_that_is_too_small_is_told_and_not_the_process_that_gloo_ends() -> None:
    messages = talk({0: [message("send", 1), message("send", 1, elements=9)], 1: [message("recv", 0)] * 2})
    aborted = [rank(0, "failed", phase=None, failure=TIMED_OUT), rank(1, "gone", phase=None, exit_status=-6)]
    verdict = judge(replace(job(*aborted), point_to_point_orders=(messages,)))
    assert (verdict.kind, verdict.blamed, verdict.concerned) == ("different collectives", (), (0, 1))


@pytest.mark.parametrize("busy", [False, True])
def test_ranks_of_a_running_job_may_not_wait_for_what_they_have_launched(busy: bool) -> None:
    """They may compute, and wait later."""
    ranks: list[RankEvidence] = [
        replace(idle(rank(one, phase=None), 30), stacks="", is_working=busy and one == 0) for one in (0, 1)
    ]
    cycle = talk({one: [message("recv", 1 - one)] for one in (0, 1)})
    verdict = judge(replace(job(*ranks, is_live=True), point_to_point_orders=(cycle,)))
    assert verdict.certainty != "certain" or not verdict.is_fault
    assert (verdict.kind == "missing collective") is not busy


def test_a_message_that_was_given_up_is_waited_for_although_gloo_calls_it_completed() -> None:
    cycle = talk({one: [message("recv", 1 - one)] for one in (0, 1)})
    given_up = {
        one: tuple(replace(each, completed_ns=10**12 + 1) for each in window) for one, window in cycle.windows.items()
    }
    assert verdict_on(replace(cycle, windows=given_up)).kind == "missing collective"
    received = {one: tuple(replace(each, completed_ns=10**11) for each in window) for one, window in given_up.items()}
    assert verdict_on(replace(cycle, windows=received)).kind != "missing collective"
