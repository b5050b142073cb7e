"""Argument types that several commands share."""

from __future__ import annotations

import argparse

from overlapscope.errors import OverlapScopeError


def positive(text: str) -> int:
    """A whole number above 0."""
    number = int(text) if text.isdecimal() else 0
    if not number:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return number


def port(text: str) -> int:
    """A port to listen on, or 0 for any."""
    if not text.isdecimal() or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is not a port: give a number from 0 (any free port) to 65535")
    return int(text)


def steps(text: str) -> tuple[int | None, int | None]:
    """A range of steps like a slice of Python's: the first, and the first that is not meant any more."""
    from overlapscope.analysis.compare.side import steps_in

    try:
        return steps_in(text)
    except OverlapScopeError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
