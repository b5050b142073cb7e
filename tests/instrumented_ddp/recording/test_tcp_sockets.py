"""Which sockets of a process are seen, whoever has opened them."""

from __future__ import annotations

import os
import socket

from instrumented_ddp.recording.tcp_stats import endpoint, iter_tcp_sockets


def names() -> list[str]:
    return [endpoint(one.getsockname()) for one in iter_tcp_sockets()]


def test_tcp_sockets_are_seen_and_no_others() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname()) as client,
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as datagrams,
    ):
        datagrams.bind(("127.0.0.1", 0))
        seen = names()
        assert endpoint(server.getsockname()) in seen
        assert endpoint(client.getsockname()) in seen
        assert endpoint(datagrams.getsockname()) not in seen


def test_looking_leaves_no_descriptors_open_and_closes_none() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        before = sorted(os.listdir("/proc/self/fd"))
        names()
        assert sorted(os.listdir("/proc/self/fd")) == before
        with socket.create_connection(server.getsockname()):
            server.accept()[0].close()


def test_an_address_is_written_the_same_from_both_ends() -> None:
    assert endpoint(("::ffff:10.0.0.1", 80, 0, 0)) == endpoint(("10.0.0.1", 80)) == "10.0.0.1:80"
    assert endpoint(("fe80::1", 80, 0, 0)) == "[fe80::1]:80"
