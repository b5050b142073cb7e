"""What a command is busy with, on stderr: a bar on a terminal, and in a pipe a line for each phase that takes long."""

from __future__ import annotations

import sys
from threading import Timer
from typing import Final, Self

QUIET_S: Final = 5.0
"""A phase in a pipe is not worth a line before."""


class Progress:
    """Shows the phases of a command while it is entered.

    Example::

        with Progress() as progress:
            trace = read_trace(path, progress.count)
            progress.begin("dividing steps")
    """

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import Progress as Bar

        console = Console(stderr=True)
        self._is_terminal = console.is_terminal
        self._bar = Bar(console=console, transient=True, disable=not self._is_terminal)
        self._task = self._bar.add_task("reading logs", total=None)
        self._line: Timer | None = None

    def __enter__(self) -> Self:
        self._bar.start()
        self.begin("reading logs")
        return self

    def __exit__(self, *_: object) -> None:
        self._cancel_line()
        self._bar.stop()

    def begin(self, phase: str) -> None:
        """A phase begins, and with it the one before is over."""
        self._bar.reset(self._task, total=None, description=phase)
        self._cancel_line()
        if not self._is_terminal:
            self._line = Timer(QUIET_S, print, (f"overlapscope: {phase} ...",), {"file": sys.stderr, "flush": True})
            self._line.daemon = True
            self._line.start()

    def count(self, done: int, of: int) -> None:
        """So much of a phase is done: ranks, or bytes."""
        self._bar.update(self._task, completed=done, total=of)

    def _cancel_line(self) -> None:
        if self._line is not None:
            self._line.cancel()
            self._line = None
