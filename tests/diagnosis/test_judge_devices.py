"""Who is named where hosts go on once they have launched a collective, and only devices wait: over NCCL."""

from __future__ import annotations

from dataclasses import replace

import pytest

from overlapscope.diagnosis.evidence import Entry, Evidence
from overlapscope.diagnosis.judge import judge
from overlapscope.diagnosis.report_text import format_report
from overlapscope.trace.collective_log import REACHED, UNREACHED
from tests.diagnosis.jobs import HELD_UP, WAITING, entry, group, idle, job, rank, trained
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
    assert "have launched collective 7 of" in verdict.sentence


def test_that_all_hosts_have_launched_a_collective_does_not_say_that_all_devices_are_in_it() -> None:
    stuck = [idle(rank(n, "running", phase="loop", step=3, since_ns=10**9, is_working=True), 5) for n in (0, 1)]
    verdict = judge(job(*stuck, groups=[group({0: WAITING, 1: WAITING}, backend="nccl")], is_live=True))
    assert (verdict.kind, verdict.blamed, verdict.suspected) == ("stuck", (), ())
    assert "have launched collective 9" in verdict.sentence
    assert any("hosts run ahead" in each for each in verdict.evidence)


def launched(*is_reached: bool | None, done: int = 6) -> tuple[Entry, ...]:
    """So many have completed; then these, of which it is known, or not, whether the device has come to them."""
    flags = {None: 0, True: UNREACHED | REACHED, False: UNREACHED}
    numbers = range(done + 1, done + 1 + len(is_reached))
    ahead = (entry(n, bucket((n - 1) % 3), step=(n - 1) // 3, is_done=False) for n in numbers)
    return trained(done) + tuple(replace(one, flags=flags[each]) for one, each in zip(ahead, is_reached, strict=True))


def on_devices(*windows: tuple[Entry, ...], seconds: float = 5, **more: object) -> Evidence:
    """Hosts have launched these over NCCL, and ask their devices again and again."""
    ranks = [
        idle(rank(n, "running", phase="loop", step=3, since_ns=10**9, is_working=True), seconds)
        for n in range(len(windows))
    ]
    return job(*ranks, groups=[group(dict(enumerate(windows)), backend="nccl")], **more)  # type: ignore[arg-type]


INSIDE, BEFORE = launched(True, False, False), launched(False, False, False)


@pytest.mark.parametrize(("seconds", "kind", "named"), [(5, "slow", ()), (70, "stuck", (1,))])
def test_the_device_that_has_not_come_to_a_collective_is_named(seconds: float, kind: str, named: tuple) -> None:
    """It may be at something that takes this long once."""
    verdict = judge(on_devices(INSIDE, BEFORE, INSIDE, seconds=seconds, is_live=True))
    assert (verdict.kind, verdict.suspected, verdict.step) == (kind, named, 2)
    assert 1 in verdict.concerned
    assert "device of rank 1" in verdict.sentence


def test_it_is_named_of_a_job_that_was_ended_as_well() -> None:
    evidence = on_devices(INSIDE, BEFORE, INSIDE)
    verdict = judge(evidence)
    assert (verdict.kind, verdict.named, verdict.number) == ("stuck", (1,), 7)
    assert verdict.certainty != "certain", "it may have been ended too early"
    lines = format_report(verdict, evidence).splitlines()
    [line] = [line for line in lines if line.startswith("  >")]
    assert line.count("device in it") == line.count("device not there") == 1, "side by side"
    assert "Collectives of the default group:" in lines


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
