"""Real trainings of four ranks in which a known thing is wrong: each is named, by rank, cause and pattern.

``python -m benchmarks.injected_faults`` also compares costs with the truth, on a machine that does nothing else.
"""

from __future__ import annotations

import fcntl
import tempfile
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest

from overlapscope.analysis import Analysis
from overlapscope.lab.network.hosts import make_cluster
from overlapscope.stragglers.finding import Finding
from overlapscope.trace.recording import read_trace
from tests.cluster.faults import SlowLink
from tests.cluster.hosts import why_unavailable
from tests.cluster.injected import CASES, WORLD_SIZE, names, train

pytestmark = [pytest.mark.cluster, pytest.mark.slow]


@pytest.fixture(autouse=True)
def _one_at_a_time() -> Iterator[None]:
    """Ranks that run before all other processes must not have to share the cores with those of another test."""
    with (Path(tempfile.gettempdir()) / "overlapscope-injected-faults.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def blaming(findings: tuple[Finding, ...]) -> list[Finding]:
    """Those that blame a rank or a link for something that lasts.

    Single pauses, and transfers that take longer for a while, are what a machine that others use does by itself.
    """
    return [finding for finding in findings if finding.pattern.kind != "transient" and finding.ranks]


def findings_in(case: str, folder: Path) -> tuple[Finding, ...]:
    faults = CASES[case]
    links = [fault for fault in faults if isinstance(fault, SlowLink)]
    with make_cluster(WORLD_SIZE) if links else nullcontext() as hosts:
        for link in links:
            hosts.limit_rate(link.rank, link.rate)
        train(faults, folder, hosts, method="forkserver")
    stragglers = Analysis(read_trace(folder)).stragglers
    assert stragglers is not None
    return stragglers.findings


@pytest.mark.parametrize(
    "case",
    [
        "slow_compute_and_slow_data",
        *(pytest.param(case, marks=pytest.mark.nightly) for case in ("gc_pauses", "pause", "slow_compute_later")),
    ],
)
def test_every_fault_is_named_and_nobody_else_is_blamed(case: str, tmp_path: Path) -> None:
    findings = findings_in(case, tmp_path)
    for fault in CASES[case]:
        assert [finding for finding in findings if names(finding, fault)], fault
    assert all(any(names(finding, fault) for fault in CASES[case]) for finding in blaming(findings))


def test_in_a_healthy_training_nobody_is_blamed(tmp_path: Path) -> None:
    assert blaming(findings_in("none", tmp_path)) == []


@pytest.mark.nightly
@pytest.mark.skipif(why_unavailable() is not None, reason=f"no network namespaces: {why_unavailable()}")
def test_a_slow_link_is_named_by_its_two_ends(tmp_path: Path) -> None:
    """And no rank is blamed for it, although all of them communicate for longer."""
    (fault,) = CASES["slow_link"]
    for attempt in range(2):  # on a machine that is busy otherwise another cause may hide it
        found = blaming(findings_in("slow_link", tmp_path / str(attempt)))
        if len(found) == 1 and names(found[0], fault):
            break
    (finding,) = found
    assert names(finding, fault)
    assert finding.link is not None
    assert finding.link.peer_rank == (fault.rank - 1) % WORLD_SIZE, "gloo's ring sends to the rank before"
