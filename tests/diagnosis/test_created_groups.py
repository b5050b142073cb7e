"""Process groups that ranks make with different lists of ranks."""

from __future__ import annotations

from typing import Any

import pytest

from overlapscope.diagnosis.evidence import CreatedGroup, Liveness
from overlapscope.diagnosis.judge import judge
from overlapscope.diagnosis.verdict import Verdict
from tests.diagnosis.jobs import TIMED_OUT, group, idle, job, rank, site, trained

Lists = list[tuple[int, ...]]


def verdict_on(*given: Lists, liveness: Liveness = "sleeping", backend: str = "gloo", **more: Any) -> Verdict:
    """Each rank has made groups with these lists, at lines 10, 20 ..."""
    ranks = [
        rank(
            one,
            liveness,
            phase=None,
            created_groups=tuple(
                CreatedGroup(name=str(number), ranks=members, backend=backend, call_site=site(10 * number))
                for number, members in enumerate(lists, start=1)
            ),
        )
        for one, lists in enumerate(given)
    ]
    alike = group(dict.fromkeys(range(len(given)), trained(9)))
    return judge(job(*ranks, groups=[alike], **more))


def test_another_list_is_told_with_each_ranks_line() -> None:
    verdict = verdict_on([(0, 1)], [(0, 1)], [(0, 2)], is_live=True)
    assert (verdict.kind, verdict.blamed, verdict.group) == ("different collectives", (2,), "1")
    assert verdict.certainty == "certain"
    assert verdict.call_sites == dict.fromkeys(range(3), site(10))


def test_lists_without_a_common_rank_meet_under_one_name() -> None:
    """Measured over gloo: rank 0 is connected to 1 or to 3, and sums may be wrong without an error."""
    verdict = verdict_on([(0, 1)], [(0, 1)], [(2, 3)], [(2, 3)], liveness="ended")
    assert (verdict.kind, verdict.blamed) == ("different collectives", ())


def test_a_rank_that_has_left_out_a_call_is_one_call_short() -> None:
    both = [(0, 1), (0, 1, 2)]
    verdict = verdict_on([*both], [*both], [(0, 1, 2)])
    assert (verdict.kind, verdict.blamed, verdict.group) == ("missing collective", (2,), "1")


@pytest.mark.parametrize(
    "given",
    [
        ([(0, 1), (1, 2)],) * 3,
        ([(0, 1)], [(0, 1)], []),  # works by chance, as nothing is made after it
        ([(0, 1)], [(0, 1)], [(0, 1)], [(0,)]),  # rank 3 connects to nobody
    ],
)
def test_ranks_that_meet_as_they_have_meant_it_are_healthy(given: tuple[Lists, ...]) -> None:
    assert verdict_on(*given, liveness="ended").kind == "healthy"


def test_over_a_backend_that_connects_later_a_group_may_never_be_used() -> None:
    lists: tuple[Lists, ...] = ([(0, 1)], [(0, 1)], [(0, 2)])
    assert verdict_on(*lists, backend="nccl", liveness="ended").kind == "healthy"
    waiting = group({0: trained(3, is_waiting=True), 1: trained(2), 2: trained(2)}, backend="nccl")
    made = [CreatedGroup(name="1", ranks=one[0], backend="nccl") for one in lists]
    ranks = [
        idle(rank(n, "failed", phase=None, created_groups=(one,), failure=TIMED_OUT), 9) for n, one in enumerate(made)
    ]
    assert judge(job(*ranks, groups=[waiting])).kind == "different collectives"
