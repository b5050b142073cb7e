"""What keeps a recording from disturbing the training: guards against its errors, and a thread for periodic tasks."""

from __future__ import annotations

import functools
import logging
import math
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType
from typing import Concatenate, Final, ParamSpec, Protocol, TypeVar

P = ParamSpec("P")


class Guarded(Protocol):
    """An object of the recording that may fail while a model trains."""

    def disable_recording(self, error: Exception) -> None:
        """Report once what is lost from now on, and stop recording."""


T = TypeVar("T", bound=Guarded)


def never_raise(method: Callable[Concatenate[T, P], None]) -> Callable[Concatenate[T, P], None]:
    """Decorate a method called from the training so that it never raises: errors go to its ``disable_recording``."""

    @functools.wraps(method)
    def guarded(self: T, *args: P.args, **kwargs: P.kwargs) -> None:
        try:
            method(self, *args, **kwargs)
        except Exception as error:
            self.disable_recording(error)

    return guarded  # type: ignore[return-value] # it has the name and docstring of the method


def never_raising(callback: Callable[P, None], disable_recording: Callable[[Exception], None]) -> Callable[P, None]:
    """Wrap a function that is passed to torch so that it never raises.

    Args:
        disable_recording: called with the error.
    """

    def guarded(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            callback(*args, **kwargs)
        except Exception as error:
            disable_recording(error)

    return guarded


class suppress_recorder_errors:  # noqa: N801 # as contextlib.suppress, and cheaper than a generator
    """Suppress errors raised inside. May be entered any number of times.

    Args:
        disable_recording: called with the error.
    """

    def __init__(self, disable_recording: Callable[[Exception], None]) -> None:
        self._disable_recording = disable_recording

    def __enter__(self) -> None:
        pass

    def __exit__(self, _: type[BaseException] | None, error: BaseException | None, __: TracebackType | None) -> bool:
        if not isinstance(error, Exception):
            return False
        self._disable_recording(error)
        return True


_log: Final = logging.getLogger(__name__)


class PeriodicTask(Protocol):
    """A periodic task."""

    name: str
    """Name for the message when it fails; a task that fails is not run again."""

    def run(self) -> float:
        """Do what is due, briefly, and return the number of seconds until the next call."""

    def end(self) -> None:
        """Do the final work when the process ends."""


class BackgroundScheduler:
    """Runs each task when it is due. The thread starts with the first task.

    Args:
        rank: rank of this process, for messages.
        name: name of the thread. Tasks that may be held up for long by a device have a thread of their own.
    """

    def __init__(self, rank: int, name: str = "background") -> None:
        self._rank = rank
        self._name = name
        self._due_s: dict[PeriodicTask, float] = {}
        """Next due time of each task, by ``time.monotonic``; infinity while the task is running."""
        self._wake = threading.Event()
        self._closing = False
        self._thread: threading.Thread | None = None

    def add(self, task: PeriodicTask) -> None:
        """Add a task. It is due now."""
        self._due_s[task] = 0.0
        self._wake.set()
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=f"overlapscope-{self._name}", daemon=True)
            self._thread.start()

    def wake(self, task: PeriodicTask) -> None:
        """Make a task due now."""
        if task in self._due_s:
            self._due_s[task] = 0.0
            self._wake.set()

    def is_scheduled(self, task: PeriodicTask) -> bool:
        """Return whether a task is still scheduled: neither failed nor ended."""
        return task in self._due_s and self._thread is not None and self._thread.is_alive()

    def close(self, timeout_s: float) -> None:
        """End all tasks, and wait up to ``timeout_s`` for that. May be called twice."""
        self._closing = True
        self._wake.set()
        if self._thread is not None:
            self._thread.join(timeout_s)

    def _run(self) -> None:
        while not self._closing:
            now_s = time.monotonic()
            for task in [task for task, due_s in list(self._due_s.items()) if due_s <= now_s]:
                self._run_task(task)
            next_s = min(self._due_s.values(), default=math.inf)
            self._wake.wait(None if next_s == math.inf else max(0.0, next_s - time.monotonic()))
            self._wake.clear()
        for task in list(self._due_s):
            with suppress(Exception):  # nothing is left that could handle an error
                task.end()

    def _run_task(self, task: PeriodicTask) -> None:
        self._due_s[task] = math.inf
        try:
            pause_s = task.run()
        except Exception as error:
            del self._due_s[task]
            if not self._closing:
                _log.warning("rank %d: %s failed and is off: %r", self._rank, task.name, error)
        else:
            if self._due_s[task] == math.inf:  # otherwise it was woken meanwhile
                self._due_s[task] = time.monotonic() + pause_s
