"""Message boards over which watchdogs communicate: the job's store, or a folder on a shared file system.

A store answers at once, blocks its caller forever (its host is stopped), or fails (its host is gone), and only the
first is harmless. So it is accessed over a separate connection that has a timeout.
"""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import socket
import struct
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any, Final, Literal, Protocol

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store, _get_default_group, _get_default_store

from instrumented_ddp.recording.tcp_stats import duplicate_socket
from overlapscope.diagnosis.evidence import ExitCall, Failure
from overlapscope.diagnosis.order_difference import NO_POSITION, EntryDifference
from overlapscope.diagnosis.replica_drift import PassSummary
from overlapscope.diagnosis.verdict import Verdict
from overlapscope.trace.schema import WATCHDOG_FOLDER

_STORE_TIMEOUT: Final = timedelta(seconds=5)
_SOCKET_TIMEOUT: Final = struct.pack("ll", 1, 0)
"""Timeout of a read or write as a ``struct timeval``: seconds and microseconds."""
_ERRORS_ONLY: Final = 2
_UNUSED_PLACEHOLDER: Final = "nothing"
"""Placeholder that no message equals, as all messages are JSON."""


class Board(Protocol):
    """A key-value board for messages. All errors are raised."""

    def in_use(self) -> AbstractContextManager[None]:
        """Return a context manager inside which messages may be written and read."""

    def set(self, key: str, value: str) -> Any:
        """Write or overwrite a message."""

    def read(self, key: str) -> bytes | None:
        """Return the message under a key; None if there is none."""

    def claim(self, key: str, value: str) -> bytes:
        """Write a message if the key is unused, and return the message that is stored afterwards."""

    def leave(self) -> None:
        """Declare that this rank no longer needs the board."""


class FolderBoard:
    """A board with one file per message, in a folder that all ranks see.

    Args:
        folder: created if missing.
        rank: rank of this process.
        world_size: number of ranks that use the board.

    Raises:
        OSError: the folder can't be created.
    """

    def __init__(self, folder: Path, rank: int, world_size: int) -> None:
        self._folder = folder
        self._rank = rank
        self._world_size = world_size
        folder.mkdir(exist_ok=True)

    def in_use(self) -> AbstractContextManager[None]:
        """Return a context manager that does nothing: a folder is always accessible."""
        return nullcontext()

    def set(self, key: str, value: str) -> None:
        """Write a message atomically, so that no reader ever sees a partial one."""
        part = self._folder / f".{key}.{os.getpid()}"
        part.write_text(value, encoding="utf-8")
        part.replace(self._folder / key)

    def read(self, key: str) -> bytes | None:
        """Return the message under a key; None if there is none."""
        with suppress(FileNotFoundError):
            return (self._folder / key).read_bytes()
        return None

    def claim(self, key: str, value: str) -> bytes:
        """Write a message if the key is unused, and return the message that is stored afterwards."""
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


class _StoreBoard:
    """A board in a store, with a key prefix that separates our messages from other users of the store.

    Args:
        store: store over a dedicated connection, on which socket timeouts are set: torch has none for most store
            operations (``recvBytes`` in torch/csrc/distributed/c10d/Utils.hpp raises when the socket's own expires).
        prefix: prefix of our keys.
    """

    def __init__(self, store: Store, prefix: str) -> None:
        self._store = store
        self._prefix = prefix
        self._descriptor = _descriptor_of(store)
        if self._descriptor is not None:
            with duplicate_socket(self._descriptor) as connection:
                for limit in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
                    connection.setsockopt(socket.SOL_SOCKET, limit, _SOCKET_TIMEOUT)

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Silence torch, which prints a page of C++ frames when a store's process exits, as at the end of a job.

        Raises:
            TimeoutError: the store does not answer; the connection must not be used again.
        """
        if self._descriptor is not None:
            with duplicate_socket(self._descriptor) as connection, suppress(BlockingIOError):
                if connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) == b"":
                    raise ConnectionResetError("its process has ended")
        level = _level_of_torchs_log()  # the store may close at any moment
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
        """Return the message under a key, in one round trip.

        Nothing is written, as no message equals the placeholder.
        """
        value = bytes(self._store.compare_set(self._prefix + key, _UNUSED_PLACEHOLDER, _UNUSED_PLACEHOLDER))
        return None if value == _UNUSED_PLACEHOLDER.encode() else value

    def claim(self, key: str, value: str) -> bytes:
        return bytes(self._store.compare_set(self._prefix + key, "", value))

    def leave(self) -> None:
        """Do nothing, as a store's content vanishes with the store."""


