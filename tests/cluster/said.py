"""What this process says to people while something goes on."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager


class _Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


@contextmanager
def said() -> Iterator[list[str]]:
    """A list that grows with each warning of ours."""
    ours, handler = logging.getLogger("instrumented_ddp"), _Lines()
    ours.addHandler(handler)
    try:
        yield handler.lines
    finally:
        ours.removeHandler(handler)
