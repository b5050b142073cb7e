"""TCP connections of a process are sampled without touching them."""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from instrumented_ddp.recording.background import BackgroundScheduler
from instrumented_ddp.recording.tcp_stats import LinkSampler, endpoint, sample_connections
from overlapscope.trace.schema import LINKS_FILE

ENOUGH = 128 * 1024
TIME_LIMIT_S = 60


@contextmanager
def connected(ip: str = "127.0.0.1", sent_bytes: int = ENOUGH) -> Iterator[tuple[socket.socket, socket.socket]]:
    """A sender and a receiver that has received what was sent."""
    is_ipv6 = ":" in ip
    with ExitStack() as opened:
        family = socket.AF_INET6 if is_ipv6 else socket.AF_INET
        listener = opened.enter_context(socket.create_server((ip, 0), family=family, dualstack_ipv6=is_ipv6))
        sender = opened.enter_context(socket.create_connection(listener.getsockname()[:2], timeout=10))
        receiver = opened.enter_context(listener.accept()[0])
        receiver.settimeout(10)
        sender.sendall(bytes(sent_bytes))
        left = sent_bytes
        while left:
            left -= len(receiver.recv(left))
        yield sender, receiver


def test_both_ends_of_a_connection_are_seen_with_what_went_through():
    with connected() as (sender, receiver):
        ours, theirs = (f"127.0.0.1:{end.getsockname()[1]}" for end in (sender, receiver))
        found = {(c["local"], c["peer"]): c for c in sample_connections()}
        assert found[ours, theirs]["bytes_acked"] >= ENOUGH
        assert found[theirs, ours]["bytes_received"] == ENOUGH
        assert found[ours, theirs]["min_rtt_us"] >= 0


@pytest.mark.parametrize("ip", ["::1", "::ffff:127.0.0.1"])
def test_connections_over_ipv6_sockets_are_seen(ip):
    if not socket.has_dualstack_ipv6():
        pytest.skip("this machine has no IPv6")
    with connected(ip) as (sender, _):
        assert endpoint(sender.getsockname()) in {c["local"] for c in sample_connections()}


def test_an_address_is_written_the_same_from_both_ends():
    """One end may use a socket of IPv6 and the other not; they would not be recognized as one connection."""
    assert endpoint(("::ffff:10.0.0.1", 80, 0, 0)) == endpoint(("10.0.0.1", 80)) == "10.0.0.1:80"
    assert endpoint(("fe80::1", 80, 0, 0)) == "[fe80::1]:80"


def test_a_connection_that_has_carried_little_is_left_out():
    with connected(sent_bytes=1000) as (sender, _):
        port = sender.getsockname()[1]
        assert not any(c["local"].endswith(f":{port}") for c in sample_connections())


def test_whatever_else_is_open_is_passed_over(tmp_path):
    with ExitStack() as opened:
        opened.enter_context((tmp_path / "file").open("w"))
        for end in socket.socketpair():
            opened.enter_context(end)
        opened.enter_context(socket.create_server(("127.0.0.1", 0)))
        opened.enter_context(socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
        opened.enter_context(socket.socket(socket.AF_NETLINK, socket.SOCK_RAW))
        assert list(sample_connections()) == []


def test_a_connection_that_was_looked_at_goes_on_and_its_end_is_seen_by_the_peer():
    with connected() as (sender, receiver):
        before = os.listdir("/proc/self/fd")
        assert len(list(sample_connections())) == 2
        assert os.listdir("/proc/self/fd") == before
        sender.sendall(b"still here")
        assert receiver.recv(100) == b"still here"
        sender.close()
        assert receiver.recv(100) == b""


def samples_in(folder: Path) -> list[int]:
    """Connections of each sample."""
    return [len(json.loads(line)["connections"]) for line in (folder / LINKS_FILE).read_text().splitlines()]


def wait_for_samples(folder: Path, count: int) -> None:
    deadline = time.monotonic() + TIME_LIMIT_S
    while not (folder / LINKS_FILE).exists() or len(samples_in(folder)) < count:
        assert time.monotonic() < deadline, f"no {count} samples in {TIME_LIMIT_S} s"
        time.sleep(0.01)


@pytest.fixture
def scheduler() -> Iterator[BackgroundScheduler]:
    scheduler = BackgroundScheduler(0)
    yield scheduler
    scheduler.close(TIME_LIMIT_S)


def test_the_last_sample_is_taken_when_the_recording_is_closed(tmp_path, scheduler):
    with connected():
        LinkSampler(tmp_path, scheduler)
        scheduler.close(TIME_LIMIT_S)
        scheduler.close(TIME_LIMIT_S)
    assert samples_in(tmp_path)[-1] == 2


def test_a_sample_is_taken_at_the_begin_and_whenever_another_part_of_the_run_begins(tmp_path, scheduler):
    with connected():
        sampler = LinkSampler(tmp_path, scheduler, min_interval_s=TIME_LIMIT_S)
        wait_for_samples(tmp_path, 1)
        sampler.sample_soon()
        wait_for_samples(tmp_path, 2)


def test_nothing_is_written_where_there_are_no_connections(tmp_path, scheduler):
    LinkSampler(tmp_path, scheduler)
    scheduler.close(TIME_LIMIT_S)
    assert not (tmp_path / LINKS_FILE).exists()


def test_training_goes_on_where_samples_cannot_be_written(tmp_path, scheduler, caplog):
    with connected():
        LinkSampler(tmp_path / "missing", scheduler)
        scheduler.close(TIME_LIMIT_S)
    assert not caplog.records
