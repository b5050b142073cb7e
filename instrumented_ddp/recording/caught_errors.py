"""Exceptions that do not end this process, so that nobody may ever see them: ``caught_*.jsonl``.

They end a thread or a child process that the training waits for, or are caught and retried for ever. Nothing is wrapped
that a step calls; what is wrapped are the places where exceptions pass through:

- ``threading.excepthook``, and the end of a process that ``multiprocessing`` has forked;
- ``Future.set_exception``, for tasks whose result nobody may ask for;
- loggers that are given an exception, and ``traceback``, which formats those that are printed;
- backwards, and the forwards of wrapped models.

While the training stalls, the watchdog also looks at what the main thread is handling, as between two tries.
"""

from __future__ import annotations

import functools
import logging
import multiprocessing
import os
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from contextlib import AbstractContextManager, suppress
from dataclasses import asdict, replace
from multiprocessing import util
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import CodeType, TracebackType
from typing import Any, Final

import torch

from instrumented_ddp.collectives.call_sites import LoopTracker, find_user_line, list_traceback_frames
from overlapscope.diagnosis.evidence import CallSite, CaughtError, Failure, HowCaught
from overlapscope.trace.clocks import host_now_ns
from overlapscope.trace.json_files import dump_json_line, replace_text
from overlapscope.trace.schema import CAUGHT_ERRORS_FILE

OUR_THREADS: Final = "overlapscope-"
"""Beginning of the names of the threads of a recording."""
_MAX_ERRORS: Final = 32
"""Maximum number of distinct exceptions that are kept; of more, those that were raised longest ago are dropped."""
_MAX_TRACEBACK: Final = 4_000
_MAX_MESSAGE: Final = 1_000
"""Maximum numbers of characters."""
_WRITE_INTERVAL_S: Final = 0.5
"""Minimum time between two writes, if an exception is the same as before."""
_SAME_NS: Final = 2_000_000
"""Time within which an exception that is printed again is the same."""
_ON_PURPOSE: Final = ("KeyboardInterrupt", "SystemExit", "GeneratorExit", "IncidentError")
"""Exceptions by which something is ended on purpose."""


