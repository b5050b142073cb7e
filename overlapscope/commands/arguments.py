"""Argument types that several commands share."""

from __future__ import annotations

import argparse


def positive(text: str) -> int:
    """A whole number above 0."""
    number = int(text) if text.isdecimal() else 0
    if not number:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return number
