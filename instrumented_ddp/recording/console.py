"""Console output of this package: records of the logger ``instrumented_ddp`` and its children, on stderr."""

from __future__ import annotations

import logging
import sys
from contextlib import suppress
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
