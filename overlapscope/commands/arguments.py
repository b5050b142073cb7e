"""Argument types that several commands share."""

from __future__ import annotations

import argparse


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
