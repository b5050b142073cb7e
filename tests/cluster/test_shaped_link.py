"""Links are as fast and as far as they are asked to be, and nothing of them is left."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from overlapscope.lab.network.link import Link
from tests.cluster.hosts import why_unavailable
from tests.cluster.shaped_link import LINKS, check, ranks_over

pytestmark = [pytest.mark.cluster, pytest.mark.slow]


@pytest.fixture(scope="module", autouse=True)
def _namespaces() -> None:
    if lacking := why_unavailable():
        pytest.skip(lacking)
    if not os.access("/dev/net/tun", os.R_OK | os.W_OK):
        pytest.skip("there is no /dev/net/tun to be used")


def namespaces() -> set[str]:
    """Of this machine, by name."""
    return {path.name for path in Path("/run/netns").glob("*")}


@pytest.mark.parametrize("latency_ms", [0, 2.5])
def test_a_link_has_the_rate_and_the_latency_asked_for(latency_ms):
    link = Link(bits_per_s=400e6, latency_ms=latency_ms)
    with ranks_over(link) as ranks:
        seen = check(ranks, link)
    assert seen.bytes_per_s <= 1.15 * 50e6  # and less, where others keep this machine busy
    assert seen.rtt_us >= 2 * latency_ms * 1000


def test_a_latency_lies_between_all_pairs_of_hosts():
    link = Link(latency_ms=5)
    with ranks_over(link, 3) as ranks:
        for one, other in [(0, 1), (1, 2), (2, 0)]:
            assert check(ranks.only(one, other), link).rtt_us >= 10_000


def test_ranks_know_who_they_are_and_by_which_interface_they_are_linked(tmp_path):
    script = (
        "import os, pathlib, socket;"
        "seen = os.environ['GLOO_SOCKET_IFNAME'], os.environ['WORLD_SIZE'];"
        f"assert seen[0] in [name for _, name in socket.if_nameindex()];"
        f"pathlib.Path({str(tmp_path)!r}, os.environ['RANK']).write_text(seen[1])"
    )
    for name, link in LINKS.items():
        with ranks_over(link, 2) as ranks:
            ranks.run(["-c", script], os.environ, time_limit_s=30)
        assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"0": "2", "1": "2"}, name


@pytest.mark.parametrize("link", [Link(bits_per_s=1e9), Link(latency_ms=1)], ids=str)
def test_nothing_is_left_of_a_link_that_is_interrupted(link):
    with pytest.raises(KeyboardInterrupt), ranks_over(link) as ranks:  # noqa: PT012
        own = {prefix[3] for prefix in ranks.prefixes}
        assert own <= namespaces()
        raise KeyboardInterrupt
    assert not own & namespaces()
