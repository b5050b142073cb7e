"""Exit codes and signals of child processes: a launcher knows how a rank ended when the rank could not report it.

torchrun, ``torch.multiprocessing.spawn`` and most other launchers start ranks by ``subprocess`` or ``multiprocessing``,
and terminate the others by a signal once one has failed. Launchers are not ranks, so nothing else of this package is
imported into them until there is something to write.
"""

from __future__ import annotations

import functools
import os
import subprocess
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from multiprocessing import popen_fork, popen_forkserver
from pathlib import Path
from typing import Any, Final

_MAX_CHILDREN: Final = 10_000
"""Maximum number of processes recorded: a rank may start an unlimited number of them."""


def watch_children(folder: Path) -> None:
    """Record from now on how the children of this process end.

    Args:
        folder: folder of the run.
    """
    exits = _ChildExitRecorder(folder)
    _call_before(subprocess.Popen, "__init__", exits.note_rank)
    _call_after(subprocess.Popen, "poll", exits.record_exit)
    _call_after(subprocess.Popen, "wait", exits.record_exit)
    _call_after(popen_fork.Popen, "poll", exits.record_exit)
    _call_after(popen_forkserver.Popen, "poll", exits.record_exit)
    os.kill, os.killpg = exits.wrap_kill(os.kill), exits.wrap_kill(os.killpg)


class _ChildExitRecorder:
    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._sent_signals: dict[int, tuple[int, int]] = {}
        """Time and number of the first signal sent to each process, by process id."""
        self._recorded_pids: set[int] = set()

    def note_rank(self, child: Any, environment: Mapping[str, str] | None) -> None:
        """Note of which rank a child is to be, if this process is not itself that rank."""
        rank = "" if environment is None else environment.get("RANK", "")
        if rank.isdecimal() and rank != os.environ.get("RANK"):
            child.overlapscope_rank = int(rank)

    def record_exit(self, child: Any) -> None:
        """Record the exit of a child if it has ended.

        Args:
            child: a ``Popen`` of ``subprocess`` or of ``multiprocessing``.
        """
        if child.returncode is None or child.pid in self._recorded_pids or len(self._recorded_pids) >= _MAX_CHILDREN:
            return
        self._recorded_pids.add(child.pid)
        with suppress(Exception):  # the folder is gone, the disk is full, or this Python lacks the package
            from overlapscope.trace.folders import find_latest_attempt
            from overlapscope.trace.process_files import write_exit

            signaled_at_ns, signal_received = self._sent_signals.get(child.pid, (None, None))
            folder = find_latest_attempt(self._folder)  # for launchers end one attempt before the next
            write_exit(
                folder,
                child.pid,
                child.returncode,
                signaled_at_ns=signaled_at_ns,
                signal_received=signal_received,
                rank=getattr(child, "overlapscope_rank", None),
                is_of_multiprocessing=not isinstance(child, subprocess.Popen),
            )

    def wrap_kill(self, kill: Callable[[int, int], None]) -> Callable[[int, int], None]:
        """Wrap ``os.kill`` or ``os.killpg`` to remember its signals; a child with its own process group leads it."""

        @functools.wraps(kill)
        def kill_and_remember(pid: int, number: int, /) -> None:
            if number and len(self._sent_signals) < _MAX_CHILDREN:
                self._sent_signals.setdefault(
                    pid, (time.monotonic_ns(), int(number))
                )  # host_now_ns, which is not imported
            kill(pid, number)

        return kill_and_remember


def _call_before(of: type, name: str, note: Callable[[Any, Any], None]) -> None:
    """Patch a method of a class so that a function gets the object and the argument ``env`` before each call."""
    method = getattr(of, name)

    @functools.wraps(method)
    def note_and_call(self: Any, *args: Any, **kwargs: Any) -> Any:
        with suppress(Exception):
            note(self, kwargs.get("env"))
        return method(self, *args, **kwargs)

    setattr(of, name, note_and_call)


def _call_after(of: type, name: str, record_exit: Callable[[Any], None]) -> None:
    """Patch a method of a class so that a function gets the object after each call."""
    method = getattr(of, name)

    @functools.wraps(method)
    def method_and_look(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return method(self, *args, **kwargs)
        finally:
            record_exit(self)

    setattr(of, name, method_and_look)
