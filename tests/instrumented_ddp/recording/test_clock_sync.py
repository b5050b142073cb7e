"""Pings over real sockets and threads: what is exchanged, and that nobody who misbehaves or dies does any harm."""

from __future__ import annotations

import json
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
import torch.distributed as dist

from instrumented_ddp.recording import clock_sync as clock_module
from instrumented_ddp.recording.clock_sync import HALF_TOKEN_BYTES, PING, ClockServer, ClockSync, PingConnection
from overlapscope.trace import clocks
from overlapscope.trace.schema import CLOCK_FILE

LOOPBACK = ["127.0.0.1"]
TIME_LIMIT_S = 20.0


def wait_until(is_so: Callable[[], bool]) -> None:
    give_up_at = time.monotonic() + TIME_LIMIT_S
    while not is_so():
        assert time.monotonic() < give_up_at, "it has not come true"
        time.sleep(0.01)


class RunningServer:
    """A server on a thread of its own."""

    def __init__(self) -> None:
        self.server = ClockServer()
        self._wake, self._woken = socket.socketpair()
        self.thread = threading.Thread(target=self._serve, daemon=True)
        self.thread.start()

    def connect(self) -> PingConnection:
        return PingConnection(LOOPBACK, self.server.port, self.server.token)

    def stranger(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.server.port), timeout=TIME_LIMIT_S)

    def close(self) -> None:
        """Begin to close, as a rank 0 that has trained to the end."""
        self._wake.send(b"e")

    def _serve(self) -> None:
        with self.server, self._woken:
            self.server.serve(woken=self._woken, until=lambda: bool(self._woken.recv(1)))


@pytest.fixture
def running() -> Iterator[RunningServer]:
    running = RunningServer()
    yield running
    with suppress(BrokenPipeError):  # it has closed already
        running.close()
    running.thread.join(TIME_LIMIT_S)
    assert not running.thread.is_alive()


def is_closed(connection: socket.socket) -> bool:
    """Whether the other end hangs up."""
    try:
        return connection.recv(1) == b""
    except ConnectionError:
        return True


def test_the_best_tenth_of_a_burst_is_kept_in_order(running):
    with running.connect() as connection:
        pings, best = connection.burst()
    assert pings == 100
    assert len(best) == 10
    assert best == sorted(best)
    assert all(sent_ns <= answered_ns <= received_ns for sent_ns, answered_ns, received_ns in best), "it is one clock"


def test_many_hosts_may_ping_at_once(running):
    connections = [running.connect() for _ in range(40)]
    bursts: list[tuple[int, list[tuple[int, int, int]]]] = []
    threads = [threading.Thread(target=lambda c=c: bursts.append(c.burst())) for c in connections]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(TIME_LIMIT_S)
    assert len(bursts) == 40
    assert all(best for _, best in bursts)
    for connection in connections:
        connection.socket.close()


