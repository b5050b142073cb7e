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
from collections.abc import Callable
from contextlib import suppress
from multiprocessing import popen_fork, popen_forkserver
from pathlib import Path
from typing import Any, Final

_MOST: Final = 10_000
"""Maximum number of processes recorded: a rank may start an unlimited number of them."""


def watch_children(folder: Path) -> None:
    """Record from now on how the children of this process end.

    Args:
        folder: folder of the run.
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
        """Time and number of the first signal sent to each process, by process id."""
        self._seen: set[int] = set()

    def look(self, child: Any) -> None:
        """Record the exit of a child if it has ended.

        Args:
            child: a ``Popen`` of ``subprocess`` or of ``multiprocessing``.
        """
        if child.returncode is None or child.pid in self._seen or len(self._seen) >= _MOST:
            return
        self._seen.add(child.pid)
        with suppress(Exception):  # the folder is gone, the disk is full, or this Python lacks the package
            from overlapscope.trace.attempts import newest_attempt
            from overlapscope.trace.exits import write_exit

            told_ns, told_signal = self._told.get(child.pid, (None, None))
            folder = newest_attempt(self._folder)  # for launchers end one attempt before the next
            write_exit(folder, child.pid, child.returncode, told_ns=told_ns, told_signal=told_signal)

    def noting(self, kill: Callable[[int, int], None]) -> Callable[[int, int], None]:
        """Wrap ``os.kill`` or ``os.killpg`` to remember its signals; a child with its own process group leads it."""

        @functools.wraps(kill)
        def kill_and_remember(pid: int, number: int, /) -> None:
            if number and len(self._told) < _MOST:
                self._told.setdefault(pid, (time.monotonic_ns(), int(number)))  # host_now_ns, which is not imported
            kill(pid, number)

        return kill_and_remember


def _then(of: type, name: str, look: Callable[[Any], None]) -> None:
    """Patch a method of a class so that a function gets the object after each call."""
    method = getattr(of, name)

    @functools.wraps(method)
    def method_and_look(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return method(self, *args, **kwargs)
        finally:
            look(self)

    setattr(of, name, method_and_look)
