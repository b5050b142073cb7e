"""Stops a training that can't go on: ends its waits, and has the training thread raise ``IncidentError``."""

from __future__ import annotations

import ctypes
import os
import socket
import stat
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, Final

import torch.distributed as dist

from overlapscope.errors import OverlapScopeError

EXIT_CODE: Final = 70
"""Of a process that could not be brought to raise: it sleeps, or holds the GIL, in code that nothing interrupts."""

_RAISES_WITHIN_S: Final = 2.0
_OPEN_FILES: Final = "/proc/self/fd"

_sentence = "the watchdog has stopped this training"
_is_raised = threading.Event()


class IncidentError(OverlapScopeError):
    """A watchdog has found that the job can't go on, and was asked to stop it."""

    def __init__(self, sentence: str | None = None) -> None:
        super().__init__(_sentence if sentence is None else sentence)
        _is_raised.set()


def stop_training(sentence: str, listeners: set[str], last_act: Callable[[], None]) -> None:
    """Have the main thread raise ``IncidentError``; end the process if it does not.

    NCCL's waits are aborted. gloo has no such thing: its connections to other ranks are shut down, as if these had
    gone, and it raises an error of its own, which ``IncidentError`` follows on.

    Args:
        sentence: what the error says.
        listeners: endpoints at which ranks of this job accept connections, see ``listening``.
        last_act: called before the process is ended.
    """
    global _sentence
    _sentence = sentence
    # Takes effect when the thread next runs Python code: in the handlers of the error that ends its wait.
    ctypes.pythonapi.PyThreadState_SetAsyncExc(
        ctypes.c_ulong(threading.main_thread().ident or 0), ctypes.py_object(IncidentError)
    )
    for group in list(dist.distributed_c10d._world.pg_map):
        if group.name() != "gloo":
            with suppress(Exception):  # one that is no longer, or can't
                group.abort()
    _shut_down(listeners)
    if not _is_raised.wait(_RAISES_WITHIN_S):
        last_act()
        os._exit(EXIT_CODE)


def listening() -> list[str]:
    """Where this process accepts TCP connections."""
    return [
        _endpoint(connection.getsockname())
        for connection in _tcp_sockets()
        if connection.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
    ]


def _shut_down(listeners: set[str]) -> None:
    """End the connections to and from these endpoints."""
    for connection in _tcp_sockets():
        with suppress(OSError):
            ends = {_endpoint(connection.getsockname()), _endpoint(connection.getpeername())}
            if ends & listeners:
                connection.shutdown(socket.SHUT_RDWR)


def _tcp_sockets() -> Iterator[socket.socket]:
    """Duplicates of the process's TCP sockets, each closed when the next one is asked for."""
    for name in os.listdir(_OPEN_FILES):
        with suppress(OSError), _duplicate(int(name)) as connection:
            if connection.family in (socket.AF_INET, socket.AF_INET6) and connection.type == socket.SOCK_STREAM:
                yield connection


@contextmanager
def _duplicate(descriptor: int) -> Iterator[socket.socket]:
    if not stat.S_ISSOCK(os.fstat(descriptor).st_mode):
        raise OSError
    with socket.socket(fileno=os.dup(descriptor)) as connection:
        yield connection


def _endpoint(address: tuple[Any, ...]) -> str:
    return f"{address[0].removeprefix('::ffff:')}:{address[1]}"
