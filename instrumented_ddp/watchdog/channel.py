"""Where watchdogs leave word for each other: the job's store, or a folder that all ranks can see.

A store answers at once, keeps who asks waiting for ever (its host is stopped), or fails (its host is gone), and only
the first of these is harmless. So it is asked on a thread of its own, by a connection of its own, and who has asked
waits for a moment and no longer.
"""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import socket
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cache
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Final, Protocol

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store, _get_default_store

from overlapscope.trace.format import WATCHDOG_FOLDER

_STORE_TIMEOUT: Final = timedelta(seconds=5)
_ERRORS_ONLY: Final = 2


class Board(Protocol):
    """Words by name. Whatever goes wrong is raised."""

    def set(self, key: str, value: str) -> Any:
        """Write, or write over."""

    def check(self, keys: list[str]) -> bool:
        """Whether all of them were written."""

    def get(self, key: str) -> bytes:
        """Read what was written."""

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        """Write if nothing was; what is there then."""

    def leave(self) -> None:
        """This rank needs it no more."""


class FolderBoard:
    """A file a word, in a folder that all ranks see.

    Args:
        folder: made if it is not there.
        rank: of this process.
        world_size: how many ranks use it.

    Raises:
        OSError: it can't be made.
    """

    def __init__(self, folder: Path, rank: int, world_size: int) -> None:
        self._folder = folder
        self._rank = rank
        self._world_size = world_size
        folder.mkdir(exist_ok=True)

    def set(self, key: str, value: str) -> None:
        """Nobody ever reads half of it."""
        part = self._folder / f".{key}.{os.getpid()}"
        part.write_text(value, encoding="utf-8")
        part.replace(self._folder / key)

    def check(self, keys: list[str]) -> bool:
        """Whether all of them were written."""
        return all((self._folder / key).exists() for key in keys)

    def get(self, key: str) -> bytes:
        """Read what was written."""
        return (self._folder / key).read_bytes()

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:  # noqa: ARG002 - as a store has it
        """Write if nothing was; what is there then."""
        part = self._folder / f".{key}.{os.getpid()}"
        part.write_text(desired, encoding="utf-8")
        with suppress(FileExistsError):
            os.link(part, self._folder / key)
        part.unlink()
        return self.get(key)

    def leave(self) -> None:
        """The last one who leaves takes the folder away."""
        with suppress(OSError):
            self.set(f"left.{self._rank}", "")
            if self.check([f"left.{rank}" for rank in range(self._world_size)]):
                shutil.rmtree(self._folder)


class _Named:
    """A store, with our words apart from those of others."""

    def __init__(self, store: Store, prefix: str) -> None:
        self._store = store
        self._prefix = prefix
        self._descriptor = _descriptor_of(store)

    def set(self, key: str, value: str) -> None:
        with self._quietly():
            self._store.set(self._prefix + key, value)

    def check(self, keys: list[str]) -> bool:
        with self._quietly():
            return bool(self._store.check([self._prefix + key for key in keys]))

    def get(self, key: str) -> bytes:
        with self._quietly():
            return bytes(self._store.get(self._prefix + key))

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        with self._quietly():
            return bytes(self._store.compare_set(self._prefix + key, expected, desired))

    def leave(self) -> None:
        """What is in a store goes with it."""

    @contextmanager
    def _quietly(self) -> Iterator[None]:
        """Torch prints a page of C++ frames when the process of a store ends, which at the end of a job is usual."""
        if self._descriptor is not None:
            with socket.socket(fileno=os.dup(self._descriptor)) as connection, suppress(BlockingIOError):
                if connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) == b"":
                    raise ConnectionResetError("its process has ended")
        level = _level_of_torchs_log()  # it may end just now
        before = level.value
        level.value = max(before, _ERRORS_ONLY)
        try:
            yield
        finally:
            level.value = before


@cache
def _level_of_torchs_log() -> ctypes.c_int:
    """From which severity on C++ prints; of this whole process, so it is changed for microseconds only."""
    try:
        library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
        return ctypes.c_int.in_dll(library, "FLAGS_caffe2_log_level")
    except (OSError, ValueError):  # torch was built in another way
        return ctypes.c_int()


def _descriptor_of(store: Store) -> int | None:
    """Of the connection to the process that holds the store; torch gives it away only by how it prints a store."""
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    found = re.match(r"TCPStore\(client=TCPClient\(SocketImpl\(fd=(\d+),", repr(store))
    return int(found[1]) if found else None


def connect(run_folder: Path, rank: int, world_size: int) -> Board:
    """The board on which this job's ranks find each other.

    A store that is a file only ever grows, so that there is a folder beside it.

    Raises:
        Exception: there is no store, or it can't be reached.
    """
    store = _get_default_store()
    file = _file_of(store)
    if file is not None:
        return FolderBoard(Path(f"{file}.{run_folder.name}.{WATCHDOG_FOLDER}"), rank, world_size)
    if hasattr(store, "clone"):  # a connection of our own: the training may wait in the other one
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
    """What one rank has to say and wants to know at one time."""

    says: Mapping[str, str]
    asks: Sequence[str]
    claims: Mapping[str, str] = field(default_factory=dict)
    """Keys that the first one writes and nobody else."""
    answers: dict[str, bytes] = field(default_factory=dict)
    """To ``asks`` and ``claims``; what nobody has written is missing."""
    error: Exception | None = None
    _over: threading.Event = field(default_factory=threading.Event)


class Channel:
    """Carries rounds to the board and back, on a thread of its own.

    Args:
        connect: makes the board, and makes it anew after a failure.
    """

    def __init__(self, connect: Callable[[], Board]) -> None:
        self._connect = connect
        self._rounds: SimpleQueue[Round | None] = SimpleQueue()
        self._pending: Round | None = None
        self._thread = threading.Thread(target=self._carry, name="overlapscope-channel", daemon=True)
        self._thread.start()

    def exchange(self, round_: Round, timeout_s: float) -> Round | None:
        """Say and ask.

        Returns:
            The round with its answers; None if the board does not answer in time, or is still busy with another one.
        """
        if self._pending is not None and not self._pending._over.is_set():
            return None
        self._pending = round_
        self._rounds.put(round_)
        return round_ if round_._over.wait(timeout_s) else None

    def close(self, timeout_s: float) -> None:
        """Let go of the board. A thread that it keeps waiting is left behind."""
        self._rounds.put(None)
        self._thread.join(timeout_s)

    def _carry(self) -> None:
        board: Board | None = None
        while (round_ := self._rounds.get()) is not None:
            try:
                board = board or self._connect()
                _carry_one(board, round_)
            except Exception as error:
                round_.error, board = error, None
            round_._over.set()
        if board is not None:
            board.leave()


def _carry_one(board: Board, round_: Round) -> None:
    for key, value in round_.says.items():
        board.set(key, value)
    for key, value in round_.claims.items():
        round_.answers[key] = board.compare_set(key, "", value)
    for key in round_.asks:
        if board.check([key]):
            round_.answers[key] = board.get(key)
