"""What this process prints: warnings of this package, and torch's, attributed to the line of the user's code."""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Final

_LOGGER: Final = logging.getLogger("instrumented_ddp")


class _StderrHandler(logging.Handler):
    """Writes to the current ``sys.stderr``. Errors, such as a closed terminal, are ignored."""

    def emit(self, record: logging.LogRecord) -> None:
        with suppress(Exception):
            print(self.format(record), file=sys.stderr, flush=True)


def log_to_stderr() -> None:
    """Print warnings of this package, each prefixed with ``overlapscope:``. May be called twice."""
    if any(isinstance(handler, _StderrHandler) for handler in _LOGGER.handlers):
        return
    console = _StderrHandler(logging.WARNING)
    console.setFormatter(logging.Formatter("overlapscope: %(message)s"))
    _LOGGER.addHandler(console)
    _LOGGER.propagate = False


_OWN_FRAMES: Final = 3
"""Frames of ``reattribute_warnings``, of contextlib, and of the function with the ``with`` statement."""


@contextmanager
def reattribute_warnings(*, callers: int) -> Iterator[None]:
    """Attribute warnings of torch's constructor to our caller's line instead of ours.

    Args:
        callers: number of frames from the function with the ``with`` statement up to that caller.
    """
    caught: list[warnings.WarningMessage] = []
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            yield
    finally:  # also if the body has raised
        for warning in caught:
            warnings.warn(warning.message, warning.category, stacklevel=_OWN_FRAMES + callers)