@pytest.mark.parametrize(
    "said",
    [b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01\x02\x00", bytes(HALF_TOKEN_BYTES), bytes(100_000)],
    ids=["a browser", "TLS", "another token", "a flood"],
)
def test_who_does_not_know_the_token_is_hung_up_on(running, said):
    with running.stranger() as stranger:
        stranger.sendall(said)
        assert is_closed(stranger)
    with running.connect() as connection:
        assert connection.burst()[0] == 100


def test_a_token_may_come_in_pieces(running):
    with running.stranger() as client:
        for byte in running.server.token[:HALF_TOKEN_BYTES]:
            client.sendall(bytes([byte]))
            time.sleep(0.001)
        assert client.recv(100) == running.server.token[HALF_TOKEN_BYTES:]


def test_strangers_who_only_hold_the_line_do_not_pile_up(running):
    strangers = [running.stranger() for _ in range(300)]
    assert is_closed(strangers[0])
    with running.connect() as connection:
        assert connection.burst()[0] == 100
    for stranger in strangers:
        stranger.close()


def test_a_client_that_takes_no_answers_is_dropped_and_the_others_are_served(running):
    with running.stranger() as deaf, running.connect() as connection:
        deaf.sendall(running.server.token[:HALF_TOKEN_BYTES])
        deaf.setblocking(False)
        flood = PING.pack(0) * 1000

        def is_dropped() -> bool:
            try:
                deaf.send(flood)
            except BlockingIOError:
                return False
            except OSError:
                return True
            return False

        wait_until(is_dropped)
        assert connection.burst()[0] == 100


def test_a_client_that_dies_in_the_middle_of_a_ping_leaves_the_server_running(running):
    with running.stranger() as client:
        client.sendall(running.server.token[:HALF_TOKEN_BYTES] + b"\1\2\3")
    with running.connect() as connection:
        assert connection.burst()[0] == 100


def test_what_listens_at_the_address_and_is_no_clock_is_not_taken_for_one(running):
    with pytest.raises(OSError, match=r"can't reach rank 0 at 127\.0\.0\.1"):
        PingConnection(LOOPBACK, running.server.port, os.urandom(2 * HALF_TOKEN_BYTES))


def test_addresses_are_tried_one_after_the_other(running):
    with PingConnection(["not an address", *LOOPBACK], running.server.port, running.server.token) as connection:
        assert connection.burst()[0] == 100


def test_a_server_that_closes_says_so_and_waits_for_a_last_burst(running):
    with running.connect() as connection:
        running.close()
        connection.read_farewell()
        assert connection.is_server_closing
        assert connection.burst()[0] == 100
    running.thread.join(TIME_LIMIT_S)
    assert not running.thread.is_alive()


def test_a_farewell_between_two_pings_is_no_answer(running):
    with running.connect() as connection:
        running.close()
        wait_until(lambda: connection.burst()[0] == 100 and connection.is_server_closing)


# -- ranks: they find each other by the store ----------------------------------------------------------------------


@pytest.fixture
def ranks(tmp_path: Path, lone_rank: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., ClockSync]]:
    """Makes the sampling of several ranks in this process, with a store of their own and the boot they are given."""
    store = dist.HashStore()
    monkeypatch.setattr(clock_module, "_get_default_store", lambda: store)
    made: list[ClockSync] = []

    def make(rank: int, identity: str | None) -> ClockSync:
        monkeypatch.setattr(clocks, "get_boot_id", lambda: identity)
        folder = tmp_path / "traces" / f"rank_{rank}"
        folder.mkdir(parents=True, exist_ok=True)
        made.append(ClockSync(folder, rank))
        return made[-1]

    yield make
    for sampling in made:
        sampling.close()


def lines_of(tmp_path: Path, rank: int) -> list[dict[str, object]]:
    file = tmp_path / "traces" / f"rank_{rank}" / CLOCK_FILE
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def reasons_of(tmp_path: Path, rank: int) -> list[object]:
    return [line["reason"] for line in lines_of(tmp_path, rank)]


def test_a_rank_of_another_host_pings_at_the_start_at_a_rebuild_now_and_then_and_at_the_end(tmp_path, ranks, caplog):
    ranks(0, "host 0")
    reporter = ranks(1, "host 1")
    wait_until(lambda: reasons_of(tmp_path, 1) == ["start"])
    reporter.on_plan_rebuilt()
    wait_until(lambda: "rebuild" in reasons_of(tmp_path, 1))
    wait_until(lambda: "periodic" in reasons_of(tmp_path, 1))
    reporter.close()
    assert reasons_of(tmp_path, 1)[-1] == "end"
    first = lines_of(tmp_path, 1)[0]
    assert (first["reference"], first["pings"]) == ("host 0", 100)
    assert lines_of(tmp_path, 0) == []
    assert not caplog.records


def test_a_rank_0_that_closes_first_still_gives_the_others_their_last_burst(tmp_path, ranks, caplog):
    first = ranks(0, "host 0")
    ranks(1, "host 1")
    ranks(2, "host 2")
    wait_until(lambda: reasons_of(tmp_path, 1)[:1] == reasons_of(tmp_path, 2)[:1] == ["start"])
    first.close()
    wait_until(lambda: reasons_of(tmp_path, 1)[-1] == reasons_of(tmp_path, 2)[-1] == "end")
    assert not caplog.records


