"""What this package says to people: records of the logger ``instrumented_ddp`` and of those below it, on stderr."""

from __future__ import annotations

import logging
import sys
from contextlib import suppress
from typing import Final

_LOGGER: Final = logging.getLogger("instrumented_ddp")


class _Console(logging.Handler):
    """Writes to what is ``sys.stderr`` then. A terminal that is gone stops nothing."""

    def emit(self, record: logging.LogRecord) -> None:
        with suppress(Exception):
            print(self.format(record), file=sys.stderr, flush=True)


def log_to_stderr() -> None:
    """Have warnings of this package printed, each after ``overlapscope:``. May be called twice."""
    if any(isinstance(handler, _Console) for handler in _LOGGER.handlers):
        return
    console = _Console(logging.WARNING)
    console.setFormatter(logging.Formatter("overlapscope: %(message)s"))
    _LOGGER.addHandler(console)
    _LOGGER.propagate = False
