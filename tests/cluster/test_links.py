"""Hosts with links of which one is slow: the counters of real training processes name it."""

from __future__ import annotations

from pathlib import Path

import pytest

from overlapscope.analysis import Analysis
from overlapscope.lab.network.hosts import make_cluster
from overlapscope.stragglers.transfers import find_slow_links, measure_link_rates
from overlapscope.trace.recording import Trace, read_trace
from tests.cluster.hosts import entrance_to, why_unavailable
from tests.cluster.ranks import Ranks
from tests.cluster.training_over_links import train

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

RATE_BYTES_PER_S = 25_000_000  # 200 Mbit/s


@pytest.fixture(autouse=True, scope="module")
def _hosts_are_available() -> None:
    if lacking := why_unavailable():
        pytest.skip(lacking)


def training_of(folder: Path, hosts_in_all: int, *, steps: int, slow_host: int | None) -> Trace:
    with make_cluster(hosts_in_all) as hosts:
        if slow_host is not None:
            hosts.limit_rate(slow_host, "200mbit")
        with Ranks(hosts_in_all, entrance_to(hosts)) as ranks:
            assert ranks.call(train, folder / "trace", steps) == [None] * hosts_in_all
    trace = read_trace(folder / "trace")
    assert trace.problems == ()
    return trace


@pytest.mark.parametrize(("hosts", "slow_host"), [(2, 0), (4, 1)])
def test_the_host_that_sends_slowly_is_named_first_by_its_link(tmp_path, hosts, slow_host):
    slow = find_slow_links(measure_link_rates(training_of(tmp_path, hosts, steps=12, slow_host=slow_host)))
    assert slow["rank"].iloc[0] == slow_host
    first = slow.iloc[0]
    # Not its rate as the kernel samples it: after a pause the bucket of tc is full, and here are few samples.
    assert first["bytes"] / (first["busy_ns"] / 1e9) < 1.1 * RATE_BYTES_PER_S, "the link lets no more through"


@pytest.mark.nightly
def test_among_links_that_are_alike_none_is_blamed(tmp_path):
    """One may seem slow on a machine that is busy; but all-reduces don't take as long as it would need."""
    trace = training_of(tmp_path, 4, steps=100, slow_host=None)
    rates = measure_link_rates(trace)
    busiest = rates[rates["bytes"] > rates["bytes"].max() / 2]
    assert sorted(busiest["rank"]) == [0, 1, 2, 3], "a ring: every rank sends to one other"
    stragglers = Analysis(trace).stragglers
    assert stragglers is not None
    assert [finding.link for finding in stragglers.findings if finding.link] == []
