"""Warnings of torch's constructor, which are about the line that calls it."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

_FRAMES_OF_OURS: Final = 3
"""``warnings_to`` itself, contextlib's, and the function with the ``with`` statement."""


@contextmanager
def warnings_to(*, callers: int) -> Iterator[None]:
    """Torch's constructor warns of its caller's line, which is one of ours: pass its warnings on to our caller's.

    Args:
        callers: how far up that is, from the function with the ``with`` statement.
    """
    caught: list[warnings.WarningMessage] = []
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            yield
    finally:  # also if it has raised
        for warning in caught:
            warnings.warn(warning.message, warning.category, stacklevel=_FRAMES_OF_OURS + callers)