@cache
def _level_of_torchs_log() -> ctypes.c_int:
    """Return torch's C++ log level, which is process-wide and therefore changed for microseconds only."""
    try:
        library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
        return ctypes.c_int.in_dll(library, "FLAGS_caffe2_log_level")
    except (OSError, ValueError):  # torch was built differently
        return ctypes.c_int()


def _descriptor_of(store: Store) -> int | None:
    """Return the file descriptor of the connection to a TCP store, which torch reveals in the store's repr only."""
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    found = re.match(r"TCPStore\(client=TCPClient\(SocketImpl\(fd=(\d+),", repr(store))
    return int(found[1]) if found else None


def connect(run_folder: Path, rank: int, world_size: int) -> Board:
    """Return the board that this job's ranks share.

    A store that is a file only ever grows, so a folder beside it is used instead.

    Raises:
        Exception: there is no store, or it can't be reached.
    """
    store = _get_default_store()
    file = _file_of(store)
    if file is not None:
        return FolderBoard(Path(f"{file}.{run_folder.name}.{WATCHDOG_FOLDER}"), rank, world_size)
    if hasattr(store, "clone"):  # a dedicated connection: the training may block in the other one
        store = store.clone()
        store.set_timeout(_STORE_TIMEOUT)
    return _StoreBoard(store, f"overlapscope/watchdog/{run_folder.name}/")


def sees_all_ranks(run_folder: Path, world_size: int) -> bool:
    """Return whether the folders of all ranks are visible here."""
    return all((run_folder / f"rank_{rank}").exists() for rank in range(world_size))


def _file_of(store: Store) -> str | None:
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return str(store.path) if isinstance(store, dist.FileStore) else None  # type: ignore[attr-defined]


@dataclass
class Round:
    """The messages that one rank writes and reads in one exchange with the board."""

    writes: Mapping[str, str]
    keys_to_poll: Sequence[str]
    claims: Mapping[str, str] = field(default_factory=dict)
    """Messages under keys that only the first rank to claim them may write."""
    replies: dict[str, bytes] = field(default_factory=dict)
    """Replies to ``keys_to_poll`` and ``claims``; keys that nobody has written are left out."""
    error: Exception | None = None


class Channel:
    """A connection to the board that carries out rounds on the calling thread.

    Our connection blocks no longer than its timeout, so rounds end. Connecting may block forever if the store's host is
    stopped, so that is done on a separate thread, which exits afterwards.

    Args:
        connect: creates the board, and creates it again after a failure.
    """

    def __init__(self, connect: Callable[[], Board]) -> None:
        self._connect = connect
        self._board: Board | None = None
        self._connecting: _Connecting | None = None

    def exchange(self, round_: Round, timeout_s: float) -> Round | None:
        """Write and read the messages of a round.

        Args:
            timeout_s: how long connecting may take.

        Returns:
            The round with its replies or an error; None if the board does not answer in time.
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
        """Leave the board."""
        if self._board is not None:
            with suppress(Exception):
                self._board.leave()


class _Connecting:
    """A connection attempt on a thread of its own."""

    def __init__(self, connect: Callable[[], Board]) -> None:
        self._connect = connect
        self._board: Board | None = None
        self._error: Exception | None = None
        self.is_over = threading.Event()
        threading.Thread(target=self._run, name="overlapscope-connecting", daemon=True).start()

    def board(self) -> Board:
        """Return the board that the attempt has created.

        Raises:
            Exception: the reason why connecting failed.
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
        for key, value in round_.writes.items():
            board.set(key, value)
        for key, value in round_.claims.items():
            round_.replies[key] = board.claim(key, value)
        for key in round_.keys_to_poll:
            if (answer := board.read(key)) is not None:
                round_.replies[key] = answer


# Communication of this rank with the others: over the job's store or, if that fails, a shared folder.

_CONNECTS_WITHIN_S: Final = 1.0
_SILENT_ROUNDS: Final = 2
_FAREWELL_WITHIN_S: Final = 0.3


