"""Rank 0 is in ``new_group`` of ranks 0 and 1, which rank 1 has not called; ranks 1 and 2 wait elsewhere for rank 0."""

from __future__ import annotations

from dataclasses import replace

import pytest

from overlapscope.diagnosis.evidence import RankEvidence
from overlapscope.diagnosis.judge import judge
from overlapscope.diagnosis.verdict import Verdict
from tests.diagnosis.jobs import group, idle, job, rank, trained

IN_TORCH = (
    "Current thread 0x00007f (most recent call first):\n"
    '  File "/venv/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py", line 9 in all_reduce\n'
    '  File "/home/me/train.py", line 42 in main\n'
)
WAITING, DONE = trained(4, is_waiting=True), trained(3)
MAKER = replace(idle(rank(0, phase="loop", step=1), 3.1), new_group_calls=2, creating_group=(0, 1), stacks=IN_TORCH)
MEMBER = replace(idle(rank(1, step=1), 3.1), new_group_calls=1)
OTHER = replace(idle(rank(2, step=1), 3.1), new_group_calls=1)


def verdict_on(
    maker: RankEvidence = MAKER,
    member: RankEvidence = MEMBER,
    *,
    is_waiting: bool = True,
    members: tuple[int, ...] = (0, 1, 2),
) -> Verdict:
    """While the job runs.

    Args:
        is_waiting: rank 1 is in the collective in which rank 2 waits for rank 0.
        members: of the group of that collective.
    """
    logs = {0: DONE, 1: WAITING if is_waiting else DONE, 2: WAITING}
    there = group({one: logs[one] for one in members})
    return judge(job(maker, member, OTHER, groups=[there], is_live=True))


@pytest.mark.parametrize(("world", "blamed"), [(3, (1,)), (2, ())])
def test_a_group_that_only_some_ranks_make(world: int, blamed: tuple[int, ...]) -> None:
    """Rank 2, if there is one, has called it as well."""
    waiting = {number: trained(1, is_waiting=True) for number in range(1, world)}
    ranks = [
        replace(idle(rank(number, phase=None), 5), new_group_calls=2 if number != 1 else 1, stacks=IN_TORCH)
        for number in range(world)
    ]
    ranks[0] = replace(ranks[0], creating_group=(0, 1))
    logs = group(waiting, ranks=range(world))
    verdict = judge(job(*ranks, groups=[logs], is_live=True))
    assert (verdict.kind, verdict.blamed, verdict.certainty) == ("missing collective", blamed, "certain")
    all_have = [replace(one, new_group_calls=2) for one in ranks]
    assert judge(job(*all_have, groups=[logs], is_live=True)).kind != "missing collective"
    away = [replace(one, stacks="") for one in ranks]
    assert judge(job(*away, groups=[logs], is_live=True)).certainty == "likely"


def test_a_member_that_waits_has_not_called_it_however_late_its_watchdog_has_noticed() -> None:
    """Rank 2's has raised the alarm, after 3 s."""
    verdict = verdict_on(member=idle(MEMBER, 2.5))
    assert (verdict.kind, verdict.suspected, verdict.certainty) == ("missing collective", (0,), "likely")
    inside = verdict_on(member=replace(idle(MEMBER, 2.5), stacks=IN_TORCH))
    assert (inside.kind, inside.blamed, inside.certainty) == ("missing collective", (0,), "certain")


def test_a_rank_that_polls_for_the_members_is_not_busy() -> None:
    """On a crowded host it queues for a core each time that it looks into the file of a FileStore."""
    assert verdict_on(maker=replace(MAKER, is_working=True)).kind == "missing collective"


@pytest.mark.parametrize("more", [{"idle_ns": 2_500_000_000}, {"is_working": True}])
def test_a_member_that_may_be_on_its_way_to_it_is_no_reason_to_call_anybody_stuck(more: dict[str, int]) -> None:
    """It has launched the collective and computes on."""
    on_its_way = replace(idle(rank(1, phase="backward", step=1), 3.1), new_group_calls=1)
    verdict = verdict_on(member=replace(on_its_way, **more))
    assert (verdict.is_fault, verdict.named) == (False, ())
    assert verdict_on(member=on_its_way).kind == "missing collective"


def test_a_member_that_stands_elsewhere_is_named_in_place_of_the_rank_that_waits_for_it_in_new_group() -> None:
    hung = replace(idle(rank(1, phase="forward", step=1, since_ns=10**9), 5), new_group_calls=1)
    verdict = verdict_on(member=hung, is_waiting=False)
    assert (verdict.kind, verdict.suspected) == ("stuck", (1,))


def test_where_no_log_says_anything_of_the_member_it_is_said_what_is_known() -> None:
    """It is not in the group of the collective in which rank 2 waits for rank 0."""
    hung = replace(idle(rank(1, phase="loop", step=1), 5), new_group_calls=1)
    verdict = verdict_on(member=hung, members=(0, 2))
    assert (verdict.kind, verdict.suspected) == ("stuck", (0,))
