"""Writes down how the processes end that this one has started: a launcher knows what ranks can't say of themselves.

torchrun, ``torch.multiprocessing.spawn`` and most other launchers start ranks by ``subprocess`` or ``multiprocessing``,
and end the others, by a signal, once one has failed. They are no ranks, so nothing of ours is imported into them before
there is something to write.
"""

from __future__ import annotations

import functools
import os
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from multiprocessing import popen_fork, popen_forkserver
from pathlib import Path
from typing import Any, Final

_MOST: Final = 10_000
"""Processes of which this is written down: a rank may start one after the other."""


def watch_children(folder: Path) -> None:
    """Write down from now on how the children of this process end.

    Args:
        folder: of the run.
    """
    exits = _ChildExits(folder)
    _then(subprocess.Popen, "poll", exits.look)
    _then(subprocess.Popen, "wait", exits.look)
    _then(popen_fork.Popen, "poll", exits.look)
    _then(popen_forkserver.Popen, "poll", exits.look)
    os.kill, os.killpg = exits.noting(os.kill), exits.noting(os.killpg)


class _ChildExits:
    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._told: dict[int, tuple[int, int]] = {}
        """When each was first sent a signal, and which, by process number."""
        self._seen: set[int] = set()

    def look(self, child: Any) -> None:
        """A child may have ended.

        Args:
            child: a ``Popen``, of ``subprocess`` or of ``multiprocessing``.
        """
        if child.returncode is None or child.pid in self._seen or len(self._seen) >= _MOST:
            return
        self._seen.add(child.pid)
        with suppress(Exception):  # the folder is gone, the disk is full, or this is a Python without us
            from overlapscope.trace.attempts import newest_attempt
            from overlapscope.trace.exits import write_exit

            told_ns, told_signal = self._told.get(child.pid, (None, None))
            folder = newest_attempt(self._folder)  # for launchers end one before the next
            write_exit(folder, child.pid, child.returncode, told_ns=told_ns, told_signal=told_signal)

    def noting(self, kill: Callable[[int, int], None]) -> Callable[[int, int], None]:
        """``os.kill`` or ``os.killpg``, whose signals are remembered; children in a group of their own lead it."""

        @functools.wraps(kill)
        def kill_and_remember(pid: int, number: int, /) -> None:
            if number and len(self._told) < _MOST:
                self._told.setdefault(pid, (time.monotonic_ns(), int(number)))  # host_now_ns, which is not imported
            kill(pid, number)

        return kill_and_remember


def _then(of: type, name: str, look: Callable[[Any], None]) -> None:
    """Have something look at an object after each call of one of its methods."""
    method = getattr(of, name)

    @functools.wraps(method)
    def method_and_look(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return method(self, *args, **kwargs)
        finally:
            look(self)

    setattr(of, name, method_and_look)
