"""What the machine said is told beside a verdict, and changes none."""

from __future__ import annotations

from dataclasses import replace

import pytest

from overlapscope.diagnosis.evidence import Evidence, Failure, RankEvidence
from overlapscope.diagnosis.judge import judge
from overlapscope.machine.conditions import Condition
from overlapscope.machine.evidence import MachineState
from tests.diagnosis.jobs import TIMED_OUT, group, idle, job, rank, trained

WHEN = "of the last half minute"


def condition(kind: str, source: str, amount: float, **values: float) -> Condition:
    return Condition(kind=kind, source=source, label=source.split()[0], amount=amount, values=values)


def with_machine(one: RankEvidence, *recent: Condition, grave: tuple[Condition, ...] = ()) -> RankEvidence:
    """It uses and has sampled what these conditions are of."""
    uses = tuple(dict.fromkeys(condition.source for condition in (*recent, *grave)))
    return replace(one, machine=MachineState(uses=uses, recent=recent, grave=grave))


def stuck(*machines: tuple[Condition, ...]) -> Evidence:
    """Rank 1 never came to the collective in which the others gave up."""
    waiting = replace(rank(0, "failed"), failure=TIMED_OUT)
    ranks = [waiting, idle(rank(1, phase="backward", step=2), 2000), replace(rank(2, "failed"), failure=TIMED_OUT)]
    ranks = [with_machine(one, *conditions) for one, conditions in zip(ranks, machines or [()] * 3, strict=True)]
    windows = {0: trained(7, is_waiting=True), 1: trained(6), 2: trained(7, is_waiting=True)}
    return job(*ranks, groups=[group(windows)])


def without_notes(evidence: Evidence) -> object:
    return replace(judge(evidence), evidence=())


def test_a_held_down_clock_of_the_rank_that_holds_up_the_job_is_evidence():
    hot = condition("thermal limit", "gpu b", 0.9, sm_clock_mhz=1200, max_sm_clock_mhz=1980)
    calm = [condition("thermal limit", f"gpu {name}", 0.0) for name in "ac"]
    verdict = judge(stuck((calm[0],), (hot,), (calm[1],)))
    assert verdict.named == (1,)
    (said,) = [text for text in verdict.evidence if "GPU" in text]
    assert "1,200 MHz" in said
    assert "90 %" in said
    assert without_notes(stuck((calm[0],), (hot,), (calm[1],))) == without_notes(stuck())


def test_what_all_are_under_alike_blames_nobody_and_is_a_note():
    hot = [condition("thermal limit", f"gpu {name}", 0.9) for name in "abc"]
    evidence = stuck(*((one,) for one in hot))
    (said,) = [text for text in judge(evidence).evidence if "GPU" in text]
    assert "other ranks up to 90 %" in said
    assert without_notes(evidence) == without_notes(stuck())


def test_a_condition_of_another_rank_than_the_named_one_is_not_told():
    hot = condition("thermal limit", "gpu a", 0.9)
    verdict = judge(stuck((hot,), (condition("thermal limit", "gpu b", 0.0),), ()))
    assert not [text for text in verdict.evidence if "GPU" in text]


def test_a_shared_source_is_told_by_whichever_rank_sampled_it():
    """Rank 0 has sampled the control group of rank 1 too."""
    used_up = condition("CPU quota", "cgroup a", 0.7, cpu_quota=2)
    evidence = stuck((used_up,), (), ())
    ranks = dict(evidence.ranks)
    ranks[1] = replace(ranks[1], machine=MachineState(uses=("cgroup a",)))
    (said,) = [text for text in judge(replace(evidence, ranks=ranks)).evidence if "quota" in text]
    assert said.startswith("Rank 1's")
    assert "rank 0 shares it" in said


@pytest.mark.parametrize("named", [0, 1])
def test_a_grave_condition_is_told_with_any_verdict_of_whichever_rank(named: int):
    lost = condition("Xid", f"gpu {named}", 1.0, xid=79)
    failed = replace(rank(1, "failed"), failure=Failure(type="ValueError", message="no"))
    ranks = [rank(0), failed]
    ranks[named] = with_machine(ranks[named], grave=(lost,))
    verdict = judge(job(*ranks, groups=[group({0: trained(3), 1: trained(3)})]))
    assert (verdict.kind, verdict.blamed) == ("failed", (1,))
    (said,) = [text for text in verdict.evidence if "Xid 79" in text]
    assert said.startswith(f"Rank {named}'s")


def test_a_healthy_job_stays_healthy_and_only_grave_conditions_are_told():
    ended = [rank(number, "ended", phase=None, step=1) for number in (0, 1)]
    groups = [group({0: trained(3), 1: trained(3)})]
    machines = condition("CPU quota", "cgroup a", 0.9, cpu_quota=2), condition("killed for memory", "cgroup a", 1.0)
    evidence = job(with_machine(ended[0], machines[0], grave=machines[1:]), ended[1], groups=groups)
    verdict = judge(evidence)
    assert verdict.kind == "healthy"
    assert not verdict.is_fault
    assert [text for text in verdict.evidence if "killed" in text]
    assert not [text for text in verdict.evidence if "quota" in text]


def test_memory_is_told_of_a_killed_rank_and_its_clock_is_not():
    near = condition("near the memory limit", "cgroup b", 1.0, memory_bytes=7.9e9, memory_limit_bytes=8e9)
    killed = with_machine(rank(1, "gone"), near, condition("thermal limit", "gpu b", 1.0))
    calm = with_machine(rank(0, "failed"), condition("near the memory limit", "cgroup a", 0.0))
    closed = replace(calm, failure=Failure(type="RuntimeError", message="Connection closed by peer [127.0.0.1]:1"))
    groups = [group({0: trained(4, is_waiting=True), 1: trained(3)})]
    verdict = judge(job(closed, killed, groups=groups))
    assert (verdict.kind, verdict.named) == ("killed", (1,))
    assert [text for text in verdict.evidence if "of memory in 100 %" in text]
    assert not [text for text in verdict.evidence if "GPU" in text]


def test_what_two_ranks_have_seen_of_one_source_is_told_once_with_the_larger_number():
    """The first of them has not seen its own end."""
    kills = [condition("killed for memory", "cgroup a", count) for count in (1.0, 2.0)]
    ranks = [with_machine(rank(number, "ended", phase=None), grave=(kills[number],)) for number in (0, 1)]
    verdict = judge(job(*ranks, groups=[group({0: trained(3), 1: trained(3)})]))
    (said,) = [text for text in verdict.evidence if "killed" in text]
    assert "had 2 processes" in said
