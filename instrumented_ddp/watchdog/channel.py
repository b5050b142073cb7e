"""Where watchdogs leave messages for each other: the job's store, or a folder that all ranks can see.

A store answers at once, blocks its caller for ever (its host is stopped), or fails (its host is gone), and only the
first of these is harmless. So it is asked over a connection of our own, which has a time limit.
"""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import socket
import struct
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any, Final, Protocol

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store, _get_default_store

from instrumented_ddp.recording.tcp_sockets import duplicate_of
from overlapscope.trace.format import WATCHDOG_FOLDER

_STORE_TIMEOUT: Final = timedelta(seconds=5)
_ANSWER_WITHIN: Final = struct.pack("ll", 1, 0)
"""Seconds and microseconds: a ``struct timeval``."""
_ERRORS_ONLY: Final = 2
_NOTHING: Final = "nothing"
"""No message is this: they are JSON."""


class Board(Protocol):
    """Messages by key. Whatever goes wrong is raised."""

    def in_use(self) -> AbstractContextManager[None]:
        """Messages are left and read inside."""

    def set(self, key: str, value: str) -> Any:
        """Write or overwrite a message."""

    def read(self, key: str) -> bytes | None:
        """What was written; None if nothing was."""

    def claim(self, key: str, value: str) -> bytes:
        """Write if the key is unused, and return what is there then."""

    def leave(self) -> None:
        """Note that this rank no longer needs the board."""


class FolderBoard:
    """One file per message, in a folder that all ranks see.

    Args:
        folder: created if missing.
        rank: of this process.
        world_size: how many ranks use it.

    Raises:
        OSError: the folder can't be made.
    """

    def __init__(self, folder: Path, rank: int, world_size: int) -> None:
        self._folder = folder
        self._rank = rank
        self._world_size = world_size
        folder.mkdir(exist_ok=True)

    def in_use(self) -> AbstractContextManager[None]:
        """Do nothing: a folder is always there."""
        return nullcontext()

    def set(self, key: str, value: str) -> None:
        """Write a message such that nobody ever reads half of it."""
        part = self._folder / f".{key}.{os.getpid()}"
        part.write_text(value, encoding="utf-8")
        part.replace(self._folder / key)

    def read(self, key: str) -> bytes | None:
        """What was written; None if nothing was."""
        with suppress(FileNotFoundError):
            return (self._folder / key).read_bytes()
        return None

    def claim(self, key: str, value: str) -> bytes:
        """Write if the key is unused, and return what is there then."""
        part = self._folder / f".{key}.{os.getpid()}"
        part.write_text(value, encoding="utf-8")
        with suppress(FileExistsError):
            os.link(part, self._folder / key)
        part.unlink()
        return (self._folder / key).read_bytes()

    def leave(self) -> None:
        """Remove the folder if this is the last rank to leave."""
        with suppress(OSError):
            self.set(f"left.{self._rank}", "")
            if all((self._folder / f"left.{rank}").exists() for rank in range(self._world_size)):
                shutil.rmtree(self._folder)


class _Named:
    """A store, with our keys apart from those of others.

    Args:
        store: over a connection of our own, which gets a time limit: torch has none for most of what a store is asked
            (``recvBytes`` in torch/csrc/distributed/c10d/Utils.hpp raises when the socket's own has passed).
        prefix: of our keys.
    """

    def __init__(self, store: Store, prefix: str) -> None:
        self._store = store
        self._prefix = prefix
        self._descriptor = _descriptor_of(store)
        if self._descriptor is not None:
            with duplicate_of(self._descriptor) as connection:
                for limit in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
                    connection.setsockopt(socket.SOL_SOCKET, limit, _ANSWER_WITHIN)

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Silence torch, which prints a page of C++ frames when the process of a store ends, as at the end of a job.

        Raises:
            TimeoutError: the store does not answer; the connection is of no more use.
        """
        if self._descriptor is not None:
            with duplicate_of(self._descriptor) as connection, suppress(BlockingIOError):
                if connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) == b"":
                    raise ConnectionResetError("its process has ended")
        level = _level_of_torchs_log()  # it may end just now
        before = level.value
        level.value = max(before, _ERRORS_ONLY)
        try:
            yield
        except RuntimeError as error:
            if "Timeout" in str(error):
                raise TimeoutError from error
            raise
        finally:
            level.value = before

    def set(self, key: str, value: str) -> None:
        self._store.set(self._prefix + key, value)

    def read(self, key: str) -> bytes | None:
        """One question and one answer: nothing is written, because nobody's message is what we say we expect there."""
        value = bytes(self._store.compare_set(self._prefix + key, _NOTHING, _NOTHING))
        return None if value == _NOTHING.encode() else value

    def claim(self, key: str, value: str) -> bytes:
        return bytes(self._store.compare_set(self._prefix + key, "", value))

    def leave(self) -> None:
        """Do nothing, as a store's content goes with it."""