class CaughtErrors:
    """List of the distinct exceptions that this process has survived, and when each was raised last.

    Args:
        folder: folder of the rank. Forked processes write files of their own to it.
        loop: knows the step.
    """

    def __init__(self, folder: Path, loop: LoopTracker) -> None:
        self._folder = folder
        self._loop = loop
        self._pid = os.getpid()
        self._is_open = True
        self._begin()
        self._wrappers = [
            _wrap(threading, "excepthook", self._watch_threads),
            _wrap(Future, "set_exception", self._watch_futures),
            _wrap(logging.Logger, "handle", self._watch_loggers),
            _wrap(traceback.TracebackException, "__init__", self._watch_printed),
        ]
        if hasattr(torch.autograd, "_engine_run_backward"):
            self._wrappers.append(_wrap(torch.autograd, "_engine_run_backward", self._watch_backwards))
        util.register_after_fork(self, CaughtErrors._watch_process)

    def _begin(self) -> None:
        self._known: dict[Hashable, _Known] = {}
        self._lock = threading.Lock()
        self._noting = threading.local()
        self._written_s = 0.0

    @property
    def latest(self) -> tuple[CaughtError, ...]:
        """Return the distinct exceptions so far; that which was raised last is the last."""
        return tuple(one.error for one in list(self._known.values()))

    @property
    def of_main_thread(self) -> tuple[CaughtError, ...]:
        """Return those that the main thread has caught."""
        return tuple(one for one in self.latest if not one.thread and not one.process)

    def note(self, error: BaseException, how: HowCaught, *, is_printed: bool = False) -> None:
        """Note an exception that does not end this process. Never raises.

        Args:
            is_printed: it may have been noted where it was handled, a moment ago.
        """
        thread = threading.current_thread()
        if not thread.name.startswith(OUR_THREADS):
            self._note_once(error, how, thread, is_printed=is_printed)

    def note_being_handled(self) -> None:
        """Note what the main thread is handling at this moment. Called on another thread. Never raises."""
        with suppress(Exception):
            found: Any = sys._current_exceptions().get(threading.main_thread().ident)  # type: ignore[arg-type]
            error = found[1] if isinstance(found, tuple) else found  # a tuple before Python 3.12
            if error is not None:
                self._note_once(error, "caught", threading.main_thread(), is_seen=True)

    def _note_once(
        self,
        error: BaseException,
        how: HowCaught,
        thread: threading.Thread,
        *,
        is_seen: bool = False,
        is_printed: bool = False,
    ) -> None:
        if not self._is_open or getattr(self._noting, "is_active", False):
            return
        self._noting.is_active = True  # a traceback is formatted below, and a signal handler may come here as well
        try:
            if isinstance(error, Exception) and type(error).__name__ not in _ON_PURPOSE:
                self._note(error, how, thread, is_seen=is_seen, is_printed=is_printed)
        except Exception:
            return
        finally:
            self._noting.is_active = False

    def discard(self) -> None:
        """Begin a list of its own in a forked process."""
        self._begin()

    def close(self) -> None:
        """Write what has not been written, and watch no longer. May be called twice."""
        for owner, name, before, wrapper in self._wrappers:
            if getattr(owner, name, None) is wrapper:
                setattr(owner, name, before)
        if self._is_open:
            self._is_open = False
            with self._lock:
                self._write()

    def _note(
        self, error: Exception, how: HowCaught, thread: threading.Thread, *, is_seen: bool, is_printed: bool
    ) -> None:
        frames = list_traceback_frames(error.__traceback__)
        where = [(frame.f_code.co_filename, line) for frame, line in frames[:1]]
        key = type(error), thread.ident if how == "thread" else None, *where
        now_ns, is_child = host_now_ns(), os.getpid() != self._pid
        step = None if is_child else self._loop.describe()["step"]
        with self._lock:
            known = self._known.pop(key, None)
            if known is None:
                known = _Known(_describe(error, how, step, thread, self._loop, is_child=is_child))
            known.note(id(error), how, step, now_ns, is_seen=is_seen, is_printed=is_printed)
            self._known[key] = known
            if len(self._known) > _MAX_ERRORS:
                self._known.pop(next(iter(self._known)))
            count = known.error.count
            if count & (count - 1) == 0 or time.monotonic() >= self._written_s + _WRITE_INTERVAL_S:
                self._write()

    def _write(self) -> None:
        self._written_s = time.monotonic()
        path = self._folder / CAUGHT_ERRORS_FILE.format(os.getpid())
        if self._known:
            with suppress(OSError):
                replace_text(path, "".join(dump_json_line(asdict(one)) for one in self.latest))

    # -- where exceptions pass through ---------------------------------------------------------------------------

    def _watch_threads(self, before: Callable[[Any], None]) -> Callable[[Any], None]:
        @functools.wraps(before)
        def excepthook(args: Any, /) -> None:
            if args.exc_value is not None:
                self.note(args.exc_value, "thread")
            before(args)

        return excepthook

    def _watch_futures(self, before: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(before)
        def set_exception(future: Future[Any], exception: BaseException | None) -> None:
            if exception is not None:
                self.note(exception, "future")
            before(future, exception)

        return set_exception

    def _watch_loggers(self, before: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(before)
        def handle(logger: logging.Logger, record: logging.LogRecord) -> None:
            if isinstance(record.exc_info, tuple) and record.exc_info[1] is not None:
                self.note(record.exc_info[1], "caught", is_printed=True)
            before(logger, record)

        return handle

    def _watch_printed(self, before: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(before)
        def init(of: Any, kind: Any, error: Any, *args: Any, **kwargs: Any) -> None:
            is_chained = kwargs.get("_seen") is not None
            if not is_chained and isinstance(error, BaseException):
                self.note(error, _ENDS.get(_find_outermost(error), "caught"), is_printed=True)
            before(of, kind, error, *args, **kwargs)

        return init

    def _watch_backwards(self, before: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(before)
        def run_backward(*args: Any, **kwargs: Any) -> Any:
            try:
                return before(*args, **kwargs)
            except Exception as error:
                self.note(error, "backward")
                raise

        return run_backward

    def watching_forward(self, forward: AbstractContextManager[None]) -> AbstractContextManager[None]:
        """Return a context manager that also notes an exception that comes out of a forward."""
        return _WatchedForward(self, forward)

    def _watch_process(self) -> None:
        """Watch the end of a process that multiprocessing has just forked: it calls this while an error ends it."""
        util.Finalize(None, self._note_end_of_process, exitpriority=0)

    def _note_end_of_process(self) -> None:
        if (error := sys.exception()) is not None:
            self.note(error, "process")


class _WatchedForward:
    def __init__(self, caught: CaughtErrors, forward: AbstractContextManager[None]) -> None:
        self._caught = caught
        self._forward = forward

    def __enter__(self) -> None:
        self._forward.__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        if error is not None:
            self._caught.note(error, "forward")
        return self._forward.__exit__(kind, error, trace)


class _Known:
    """A distinct exception, and what tells whether it was raised again."""

    def __init__(self, error: CaughtError) -> None:
        self.error = replace(error, count=0, count_in_step=0)
        self._ways: Counter[HowCaught] = Counter()
        """How often it was noted in each way."""
        self._object = 0
        """Identity of the exception that was noted last. Later ones may have the same."""

    def note(
        self, identity: int, how: HowCaught, step: int | None, now_ns: int, *, is_seen: bool, is_printed: bool
    ) -> None:
        """Note that it passes through a place, or is seen where it is handled."""
        if is_seen and identity == self._object:
            return
        is_recent = now_ns - self.error.last_ns < _SAME_NS or how in _ENDS.values()
        is_printed_again = is_printed and identity == self._object and is_recent
        self._object = identity
        if not (is_printed_again and how in self._ways):
            self._ways[how] += 1
        error = self.error
        added = max(self._ways.values()) - error.count
        self.error = replace(
            error,
            how=max(error.how, how, key=_HOW.index),
            count=error.count + added,
            count_in_step=max(1, error.count_in_step + added if step == error.last_step else added),
            last_step=step,
            last_ns=now_ns,
        )


_ENDS: Final[dict[CodeType | None, HowCaught]] = {
    threading.Thread._bootstrap_inner.__code__: "thread",  # type: ignore[attr-defined]
    BaseProcess._bootstrap.__code__: "process",  # type: ignore[attr-defined]
}
"""What has ended with an exception that is printed, by the outermost code that it has come through. From Python 3.13 on
that is all that is seen of the end of a process."""


def _find_outermost(error: BaseException) -> CodeType | None:
    trace = error.__traceback__
    return None if trace is None else trace.tb_frame.f_code


_HOW: Final[tuple[HowCaught, ...]] = ("caught", "backward", "forward", "future", "process", "thread")
"""Ways, by how much each says: an exception that ends a thread is also printed."""


def _describe(
    error: Exception, how: HowCaught, step: int | None, thread: threading.Thread, loop: LoopTracker, *, is_child: bool
) -> CaughtError:
    failure = describe_failure(error, error.__traceback__, loop)
    name = "" if thread is threading.main_thread() else thread.name
    return CaughtError(
        how=how,
        failure=replace(failure, message=failure.message[:_MAX_MESSAGE], traceback=failure.traceback[-_MAX_TRACEBACK:]),
        thread=name,
        process=multiprocessing.current_process().name if is_child else "",
        step=step,
        last_step=step,
        last_ns=failure.time_ns,
    )


def describe_failure(error: BaseException, trace: TracebackType | None, loop: LoopTracker) -> Failure:
    """Describe an exception, with the innermost line of user code in its traceback."""
    frames = list_traceback_frames(trace)
    site = None
    if (found := find_user_line(frames)) is not None:
        code, line = found[0].f_code, found[1]
        site = CallSite(file=code.co_filename, line=line, function=code.co_qualname)
    return Failure(
        type=type(error).__qualname__,
        message=_message_of(error),
        call_site=site,
        traceback="".join(traceback.format_exception(error)),
        time_ns=host_now_ns(),
        has_begun_next_iteration=loop.has_begun_next_iteration(frames),
    )


def _message_of(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:  # raised by a user's exception class
        return "(its message can't be had)"


def _wrap(owner: Any, name: str, wrap: Callable[[Any], Any]) -> tuple[Any, str, Any, Any]:
    """Replace an attribute by a wrapper, and return what is needed to take it back."""
    before = getattr(owner, name)
    wrapper = wrap(before)
    setattr(owner, name, wrapper)
    return owner, name, before, wrapper
