"""Abort of a job that can't continue, once all ranks know why: aborts collectives and raises in the training thread."""

from __future__ import annotations

import ctypes
import os
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Final

import torch.distributed as dist

from instrumented_ddp.recording.tcp_stats import endpoint, iter_tcp_sockets
from overlapscope.errors import OverlapScopeError
from overlapscope.trace.process_files import WATCHDOG_ABORT_STATUS

_RAISES_WITHIN_S: Final = 2.0
_ABORTS_WITHIN_S: Final = 1.0

_sentence = "the watchdog stopped this job"
_is_raised = threading.Event()


class IncidentError(OverlapScopeError):
    """Error raised in the training thread when the watchdog aborts the job."""

    def __init__(self, sentence: str | None = None) -> None:
        super().__init__(_sentence if sentence is None else sentence)
        _is_raised.set()


def raise_in_training(sentence: str) -> None:
    """Make the main thread raise ``IncidentError`` when it next runs Python code.

    If it waits, that is in the handlers of the error that ends its wait.

    Args:
        sentence: message of the error.
    """
    global _sentence
    _sentence = sentence
    ctypes.pythonapi.PyThreadState_SetAsyncExc(
        ctypes.c_ulong(threading.main_thread().ident or 0), ctypes.py_object(IncidentError)
    )


def abort_pending_collectives(listeners: set[str], before_exit: Callable[[], None]) -> None:
    """Abort what the main thread waits for, after ``raise_in_training``; end the process if it still does not raise.

    NCCL collectives are aborted. gloo has no abort: its connections to other ranks are shut down, as if these had died,
    and it raises its own error, which ``IncidentError`` follows.

    Args:
        listeners: endpoints at which ranks of this job accept connections, see ``listening_endpoints``.
        before_exit: called before the process is ended.
    """
    _abort(list(dist.distributed_c10d._world.pg_map))
    _shut_down(listeners)
    if not _is_raised.wait(_RAISES_WITHIN_S):
        before_exit()
        os._exit(WATCHDOG_ABORT_STATUS)


def _abort(groups: list[dist.ProcessGroup]) -> None:
    """Abort collectives of backends other than gloo, in parallel: an abort that hangs does not block the others."""

    def abort(group: dist.ProcessGroup) -> None:
        with suppress(Exception):  # destroyed already, or not supported
            if group.name() != "gloo":
                group.abort()

    threads = [threading.Thread(target=abort, args=(group,), daemon=True) for group in groups]
    deadline = time.monotonic() + _ABORTS_WITHIN_S
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))


def listening_endpoints() -> list[str]:
    """Return the endpoints at which this process accepts TCP connections."""
    return [
        endpoint(connection.getsockname())
        for connection in iter_tcp_sockets()
        if connection.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
    ]


def _shut_down(listeners: set[str]) -> None:
    """Shut down the connections to and from these endpoints."""
    for connection in iter_tcp_sockets():
        with suppress(OSError):
            ends = {endpoint(connection.getsockname()), endpoint(connection.getpeername())}
            if ends & listeners:
                connection.shutdown(socket.SHUT_RDWR)