def test_ranks_on_rank_0s_clock_do_nothing(tmp_path, ranks):
    ranks(0, "host 0")
    other = ranks(1, "host 0")
    other._thread.join(TIME_LIMIT_S)
    assert not other._thread.is_alive()
    assert lines_of(tmp_path, 1) == []


def test_one_rank_of_a_host_pings_for_all_of_them(tmp_path, ranks):
    ranks(0, "host 0")
    samplings = [ranks(rank, "host 1") for rank in (1, 2, 3)]
    wait_until(lambda: sum(sampling._thread.is_alive() for sampling in samplings) == 1)
    wait_until(lambda: sum(bool(lines_of(tmp_path, rank)) for rank in (1, 2, 3)) == 1)


def test_ranks_of_unknown_boots_each_ping_for_themselves(tmp_path, ranks):
    ranks(0, None)
    ranks(1, None)
    ranks(2, None)
    wait_until(lambda: bool(lines_of(tmp_path, 1)) and bool(lines_of(tmp_path, 2)))


def test_a_rank_0_that_never_records_is_waited_for_in_silence(tmp_path, ranks, caplog):
    reporter = ranks(1, "host 1")
    reporter.close()
    assert lines_of(tmp_path, 1) == []
    assert not caplog.records


def test_a_rank_0_that_comes_later_is_found(tmp_path, ranks):
    ranks(1, "host 1")
    time.sleep(0.2)
    ranks(0, "host 0")
    wait_until(lambda: bool(lines_of(tmp_path, 1)))


@contextmanager
def a_process_that_serves(store_file: Path, folder: Path) -> Iterator[int]:
    """A rank 0 in a process of its own, which may be killed."""
    child = os.fork()
    if child == 0:
        clock_module._get_default_store = lambda: dist.FileStore(str(store_file), 2)
        clocks.get_boot_id = lambda: "host 0"
        ClockSync(folder / "rank_0", 0)
        time.sleep(TIME_LIMIT_S)
        os._exit(0)
    try:
        yield child
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_a_rank_0_that_is_killed_costs_one_line_and_keeps_what_was_sampled(tmp_path, lone_rank, monkeypatch, caplog):
    folder = tmp_path / "traces"
    (folder / "rank_1").mkdir(parents=True)
    store_file = tmp_path / "store"
    with a_process_that_serves(store_file, folder):
        monkeypatch.setattr(clock_module, "_get_default_store", lambda: dist.FileStore(str(store_file), 2))
        monkeypatch.setattr(clocks, "get_boot_id", lambda: "host 1")
        reporter = ClockSync(folder / "rank_1", 1)
        wait_until(lambda: bool(lines_of(tmp_path, 1)))
    wait_until(lambda: not reporter._thread.is_alive())
    reporter.on_plan_rebuilt()
    reporter.close()
    assert reasons_of(tmp_path, 1)[0] == "start"
    (line,) = caplog.messages
    assert line.startswith("rank 1: its clock is no longer compared with rank 0's: ")


def test_a_file_that_cant_be_written_costs_one_line(tmp_path, ranks, caplog):
    (tmp_path / "traces" / "rank_1" / CLOCK_FILE).mkdir(parents=True)
    ranks(0, "host 0")
    reporter = ranks(1, "host 1")
    wait_until(lambda: not reporter._thread.is_alive())
    assert len(caplog.messages) == 1


def test_without_a_default_process_group_there_is_nobody_to_ask(tmp_path):
    sampling = ClockSync(tmp_path, 1)
    sampling.on_plan_rebuilt()
    sampling.close()
    assert list(tmp_path.iterdir()) == []


def test_closing_twice_is_closing_once(ranks):
    sampling = ranks(0, "host 0")
    sampling.close()
    sampling.close()
    sampling.on_plan_rebuilt()


def test_the_boot_identity_is_that_of_the_kernel():
    identity = clocks.get_boot_id()
    assert identity is not None
    assert identity.startswith(Path("/proc/sys/kernel/random/boot_id").read_text().strip())
