"""Output for a reader who may leave before its end, as in ``overlapscope summary traces/ | head``."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def until_the_reader_leaves() -> Iterator[None]:
    """What is printed in here is printed as long as somebody reads it."""
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:
        # Nobody shall flush what is left, at exit.
        sys.stdout = None
