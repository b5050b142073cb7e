"""Who is named where hosts go on once they have launched a collective, and only devices wait: over NCCL."""

from __future__ import annotations

from dataclasses import replace

import pytest

from overlapscope.diagnosis.evidence import Entry
from overlapscope.diagnosis.judge import judge
from overlapscope.diagnosis.report_text import format_report
from overlapscope.trace.collective_log import REACHED
from tests.diagnosis.jobs import BEFORE, HELD_UP, INSIDE, entry, group, idle, job, launched, on_devices, rank, trained
from tests.ordered import all_reduce, bucket


@pytest.mark.parametrize(("backend", "kind"), [("nccl", "stuck"), ("gloo", "healthy")])
def test_a_host_that_has_gone_on_waits_where_its_device_does(backend: str, kind: str) -> None:
    """It may well be busy: a host that waits for its device asks it again and again."""
    ahead = [idle(rank(n, "running", phase="loop", step=3, since_ns=10**9, is_working=True), 5) for n in (0, 2)]
    late = idle(rank(1, phase="forward", step=2, since_ns=10**9), 5)
    verdict = judge(job(*ahead, late, groups=[replace(HELD_UP, backend=backend)], is_live=True))
    assert verdict.kind == kind
    assert verdict.suspected == ((1,) if backend == "nccl" else ())


def test_a_host_that_is_less_far_ahead_of_its_device_is_not_accused() -> None:
    """It may wait for its device, which waits for the other one."""
    ahead = trained(12)[:6] + tuple(
        entry(n, bucket((n - 1) % 3), step=(n - 1) // 3, is_done=False) for n in range(7, 13)
    )
    one, other = (idle(rank(n, "running", phase="loop", step=3, since_ns=10**9, is_working=True), 5) for n in (0, 1))
    verdict = judge(job(one, other, groups=[group({0: ahead, 1: ahead[:9]}, backend="nccl")], is_live=True))
    assert (verdict.kind, verdict.blamed, verdict.suspected) == ("stuck", (), ())
    assert verdict.number == 7


def test_it_is_named_of_a_job_that_was_ended_as_well() -> None:
    verdict = judge(on_devices(INSIDE, BEFORE, INSIDE))
    assert (verdict.kind, verdict.named, verdict.number) == ("stuck", (1,), 7)
    assert verdict.certainty != "certain", "it may have been ended too early"


def test_all_of_several_such_devices_are_named() -> None:
    further_behind = launched(False, False, done=6)
    verdict = judge(on_devices(INSIDE, BEFORE, further_behind, INSIDE, seconds=70, is_live=True))
    assert verdict.suspected == (1, 2)


@pytest.mark.parametrize(
    "windows",
    [
        pytest.param((INSIDE, INSIDE), id="all devices are in it"),
        pytest.param((INSIDE, launched(None, None)), id="of one device nothing is known"),
        pytest.param((INSIDE, launched(None, False)), id="of one device nothing is known there"),
        pytest.param((launched(None, None), BEFORE), id="nobody is known to wait"),
        pytest.param((BEFORE, BEFORE), id="no device has come to it"),
    ],
)
@pytest.mark.parametrize("is_live", [False, True])
def test_no_device_is_named_without_a_device_that_waits_for_it(
    windows: tuple[tuple[Entry, ...], ...], *, is_live: bool
) -> None:
    assert judge(on_devices(*windows, seconds=70, is_live=is_live)).named == ()


def test_of_several_groups_that_wait_one_is_told_of() -> None:
    evidence = on_devices(INSIDE, BEFORE, seconds=70, is_live=True)
    of_others = job(*(idle(rank(n, "running", phase="loop", step=3, since_ns=10**9), 70) for n in (2, 3)))
    other = group({2: INSIDE, 3: BEFORE}, name="1", ranks=(2, 3), backend="nccl")
    both = replace(
        evidence,
        expected_ranks=(0, 1, 2, 3),
        ranks=evidence.ranks | of_others.ranks,
        groups=(*evidence.groups, other),
    )
    verdict = judge(both)
    assert (verdict.suspected, verdict.concerned, verdict.group) == ((1,), (0, 1), "default")
    assert format_report(verdict, both)


def test_a_device_that_waits_elsewhere_is_not_named() -> None:
    """It is in a collective of another group, which comes before."""
    other = (replace(entry(5, all_reduce(), is_done=False), flags=REACHED),)
    evidence = on_devices(INSIDE, BEFORE, seconds=70, is_live=True)
    elsewhere = group({1: other}, name="pipeline", ranks=(1, 2), backend="nccl")
    assert judge(replace(evidence, groups=(*evidence.groups, elsewhere))).named == ()


def test_devices_that_are_all_busy_wait_for_nobody() -> None:
    """However far their hosts are ahead."""
    verdict = judge(on_devices(BEFORE, launched(False, False), is_live=True))
    assert verdict.kind == "healthy"
    verdict = judge(on_devices(BEFORE, BEFORE, seconds=70, is_live=True))
    assert (verdict.kind, verdict.named) == ("stuck", ())
    assert verdict.number == 7
