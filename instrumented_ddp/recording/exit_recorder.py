"""How this process ended, for finding out why other ranks wait: ``ended.json``.

A process that is killed or aborts writes nothing; the missing file indicates that.
"""

from __future__ import annotations

import atexit
import builtins
import functools
import multiprocessing
import os
import pickle
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from multiprocessing import util
from pathlib import Path
from types import TracebackType
from typing import Any, Final, NoReturn

from instrumented_ddp.collectives.call_sites import (
    LoopTracker,
    describe_frame,
    find_user_frame,
    iter_frames,
)
from instrumented_ddp.recording.caught_errors import OUR_THREADS, CaughtErrors, describe_failure
from overlapscope.diagnosis.evidence import CallSite, ExitCall, Failure
from overlapscope.trace.clocks import host_now_ns
from overlapscope.trace.json_files import write_json
from overlapscope.trace.process_files import describe_process
from overlapscope.trace.schema import ENDED_FILE

_EXITS: Final = ((sys, "exit"), (builtins, "exit"), (builtins, "quit"))
"""Functions that scripts call to exit; the last two exist only if ``site`` was imported."""
_MAX_EXIT_TEXT: Final = 2_000
"""Maximum number of characters kept of the argument of ``sys.exit``."""


class ExitRecorder:
    """Writes ``ended.json`` when the process ends.

    Args:
        folder: folder of the rank.
        loop: knows whether the user's loop has begun its next iteration.
        caught: exceptions that have not ended the process so far.
        on_exception: called with an exception that ends the process, after it was written.
    """

    def __init__(
        self, folder: Path, loop: LoopTracker, caught: CaughtErrors, on_exception: Callable[[Failure], None]
    ) -> None:
        self._path = folder / ENDED_FILE
        self._process = describe_process(folder)
        self._loop = loop
        self._caught = caught
        self._on_exception = on_exception
        self._pid, self._parent = os.getpid(), os.getppid()
        self._is_written = False
        self._unrecorded_because: str | None = None
        self._hook_before = sys.excepthook
        sys.excepthook = self._uncaught
        known: list[tuple[Any, str]] = [each for each in _EXITS if hasattr(*each)]
        wraps: dict[tuple[Any, str], Callable[[Any], Any]] = dict.fromkeys(known, self._wrap_exit)
        wraps[os, "_exit"] = self._wrap_immediate_exit
        self._exits_before: dict[tuple[Any, str], Any] = {each: getattr(*each) for each in wraps}
        self._exits = {each: wrap(self._exits_before[each]) for each, wrap in wraps.items()}
        for (module, name), noting in self._exits.items():
            setattr(module, name, noting)
        self.exit_call: ExitCall | None = None
        """Latest call of ``sys.exit`` or ``exit``."""
        self._file_of_spawn = _find_spawn_error_file()

    def note_recording_end(self, why: str) -> None:
        """Note that the process continues unrecorded, so that only its end will be known.

        Args:
            why: reason why the recording ended.
        """
        self._unrecorded_because = why
        self._write({"how": "unrecorded"})

    def close(self, *, is_detached: bool = False) -> None:
        """Write how the process, or its recording, ends. May be called twice.

        Args:
            is_detached: the recording ends, and the process goes on.
        """
        missed = self._find_missed_error()
        if sys.excepthook == self._uncaught:
            sys.excepthook = self._hook_before
        for (module, name), noting in self._exits.items():
            if getattr(module, name, None) is noting:
                setattr(module, name, self._exits_before[module, name])
        if self._is_written or os.getpid() != self._pid:
            return
        if is_detached:
            self._write_end({"how": "ended", "is_detached": True})
            return
        error = sys.exception()
        if error is not None and not isinstance(error, SystemExit) and _is_child_exiting():
            self._write_end(_failure_to_json(describe_failure(error, error.__traceback__, self._loop)))
            return
        text = _read_spawn_error(self._file_of_spawn)
        if missed is not None:
            self._on_failure(describe_failure(missed, missed.__traceback__, self._loop))
        elif text is None:
            has_lost_parent = self._file_of_spawn is not None and os.getppid() != self._parent
            self._write_end({"how": "ended", "has_lost_parent": has_lost_parent} | _exit_call_to_json(self.exit_call))
        else:  # torch.multiprocessing.spawn has caught it, and no hook was called
            # spawn exits with status 1 while it handles the exception.
            caught = None if self.exit_call is None else self.exit_call.caught
            kind, _, message = text.strip().splitlines()[-1].partition(": ")
            self._on_failure(caught or Failure(type=kind, message=message, traceback=text, time_ns=host_now_ns()))

    def _uncaught(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        try:
            if os.getpid() == self._pid and not self._is_written:
                self._on_failure(describe_failure(error, trace, self._loop))
        finally:
            self._hook_before(kind, error, trace)

    def _wrap_exit(self, before: Callable[..., NoReturn]) -> Callable[..., NoReturn]:
        """Wrap ``sys.exit`` or ``exit`` to note its calls, for which the interpreter has no hook."""

        @functools.wraps(before)
        def note_and_exit(*args: Any, **kwargs: Any) -> NoReturn:
            self._note_exit_call(next(iter([*args, *kwargs.values()]), None))
            before(*args, **kwargs)

        return note_and_exit

    def _wrap_immediate_exit(self, before: Callable[[int], NoReturn]) -> Callable[[int], NoReturn]:
        """Wrap ``os._exit``, after which nothing more is written, to write its call."""

        @functools.wraps(before)
        def write_and_exit(status: int) -> NoReturn:
            is_ours = threading.current_thread().name.startswith(OUR_THREADS)
            if os.getpid() == self._pid and not self._is_written and not is_ours:
                with suppress(Exception):
                    self._note_exit_call(status)
                    self._write_end({"how": "ended"} | _exit_call_to_json(self.exit_call))
                    if status and self.exit_call is not None and self.exit_call.caught is not None:
                        self._on_exception(self.exit_call.caught)
            before(status)

        return write_and_exit

    def _find_missed_error(self) -> BaseException | None:
        """Return what ended the process if our hook was replaced, as by ``rich``; Python keeps it for debuggers."""
        if sys.excepthook == self._uncaught or hasattr(sys, "ps1") or os.getpid() != self._pid:
            return None
        error = getattr(sys, "last_value", None)
        return error if isinstance(error, BaseException) and not isinstance(error, SystemExit) else None

    def _find_cause(self, status: object) -> Failure | None:
        """Return the exception that is being handled in a call of an exit function, or was caught in this step."""
        error = sys.exception() or self._find_missed_error()
        if error is not None:
            return describe_failure(error, error.__traceback__, self._loop)
        recent = [one for one in self._caught.of_main_thread if one.last_step == self._loop.describe()["step"]]
        return recent[-1].failure if recent and status not in (None, 0) else None

    def _note_exit_call(self, status: object) -> None:
        if threading.current_thread() is threading.main_thread():
            with suppress(Exception):
                caught = self._find_cause(status)
                # The interpreter prints a status that is not a number, and exits with 1.
                number = status if isinstance(status, int) else int(status is not None)
                frame = find_user_frame(sys._getframe(2))
                site = None if frame is None else CallSite(**describe_frame(frame))
                begun = (
                    self._loop.has_begun_next_iteration(iter_frames(frame))
                    if caught is None
                    else caught.has_begun_next_iteration
                )
                text = "" if status is None or isinstance(status, int) else str(status)[:_MAX_EXIT_TEXT]
                self.exit_call = ExitCall(
                    status=number & 0xFF, call_site=site, caught=caught, text=text, has_begun_next_iteration=begun
                )

    def _on_failure(self, failure: Failure) -> None:
        self._write_end(_failure_to_json(failure))
        self._on_exception(failure)

    def _write_end(self, what: dict[str, Any]) -> None:
        self._is_written = True
        self._write(what)

    def _write(self, what: dict[str, Any]) -> None:
        lost = {} if self._unrecorded_because is None else {"unrecorded_because": self._unrecorded_because}
        with suppress(OSError):
            write_json(self._path, {"time_ns": host_now_ns()} | self._process | self._loop.describe() | what | lost)


def call_at_exit(callback: Callable[[], None]) -> None:
    """Register a function to call at process exit, also in a process forked by multiprocessing, which skips atexit."""
    atexit.register(callback)
    if multiprocessing.parent_process() is not None:
        util.Finalize(None, callback, exitpriority=0)


def _is_child_exiting() -> bool:
    """Return whether multiprocessing is about to report the current exception, for which it calls no hook."""
    return multiprocessing.parent_process() is not None and util.is_exiting()


def _failure_to_json(failure: Failure) -> dict[str, Any]:
    """Return the fields of a failure for ``ended.json``."""
    fields = {"type": failure.type, "message": failure.message, "traceback": failure.traceback}
    site = {} if failure.call_site is None else asdict(failure.call_site)
    return {
        "how": "exception",
        **fields,
        **site,
        "time_ns": failure.time_ns,
        "has_begun_next_iteration": failure.has_begun_next_iteration,
    }


def _exit_call_to_json(call: ExitCall | None) -> dict[str, Any]:
    """Return the fields of an exit call for ``ended.json``."""
    if call is None:
        return {}
    site = {} if call.call_site is None else asdict(call.call_site)
    caught = {} if call.caught is None else {"caught": _failure_to_json(call.caught)}
    text = {"exit_text": call.text} if call.text else {}
    return (
        {"exit_status": call.status, "has_begun_next_iteration": call.has_begun_next_iteration} | site | caught | text
    )


def _find_spawn_error_file() -> str | None:
    """Return the file for exceptions caught by ``torch.multiprocessing.spawn``, if that started this process."""
    frame = sys._getframe()
    while frame is not None:
        if frame.f_code.co_name == "_wrap" and frame.f_globals.get("__name__") == "torch.multiprocessing.spawn":
            name = frame.f_locals.get("error_file")
            return name if isinstance(name, str) else None
        frame = frame.f_back  # type: ignore[assignment]
    return None


def _read_spawn_error(path: str | None) -> str | None:
    try:
        content = Path(path).read_bytes() if path else b""
        text = pickle.loads(content) if content else None  # this process wrote it
    except Exception:
        return None
    return text if isinstance(text, str) and text.strip() else None
