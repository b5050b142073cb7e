"""Attribution of warnings from torch's constructor to the line of user code that calls it."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

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
