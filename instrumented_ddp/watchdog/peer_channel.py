"""The channel between the watchdogs of a job: messages in a key-value store, the job's own or a shared folder.

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
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any, Final, Protocol

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store, _get_default_group, _get_default_store

from instrumented_ddp.recording.tcp_stats import duplicate_socket
from instrumented_ddp.watchdog.protocol import Messages
from overlapscope.errors import OverlapScopeError
from overlapscope.trace.environment import is_confidential
from overlapscope.trace.schema import WATCHDOG_FOLDER, rank_folder

_CONNECT_TIMEOUT_S: Final = 1.0
_LEAVE_TIMEOUT_S: Final = 0.3
_SILENT_EXCHANGES: Final = 2
"""Number of failed exchanges in a row after which the store counts as silent."""
_STORE_TIMEOUT: Final = timedelta(seconds=5)
_SOCKET_TIMEOUT: Final = struct.pack("ll", 1, 0)
"""Timeout of a read or write as a ``struct timeval``: seconds and microseconds."""
_ERRORS_ONLY: Final = 2
_UNUSED_PLACEHOLDER: Final = "nothing"
"""Placeholder that no message equals, as all messages are JSON."""


class KeyValueStore(Protocol):
    """A key-value store for messages. All errors are raised."""

    def in_use(self) -> AbstractContextManager[None]:
        """Return a context manager inside which messages may be written and read."""

    def set(self, key: str, value: str) -> Any:
        """Write or overwrite a message."""

    def get(self, key: str) -> bytes | None:
        """Return the message under a key; None if there is none."""

    def claim(self, key: str, value: str) -> bytes:
        """Write a message if the key is unused, and return the message that is stored afterwards."""

    def leave(self) -> None:
        """Declare that this rank no longer needs the store."""


def exchange_messages(store: KeyValueStore, messages: Messages) -> dict[str, bytes]:
    """Write, claim and read messages.

    Returns:
        The messages under the claimed and polled keys; keys that nobody has written are left out.
    """
    with store.in_use():
        for key, value in messages.writes.items():
            store.set(key, value)
        replies = {key: store.claim(key, value) for key, value in messages.claims.items()}
        for key in messages.keys_to_poll:
            if key not in replies and (reply := store.get(key)) is not None:
                replies[key] = reply
    return replies


class PeerChannel:
    """The channel of one rank, which connects to the job's store and switches to a folder if that is silent.

    A connection blocks no longer than its timeout. Connecting may block forever if the store's host is stopped, so that
    is done on a separate thread, which exits afterwards.

    Args:
        run_folder: folder of the recording.
        rank: rank of this process.
        world_size: returns the number of ranks of the job, even after its process group is gone.
        final_messages: returns the messages to write when this rank leaves a store.
        connect: connects to the job's store; the default is the store of the default process group.
    """

    def __init__(
        self,
        run_folder: Path,
        rank: int,
        world_size: Callable[[], int],
        final_messages: Callable[[], Mapping[str, str]],
        connect: Callable[[], KeyValueStore] | None = None,
    ) -> None:
        self._run_folder = run_folder
        self._rank = rank
        self._world_size = world_size
        self._final_messages = final_messages
        self._connect_to_job = connect or (lambda: connect_to_job_store(run_folder, rank, world_size()))
        self._store: KeyValueStore | None = None
        self._connecting: Future[KeyValueStore] | None = None
        self._group: Callable[[], dist.ProcessGroup | None] = lambda: None
        self._failures = 0
        self._is_in_use = False
        self._uses_folder = False
        self.error: Exception | None = None
        """Error of the latest exchange; None also if the store did not answer in time."""

    @property
    def is_silent(self) -> bool:
        """Return whether the store has not answered for some exchanges."""
        return self._failures >= _SILENT_EXCHANGES

    def has_peers(self) -> bool:
        """Return whether there are other ranks. A store of a previous or destroyed process group is left."""
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

    def exchange(self, messages: Messages, timeout_s: float = _CONNECT_TIMEOUT_S) -> dict[str, bytes] | None:
        """Write and read messages.

        Args:
            timeout_s: how long connecting may take.

        Returns:
            The replies; None if the store does not answer in time, or fails with ``error``.
        """
        self.error, self._is_in_use = None, True
        try:
            replies = exchange_messages(self._connected_store(timeout_s), messages)
        except TimeoutError:
            self._store = None
        except Exception as error:
            self.error, self._store = error, None
        else:
            self._failures = 0
            return replies
        self._failures += 1
        return None

    def switch_to_folder(self) -> bool:
        """Switch to a store in the run's folder.

        Returns:
            True if that is possible, because the folders of all ranks are visible in it.
        """
        if not self._uses_folder:
            if not _holds_all_ranks(self._run_folder, self._world_size()):
                return False
            self._uses_folder, self._store, self._connecting = True, None, None
        return True

    def leave(self) -> None:
        """Write the final messages and leave the store. Does not wait if the store does not answer at once."""
        if not self._is_in_use:
            return
        self.exchange(Messages(writes=self._final_messages()), _LEAVE_TIMEOUT_S)
        store, self._store, self._connecting, self._is_in_use = self._store, None, None, False
        if store is not None:
            with suppress(Exception):
                store.leave()

    def _connected_store(self, timeout_s: float) -> KeyValueStore:
        """Return the store, connected to if necessary.

        Raises:
            Exception: it can't be connected to; TimeoutError if that takes longer, and continues.
        """
        if self._store is None:
            self._connecting = self._connecting or _run_on_thread(self._connect)
            try:
                self._store = self._connecting.result(timeout_s)
            finally:
                if self._connecting.done():
                    self._connecting = None
        return self._store

    def _connect(self) -> KeyValueStore:
        if self._uses_folder:
            return FolderStore(self._run_folder / WATCHDOG_FOLDER, self._rank, self._world_size())
        return self._connect_to_job()


def _holds_all_ranks(run_folder: Path, world_size: int) -> bool:
    return all(rank_folder(run_folder, rank).exists() for rank in range(world_size))


def _run_on_thread(connect: Callable[[], KeyValueStore]) -> Future[KeyValueStore]:
    future: Future[KeyValueStore] = Future()

    def run() -> None:
        try:
            future.set_result(connect())
        except Exception as error:
            future.set_exception(error)

    threading.Thread(target=run, name="overlapscope-connecting", daemon=True).start()
    return future


def connect_to_job_store(run_folder: Path, rank: int, world_size: int) -> KeyValueStore:
    """Connect to the store of the default process group.

    A store that is a file only ever grows, so a folder beside it is used instead, or that of the recording if
    messages have to stay private.

    Raises:
        Exception: there is no store, or it can't be reached.
    """
    store = _get_default_store()
    backend = _without_prefixes(store)
    if isinstance(backend, dist.FileStore):  # type: ignore[attr-defined]
        path = backend.path  # type: ignore[attr-defined]
        if is_confidential():
            if not _holds_all_ranks(run_folder, world_size):
                raise OverlapScopeError("a file that other hosts see is no place for confidential messages")
            return FolderStore(run_folder / WATCHDOG_FOLDER, rank, world_size)
        return FolderStore(Path(f"{path}.{run_folder.name}.{WATCHDOG_FOLDER}"), rank, world_size)
    if hasattr(store, "clone"):  # a dedicated connection: the training may block in the other one
        store = store.clone()
        store.set_timeout(_STORE_TIMEOUT)
    return JobStore(store, f"overlapscope/watchdog/{run_folder.name}/")


def _without_prefixes(store: Store) -> Store:
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return store


class FolderStore:
    """A store with one file per message, in a folder that all ranks see.

    Args:
        folder: created if missing.
        rank: rank of this process.
        world_size: number of ranks that use the folder.

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
        self._write_beside(key, value).replace(self._folder / key)

    def get(self, key: str) -> bytes | None:
        """Return the message under a key; None if there is none."""
        with suppress(FileNotFoundError):
            return (self._folder / key).read_bytes()
        return None

    def claim(self, key: str, value: str) -> bytes:
        """Write a message if the key is unused, and return the message that is stored afterwards."""
        part = self._write_beside(key, value)
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

    def _write_beside(self, key: str, value: str) -> Path:
        part = self._folder / f".{key}.{os.getpid()}"
        part.write_text(value, encoding="utf-8")
        return part


class JobStore:
    """The job's store, with a key prefix that separates our messages from its other users.

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
        """Write or overwrite a message."""
        self._store.set(self._prefix + key, value)

    def get(self, key: str) -> bytes | None:
        """Return the message under a key, in one round trip.

        Nothing is written, as no message equals the placeholder.
        """
        value = bytes(self._store.compare_set(self._prefix + key, _UNUSED_PLACEHOLDER, _UNUSED_PLACEHOLDER))
        return None if value == _UNUSED_PLACEHOLDER.encode() else value

    def claim(self, key: str, value: str) -> bytes:
        """Write a message if the key is unused, and return the message that is stored afterwards."""
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
    found = re.match(r"TCPStore\(client=TCPClient\(SocketImpl\(fd=(\d+),", repr(_without_prefixes(store)))
    return int(found[1]) if found else None
