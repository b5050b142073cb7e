"""Hosts of a cluster reach each other, the slow one at its rate, and nothing of them is left."""

from __future__ import annotations

import subprocess
import sys

import pytest

from overlapscope.errors import OverlapScopeError
from overlapscope.lab.network.hosts import BURST_BYTES, Hosts, make_cluster
from tests.cluster.hosts import why_unavailable

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

TIME_LIMIT_S = 30
TRANSFER_BYTES = 4 * 1024**2
SLOW_RATE, SLOW_BYTES_PER_S = "80mbit", 10e6

RECEIVE = """
import socket, sys, time
server = socket.create_server((sys.argv[1], 5000))
print("ready", flush=True)
connection, _ = server.accept()
start, received = time.monotonic(), 0
while part := connection.recv(65536):
    received += len(part)
print(received, time.monotonic() - start)
"""
SEND = """
import socket, sys
with socket.create_connection((sys.argv[1], 5000), timeout=10) as connection:
    connection.sendall(bytes(int(sys.argv[2])))
"""


@pytest.fixture(scope="module", autouse=True)
def _namespaces() -> None:
    reason = why_unavailable()
    if reason is not None:
        pytest.skip(reason)


def seconds_to_transfer(hosts: Hosts, sender: int, receiver: int) -> float:
    """Send ``TRANSFER_BYTES`` from host to host and see them arrive."""
    address = hosts.address(receiver)
    receive = [*hosts.command(receiver), sys.executable, "-c", RECEIVE, address]
    with subprocess.Popen(receive, stdout=subprocess.PIPE, text=True) as listening:
        try:
            assert listening.stdout is not None
            assert listening.stdout.readline() == "ready\n"
            send = [*hosts.command(sender), sys.executable, "-c", SEND, address, str(TRANSFER_BYTES)]
            subprocess.run(send, check=True, timeout=TIME_LIMIT_S)
            received, seconds = listening.communicate(timeout=TIME_LIMIT_S)[0].split()
        finally:
            listening.kill()
    assert int(received) == TRANSFER_BYTES
    return float(seconds)


def namespaces() -> set[str]:
    """Of this machine, by name."""
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    return {line.split()[0] for line in listed.splitlines()}


def test_a_slow_host_sends_at_most_at_its_rate() -> None:
    with make_cluster(3) as hosts:
        hosts.limit_rate(1, SLOW_RATE)
        seconds_to_transfer(hosts, sender=0, receiver=2)
        at_least_s = (TRANSFER_BYTES - BURST_BYTES) / SLOW_BYTES_PER_S
        assert seconds_to_transfer(hosts, sender=1, receiver=2) >= at_least_s


def test_two_clusters_exist_at_once_and_share_nothing() -> None:
    with make_cluster(2) as one, make_cluster(2) as other:
        other.limit_rate(0, SLOW_RATE)
        assert one.address(0) == other.address(0)
        seconds_to_transfer(one, sender=0, receiver=1)
        seconds_to_transfer(other, sender=1, receiver=0)


def test_nothing_is_left_of_a_cluster_that_failed() -> None:
    with pytest.raises(OverlapScopeError, match="qdisc"), make_cluster(2) as hosts:  # noqa: PT012
        own = {hosts.command(host)[3] for host in range(2)}
        assert own <= namespaces()
        hosts.limit_rate(1, "nonsense")
    assert not own & namespaces()