@cache
def _level_of_torchs_log() -> ctypes.c_int:
    """Severity from which C++ prints, set for microseconds only because it applies to the whole process."""
    try:
        library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
        return ctypes.c_int.in_dll(library, "FLAGS_caffe2_log_level")
    except (OSError, ValueError):  # torch was built differently
        return ctypes.c_int()


def _descriptor_of(store: Store) -> int | None:
    """Descriptor of the connection to the process that holds the store, which torch only reveals in a store's repr."""
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    found = re.match(r"TCPStore\(client=TCPClient\(SocketImpl\(fd=(\d+),", repr(store))
    return int(found[1]) if found else None


def connect(run_folder: Path, rank: int, world_size: int) -> Board:
    """The board on which this job's ranks find each other.

    A store that is a file only ever grows, so a folder beside it is used instead.

    Raises:
        Exception: there is no store, or it can't be reached.
    """
    store = _get_default_store()
    file = _file_of(store)
    if file is not None:
        return FolderBoard(Path(f"{file}.{run_folder.name}.{WATCHDOG_FOLDER}"), rank, world_size)
    if hasattr(store, "clone"):  # our own connection: the training may wait in the other one
        store = store.clone()
        store.set_timeout(_STORE_TIMEOUT)
    return _Named(store, f"overlapscope/watchdog/{run_folder.name}/")


def sees_all_ranks(run_folder: Path, world_size: int) -> bool:
    """Whether all ranks have their folders here."""
    return all((run_folder / f"rank_{rank}").exists() for rank in range(world_size))


def _file_of(store: Store) -> str | None:
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return str(store.path) if isinstance(store, dist.FileStore) else None  # type: ignore[attr-defined]


@dataclass
class Round:
    """What one rank says and asks at one time."""

    says: Mapping[str, str]
    asks: Sequence[str]
    claims: Mapping[str, str] = field(default_factory=dict)
    """Keys that only the first rank to claim them writes."""
    answers: dict[str, bytes] = field(default_factory=dict)
    """Answers to ``asks`` and ``claims``, without keys that nobody has written."""
    error: Exception | None = None


class Channel:
    """Carries rounds to the board and back, on the thread that asks for it.

    A connection of ours waits for its time limit and no longer, so rounds end. Making one may take for ever, where the
    store's host is stopped: that is done on a thread of its own, which then ends.

    Args:
        connect: makes the board, and makes it anew after a failure.
    """

    def __init__(self, connect: Callable[[], Board]) -> None:
        self._connect = connect
        self._board: Board | None = None
        self._connecting: _Connecting | None = None

    def exchange(self, round_: Round, timeout_s: float) -> Round | None:
        """Say and ask.

        Args:
            timeout_s: how long a connection may take.

        Returns:
            The round with its answers or an error; None if the board does not answer in time.
        """
        try:
            if self._board is None:
                self._connecting = self._connecting or _Connecting(self._connect)
                if not self._connecting.is_over.wait(timeout_s):
                    return None
                connecting, self._connecting = self._connecting, None
                self._board = connecting.board()
            _carry_one(self._board, round_)
        except TimeoutError:
            self._board = None
            return None
        except Exception as error:
            round_.error, self._board = error, None
        return round_

    def close(self) -> None:
        """Let go of the board."""
        if self._board is not None:
            with suppress(Exception):
                self._board.leave()


class _Connecting:
    """A board in the making."""

    def __init__(self, connect: Callable[[], Board]) -> None:
        self._connect = connect
        self._board: Board | None = None
        self._error: Exception | None = None
        self.is_over = threading.Event()
        threading.Thread(target=self._run, name="overlapscope-connecting", daemon=True).start()

    def board(self) -> Board:
        """What was made.

        Raises:
            Exception: whatever was in the way.
        """
        if self._board is None:
            raise self._error or ConnectionError("there is no store")
        return self._board

    def _run(self) -> None:
        try:
            self._board = self._connect()
        except Exception as error:
            self._error = error
        self.is_over.set()


def _carry_one(board: Board, round_: Round) -> None:
    with board.in_use():
        for key, value in round_.says.items():
            board.set(key, value)
        for key, value in round_.claims.items():
            round_.answers[key] = board.claim(key, value)
        for key in round_.asks:
            if (answer := board.read(key)) is not None:
                round_.answers[key] = answer
