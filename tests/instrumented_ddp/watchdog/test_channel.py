"""How watchdogs leave word for each other, and what they do when nobody answers."""

from __future__ import annotations

import os
import signal
import threading
import time
from contextlib import nullcontext
from multiprocessing.connection import Connection

import pytest
import torch.distributed as dist

from instrumented_ddp.watchdog.peer_channel import Channel, FolderBoard, Round, _StoreBoard
from instrumented_ddp.watchdog.process_state import STOPPED, read_process_state
from tests.cluster.ranks import CONTEXT


@pytest.fixture(params=["folder", "file", "hash", "tcp"])
def board(request, tmp_path):
    if request.param == "folder":
        yield FolderBoard(tmp_path / "board", 0, 1)
        return
    if request.param == "file":
        store = dist.FileStore(str(tmp_path / "store"), 1)
    elif request.param == "hash":
        store = dist.HashStore()
    else:
        store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    yield _StoreBoard(cloned(dist.PrefixStore("job", store)), "watchdog/")


def cloned(store):
    """A connection of its own, where torch can make one (2.8)."""
    return store.clone() if hasattr(store, "clone") else store


def test_words_are_found_again_and_the_first_claim_holds(board):
    channel = Channel(lambda: board)
    first = channel.exchange(
        Round(writes={"beat.0": "a"}, keys_to_poll=["beat.0", "beat.1"], claims={"judge": "0"}), 10
    )
    assert first is not None
    assert first.error is None
    assert first.replies == {"judge": b"0", "beat.0": b"a"}
    second = channel.exchange(Round(writes={"beat.0": "b"}, keys_to_poll=["beat.0"], claims={"judge": "1"}), 10)
    assert second is not None
    assert second.replies == {"judge": b"0", "beat.0": b"b"}
    channel.close()


def test_the_last_who_leaves_takes_the_folder_away(tmp_path):
    boards = [FolderBoard(tmp_path / "board", rank, 2) for rank in range(2)]
    boards[0].leave()
    assert (tmp_path / "board").exists()
    boards[1].leave()
    assert not (tmp_path / "board").exists()


def test_who_connects_waits_for_a_moment_only(tmp_path):
    is_made = threading.Event()

    def connect() -> FolderBoard:
        is_made.wait(20)
        return FolderBoard(tmp_path / "board", 0, 1)

    channel = Channel(connect)
    assert channel.exchange(Round(writes={"a": "b"}, keys_to_poll=()), 0.05) is None
    is_made.set()
    done = channel.exchange(Round(writes={"a": "b"}, keys_to_poll=["a"]), 20)
    assert done is not None
    assert done.replies == {"a": b"b"}


def serve(pipe: Connection) -> None:
    store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    pipe.send(store.port)
    pipe.recv()


@pytest.mark.slow
def test_a_store_whose_host_is_stopped_is_waited_for_a_moment_only_and_found_again():
    ours, theirs = CONTEXT.Pipe()
    process = CONTEXT.Process(target=serve, args=(theirs,))
    process.start()
    port = ours.recv()
    channel = Channel(lambda: _StoreBoard(dist.TCPStore("127.0.0.1", port, None, False), ""))
    assert channel.exchange(Round(writes={"a": "b"}, keys_to_poll=["a"]), 20) is not None
    os.kill(process.pid, signal.SIGSTOP)
    while read_process_state(process.pid).state not in STOPPED:
        time.sleep(0.001)
    try:
        assert channel.exchange(Round(writes={}, keys_to_poll=["a"]), 0.05) is None, "it does not answer"
        assert channel.exchange(Round(writes={}, keys_to_poll=["a"]), 0.05) is None, "it can't be connected to"
    finally:
        os.kill(process.pid, signal.SIGCONT)
    done = channel.exchange(Round(writes={}, keys_to_poll=["a"]), 20)
    assert done is not None
    assert done.replies == {"a": b"b"}
    ours.send("end")
    process.join(20)


def test_a_board_that_fails_is_made_anew():
    made = []

    class Failing:
        def in_use(self):
            return nullcontext()

        def set(self, key, value):
            raise ConnectionResetError("gone")

        def leave(self):
            pass

    def connect():
        made.append(Failing())
        return made[-1]

    channel = Channel(connect)
    for _ in range(2):
        done = channel.exchange(Round(writes={"a": "b"}, keys_to_poll=()), 10)
        assert done is not None
        assert isinstance(done.error, ConnectionResetError)
    assert len(made) == 2


@pytest.mark.skipif(not hasattr(dist.Store, "clone"), reason="needs torch 2.8")
def test_a_store_whose_process_has_ended_fails_without_a_page_of_frames(capfd):
    server = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    board = _StoreBoard(server.clone(), "")
    channel = Channel(lambda: board)
    assert channel.exchange(Round(writes={"a": "b"}, keys_to_poll=()), 20) is not None
    del server
    done = channel.exchange(Round(writes={}, keys_to_poll=["a"]), 20)
    assert done is not None
    assert isinstance(done.error, ConnectionResetError | RuntimeError)
    assert "frame #0" not in capfd.readouterr().err
