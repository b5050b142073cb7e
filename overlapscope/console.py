"""Progress on stderr: a bar on a terminal; in a pipe, one line for each phase that takes long."""

from __future__ import annotations

import sys
from threading import Timer
from typing import Final, Self

FIRST_LINE_AFTER_S: Final = 5.0
"""Seconds after which a phase gets a line when stderr is not a terminal."""


class Progress:
    """Progress display of a command: a context manager that shows its phases.

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
        """Begin a phase, which ends the one before."""
        self._bar.reset(self._task, total=None, description=phase)
        self._cancel_line()
        if not self._is_terminal:
            self._line = Timer(
                FIRST_LINE_AFTER_S, print, (f"overlapscope: {phase} ...",), {"file": sys.stderr, "flush": True}
            )
            self._line.daemon = True
            self._line.start()

    def count(self, done: int, of: int) -> None:
        """Set how much of the current phase is done, in ranks or bytes."""
        self._bar.update(self._task, completed=done, total=of)

    def _cancel_line(self) -> None:
        if self._line is not None:
            self._line.cancel()
            self._line = None