class PeerChannel:
    """Rounds over a board, for as long as there is a default process group.

    Args:
        run_folder: folder of the recording.
        rank: rank of this process.
        world_size: returns the number of ranks of the job, even after its process group is gone.
        farewell: returns the messages to write when this rank leaves a board.
    """

    def __init__(
        self, run_folder: Path, rank: int, world_size: Callable[[], int], farewell: Callable[[], dict[str, str]]
    ) -> None:
        self._run_folder = run_folder
        self._rank = rank
        self._world_size = world_size
        self._farewell = farewell
        self._channel: Channel | None = None
        self._group: Callable[[], dist.ProcessGroup | None] = lambda: None
        self._unanswered = 0
        self._uses_folder = False

    def is_possible(self) -> bool:
        """Return whether there are other ranks. A board of a previous or destroyed process group is left."""
        try:
            group = _get_default_group()
        except ValueError:  # there is none, or not any more
            self.leave()
            return False
        if group.size() == 1:
            self.leave()
            return False
        if self._group() is not group:  # of another store
            self.leave()
            self._group = weakref.ref(group)
        return True

    def exchange(self, round_: Round) -> Round | None:
        """Write and read the messages of a round.

        Returns:
            The round, with its replies or an error; None if the board does not answer in time.
        """
        if self._channel is None:
            self._channel = Channel(self._connect)
        done = self._channel.exchange(round_, _CONNECTS_WITHIN_S)
        self._unanswered = 0 if done is not None and done.error is None else self._unanswered + 1
        return done

    @property
    def is_silent(self) -> bool:
        """Return whether the board has not answered for some rounds."""
        return self._unanswered >= _SILENT_ROUNDS

    def switch_to_folder(self) -> bool:
        """Switch to a board in the run's folder.

        Returns:
            True if that is possible, because all ranks have their folders in it.
        """
        if not self._uses_folder:
            if not sees_all_ranks(self._run_folder, self._world_size()):
                return False
            self._uses_folder = True
            self._channel = None
        return True

    def leave(self) -> None:
        """Write the final messages and leave the board. Does not wait if the board does not answer at once."""
        channel, self._channel = self._channel, None
        if channel is None:
            return
        channel.exchange(Round(writes=self._farewell(), keys_to_poll=()), _FAREWELL_WITHIN_S)
        channel.close()

    def _connect(self) -> Board:
        if self._uses_folder:
            return FolderBoard(self._run_folder / WATCHDOG_FOLDER, self._rank, self._world_size())
        return connect(self._run_folder, self._rank, self._world_size())


# Messages between watchdogs, serialized as JSON (``overlapscope.trace.dataclass_json``) like ``Card``.


@dataclass(frozen=True, kw_only=True)
class LogHead:
    """How far a rank is in a group's log, with the running hashes there."""

    latest: int
    hash: int
    names_hash: int
    batch: int = NO_POSITION
    """Batch number of the latest entry, if that is a bucket."""


@dataclass(frozen=True, kw_only=True)
class EntriesRequest:
    """A request to a neighbor for some of its log entries."""

    number: int
    """Number of the request, by which its reply is recognized."""
    group: str
    first: int
    last: int


@dataclass(frozen=True, kw_only=True)
class EntriesReply:
    """The log entries that a neighbor has requested."""

    number: int
    rows: tuple[tuple[int, ...], ...]
    """Rows of the log, with the columns of ``COMPARED_DTYPE``."""


@dataclass(frozen=True, kw_only=True)
class Heartbeat:
    """The heartbeat: what a rank publishes for its neighbors periodically."""

    rank: int
    host: str
    host_id: str
    """Identity of the host: processes that have it in common see each other in /proc, and share a clock."""
    pid: int
    start_ticks: int
    """Start time of the process in clock ticks, which identifies it together with ``pid``."""
    time_ns: int
    step: int
    phase: str | None = None
    since_ns: int = 0
    step_time_ns: int | None = None
    how: Literal["runs", "ended", "failed"] = "runs"
    unrecorded_because: str | None = None
    failure: Failure | None = None
    exit_call: ExitCall | None = None
    rss_bytes: int = 0
    memory_limit_bytes: int | None = None
    dumps_stacks: bool = False
    """True if faulthandler dumps stacks on a signal in this process."""
    heads: dict[str, LogHead] = field(default_factory=dict)
    """Latest log entries, by group."""
    requests: dict[int, EntriesRequest] = field(default_factory=dict)
    """Requests to neighbors, by the rank that is asked."""
    replicas: dict[str, PassSummary] = field(default_factory=dict)
    """Latest fingerprints of each model, by key."""


@dataclass(frozen=True, kw_only=True)
class DivergenceLocation:
    """A divergence: the entry at which the ranks of a group begin to differ, found while the job was running."""

    group: str
    difference: EntryDifference


@dataclass(frozen=True, kw_only=True)
class Alarm:
    """A condition on one rank that makes all ranks investigate."""

    by: int
    why: Literal["failure", "not reduced", "stall", "patience", "difference", "replicas differ"]
    """Reason of the alarm; ``patience``: the stall is so long that the job may be aborted for it."""
    divergence: DivergenceLocation | None = None
    """Location of the divergence, if that is the reason."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The outcome of an investigation, as published by the judge."""

    judge: int
    verdict: Verdict
    message: str
    """Complete text of the report."""
    listening: tuple[str, ...] = ()
    """Listening endpoints of all ranks, if the job may have to be aborted."""
    undecided_time_ns: int | None = None
    """Remaining time until a stall counts as a fault, if it doesn't by now: ``Facts.undecided_time_ns``."""
