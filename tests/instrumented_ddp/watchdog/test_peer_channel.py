"""How watchdogs exchange messages, and what they do when nobody answers."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch.distributed as dist

from instrumented_ddp.watchdog import peer_channel
from instrumented_ddp.watchdog.peer_channel import (
    FolderStore,
    JobStore,
    KeyValueStore,
    PeerChannel,
    connect_to_job_store,
)
from instrumented_ddp.watchdog.process_state import STOPPED, read_process_state
from instrumented_ddp.watchdog.protocol import Messages
from overlapscope.errors import OverlapScopeError
from tests.cluster.ranks import CONTEXT


def channel_over(connect: Callable[[], KeyValueStore], run_folder: Path = Path("/nowhere")) -> PeerChannel:
    return PeerChannel(run_folder, 0, lambda: 1, lambda: {"heartbeat.0": "final"}, connect)


@pytest.fixture(params=["folder", "file", "hash", "tcp"])
def store(request, tmp_path):
    if request.param == "folder":
        yield FolderStore(tmp_path / "messages", 0, 1)
        return
    if request.param == "file":
        backend = dist.FileStore(str(tmp_path / "store"), 1)
    elif request.param == "hash":
        backend = dist.HashStore()
    else:
        backend = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    yield JobStore(cloned(dist.PrefixStore("job", backend)), "watchdog/")


def cloned(store):
    """A connection of its own, where torch can make one (2.8)."""
    return store.clone() if hasattr(store, "clone") else store


def test_messages_are_found_again_and_the_first_claim_holds(store):
    channel = channel_over(lambda: store)
    keys = ["heartbeat.0", "heartbeat.1"]
    first = channel.exchange(Messages(writes={"heartbeat.0": "a"}, keys_to_poll=keys, claims={"judge": "0"}), 10)
    assert first == {"judge": b"0", "heartbeat.0": b"a"}
    second = channel.exchange(Messages(writes={"heartbeat.0": "b"}, keys_to_poll=keys, claims={"judge": "1"}), 10)
    assert second == {"judge": b"0", "heartbeat.0": b"b"}
    channel.leave()


def test_the_last_rank_to_leave_removes_the_folder(tmp_path):
    stores = [FolderStore(tmp_path / "messages", rank, 2) for rank in range(2)]
    stores[0].leave()
    assert (tmp_path / "messages").exists()
    stores[1].leave()
    assert not (tmp_path / "messages").exists()


def test_confidential_messages_are_not_beside_the_file_where_hosts_meet(tmp_path, monkeypatch):
    monkeypatch.setenv("OVERLAPSCOPE_CONFIDENTIAL", "1")
    monkeypatch.setattr(peer_channel, "_get_default_store", lambda: dist.FileStore(str(tmp_path / "shared"), 2))
    (tmp_path / "private" / "rank_0").mkdir(parents=True)
    with pytest.raises(OverlapScopeError):  # the other rank is on another host
        connect_to_job_store(tmp_path / "private", 0, 2)
    (tmp_path / "private" / "rank_1").mkdir()
    connect_to_job_store(tmp_path / "private", 0, 2).set("alarm", "a name")
    assert {path.name for path in tmp_path.iterdir()} <= {"private", "shared"}
    assert (tmp_path / "private" / "watchdog" / "alarm").exists()


class FailingStore:
    """A store that can't be written to."""

    def in_use(self):
        return nullcontext()

    def set(self, key, value):
        raise ConnectionResetError("gone")

    def get(self, key):
        return None

    def claim(self, key, value):
        return value.encode()

    def leave(self):
        pass


def test_the_final_messages_are_written_once_and_only_if_the_store_was_used():
    written: list[dict[str, str]] = []

    class Store(FailingStore):
        def set(self, key, value):
            written.append({key: value})

    channel = channel_over(Store)
    channel.leave()
    assert written == []
    channel.exchange(Messages(), 10)
    channel.leave()
    channel.leave()
    assert written == [{"heartbeat.0": "final"}]


def test_a_silent_store_is_replaced_by_a_folder_that_all_ranks_see(tmp_path):
    channel = channel_over(FailingStore, tmp_path)
    message = Messages(writes={"a": "b"}, keys_to_poll=["a"])
    assert channel.exchange(message, 10) is None
    assert not channel.is_silent, "it may be a hiccup"
    assert channel.exchange(message, 10) is None
    assert channel.is_silent
    assert not channel.switch_to_folder(), "a rank has no folder here"
    (tmp_path / "rank_0").mkdir()
    assert channel.switch_to_folder()
    assert channel.exchange(message, 10) == {"a": b"b"}
    assert not channel.is_silent


def test_connecting_is_waited_for_briefly_and_continues(tmp_path):
    may_connect = threading.Event()

    def connect() -> FolderStore:
        may_connect.wait(20)
        return FolderStore(tmp_path / "messages", 0, 1)

    channel = channel_over(connect)
    assert channel.exchange(Messages(writes={"a": "b"}), 0.05) is None
    assert channel.error is None
    may_connect.set()
    assert channel.exchange(Messages(writes={"a": "b"}, keys_to_poll=["a"]), 20) == {"a": b"b"}


def serve(pipe: Connection) -> None:
    store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    pipe.send(store.port)
    pipe.recv()


@pytest.mark.slow
def test_a_store_whose_host_is_stopped_is_waited_for_briefly_and_found_again():
    ours, theirs = CONTEXT.Pipe()
    process = CONTEXT.Process(target=serve, args=(theirs,))
    process.start()
    port = ours.recv()
    channel = channel_over(lambda: JobStore(dist.TCPStore("127.0.0.1", port, None, False), ""))
    assert channel.exchange(Messages(writes={"a": "b"}, keys_to_poll=["a"]), 20) is not None
    os.kill(process.pid, signal.SIGSTOP)
    while read_process_state(process.pid).state not in STOPPED:
        time.sleep(0.001)
    try:
        assert channel.exchange(Messages(keys_to_poll=["a"]), 0.05) is None, "it does not answer"
        assert channel.exchange(Messages(keys_to_poll=["a"]), 0.05) is None, "it can't be connected to"
        assert channel.error is None
    finally:
        os.kill(process.pid, signal.SIGCONT)
    assert channel.exchange(Messages(keys_to_poll=["a"]), 20) == {"a": b"b"}
    ours.send("end")
    process.join(20)


def test_a_store_that_fails_is_connected_to_again():
    connected = []

    def connect() -> FailingStore:
        connected.append(FailingStore())
        return connected[-1]

    channel = channel_over(connect)
    for _ in range(2):
        assert channel.exchange(Messages(writes={"a": "b"}), 10) is None
        assert isinstance(channel.error, ConnectionResetError)
    assert len(connected) == 2


@pytest.mark.skipif(not hasattr(dist.Store, "clone"), reason="needs torch 2.8")
def test_a_store_whose_process_has_ended_fails_without_a_page_of_frames(capfd):
    server = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    store = JobStore(server.clone(), "")
    channel = channel_over(lambda: store)
    assert channel.exchange(Messages(writes={"a": "b"}), 20) is not None
    del server
    assert channel.exchange(Messages(keys_to_poll=["a"]), 20) is None
    assert isinstance(channel.error, ConnectionResetError | RuntimeError)
    assert "frame #0" not in capfd.readouterr().err
